"""DuotoneConfig loads models that follow a recipe. DuotoneCallback converts, follows a schedule and resumes."""

import json

import pytest
import torch
from causal import assert_same_bits, batch, llama
from packages import ON_CPU, require

import duotone
from duotone.recipes import Phase, Rule, Schedule

transformers = require("transformers")
from duotone.integrations.transformers import DuotoneCallback, DuotoneConfig  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore:.*of this update is lost")  # Trainer's optimizer keeps no masters
RECIPES = ["mxfp8", "nvfp4", "fp8-delayed"]
AUTO = transformers.AutoModelForCausalLM


@pytest.fixture
def plain(tmp_path):
    """The folder of a plain model."""
    llama().save_pretrained(tmp_path / "plain")
    return tmp_path / "plain"


def load(path, recipe="mxfp8", **options):
    return AUTO.from_pretrained(path, quantization_config=DuotoneConfig(recipe, **options), output_loading_info=True)


def step(model, at: int) -> torch.Tensor:
    loss = model.train()(input_ids=batch(at), labels=batch(at)).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("name", ["mxfp8", "custom"])
def test_a_config_comes_back_from_its_own_dictionary(name: str) -> None:
    custom = duotone.RuleRecipe(rules=(duotone.recipes.Rule(format="mxfp8_e4m3"),), title="custom")
    config = DuotoneConfig(custom if name == "custom" else name, quantize_parameters=True)
    again = DuotoneConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again.recipe == config.recipe and again.recipe.name == name
    assert again.rules == config.rules and again.quantize_parameters


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_loaded_model_is_the_converted_one(recipe: str, plain) -> None:
    model, info = load(plain, recipe)
    converted = duotone.convert(llama(), recipe)
    assert not any(info.values())
    assert str(duotone.plan(model.train())) == str(duotone.plan(converted))
    duotone.load_rng_state(converted, duotone.rng_state(model))
    for at in range(2):
        assert torch.equal(step(model, at), step(converted, at))
    assert_same_bits(*({name: p.grad for name, p in m.named_parameters()} for m in (model, converted)))


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("quantize_parameters", [False, True])
def test_a_model_on_meta_has_its_plan_and_no_values(recipe: str, quantize_parameters: bool, plain, tmp_path) -> None:
    """Seeds and scales of its checkpoint ended in an error of torch."""
    model, _ = load(plain, recipe, quantize_parameters=quantize_parameters)
    model.train()(input_ids=batch(0), labels=batch(0)).loss.backward()
    model.save_pretrained(tmp_path)
    options = {"quantize_parameters": quantize_parameters, "recipe": recipe}
    outline = AUTO.from_pretrained(tmp_path, quantization_config=DuotoneConfig(**options), device_map={"": "meta"})
    assert all(parameter.is_meta for parameter in outline.parameters())
    expected = [(row.module, row.gemm, row.a, row.b) for row in duotone.plan(model)]
    assert [(row.module, row.gemm, row.a, row.b) for row in duotone.plan(outline)] == expected
    states = duotone.rng_state(model), duotone.recipe_state(model)
    for function in (duotone.rng_state, duotone.recipe_state if states[1] else duotone.rng_state):
        with pytest.raises(duotone.UserError, match=r"is on meta, where it has no value: call to_empty"):
            function(outline)
    with pytest.raises(duotone.UserError, match="is on meta"):  # the copy to meta lost them without a word
        duotone.load_rng_state(outline, states[0])


def test_rules_and_quantized_parameters_are_those_of_the_config(plain) -> None:
    rules = (Rule(module="*.down_proj", format="identity"),)
    model, _ = load(plain, rules=rules, quantize_parameters=True)
    assert not isinstance(model.lm_head.weight, duotone.QuantizedTensor)
    mlp = model.model.layers[0].mlp
    assert isinstance(mlp.up_proj.weight, duotone.QuantizedTensor)
    assert not isinstance(mlp.down_proj.weight, duotone.QuantizedTensor)
    assert torch.isfinite(model(batch(0)).logits).all()


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_saved_is_a_plain_model_that_keeps_seeds_and_delayed_scales(recipe: str, plain, tmp_path) -> None:
    model, _ = load(plain, recipe)
    for at in range(2):
        step(model, at)
    model.save_pretrained(tmp_path / "x", max_shard_size="100KB")
    assert "quantization_config" not in json.loads((tmp_path / "x" / "config.json").read_text())
    same, info = AUTO.from_pretrained(tmp_path / "x", output_loading_info=True)
    assert not any(info.values()) and type(same.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert_same_bits(dict(same.named_parameters()), dict(model.named_parameters()))
    again, info = load(tmp_path / "x", recipe)
    assert not any(info.values())
    assert_same_bits(duotone.rng_state(again), duotone.rng_state(model))
    assert_same_bits(duotone.recipe_state(again), duotone.recipe_state(model))
    assert torch.equal(step(again, 2), step(model, 2))
    other, _ = load(tmp_path / "x", "fp8-current")  # another recipe starts with states of its own
    assert torch.isfinite(step(other, 0))


def test_saved_scales_have_the_name_of_the_recipe_that_the_model_follows(plain, tmp_path) -> None:
    model, _ = load(plain, "nvfp4")
    step(duotone.convert(model, "fp8-delayed"), 0)
    model.save_pretrained(tmp_path / "x")
    again, _ = load(tmp_path / "x", "fp8-delayed")
    assert_same_bits(duotone.recipe_state(again), duotone.recipe_state(model))
    assert torch.isfinite(step(load(tmp_path / "x", "nvfp4")[0], 0))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_checkpoint_loads_under_another_head_with_the_states_of_what_both_have(recipe: str, plain, tmp_path) -> None:
    model, _ = load(plain, recipe)
    for at in range(2):
        step(model, at)
    model.save_pretrained(tmp_path / "x")
    config, scales = DuotoneConfig(recipe), duotone.recipe_state(model)
    for kind, prefix, options in (
        (transformers.AutoModel, "", {}),
        (transformers.AutoModelForSequenceClassification, "model.", {}),
        (AUTO, "model.", {"num_hidden_layers": 1}),
    ):
        other = kind.from_pretrained(tmp_path / "x", quantization_config=config, **options)
        states = {f"model.{name.removeprefix(prefix)}": t for name, t in duotone.recipe_state(other).items()}
        assert bool(states) == bool(scales)
        assert not [name for name, t in states.items() if name in scales and not torch.equal(t, scales[name])]
        seeds, before = duotone.rng_state(other), duotone.rng_state(model)
        common = {f"model.{name.removeprefix(prefix)}": seed for name, seed in seeds.items() if "layers" in name}
        assert common and all(torch.equal(seed, before[name]) for name, seed in common.items())


def test_scales_that_an_edited_weight_has_outgrown_start_anew(plain, tmp_path) -> None:
    model, _ = load(plain, "fp8-delayed")
    step(model, 0)
    layer = model.model.layers[0].mlp.up_proj
    with torch.no_grad():
        layer.weight.mul_(8)  # as a merge of adapters
    model.save_pretrained(tmp_path / "x")
    with pytest.warns(UserWarning, match=r"^model.layers.0.mlp.up_proj has weights beyond their saved delayed scales"):
        again, _ = load(tmp_path / "x", "fp8-delayed")
    fresh = duotone.convert(AUTO.from_pretrained(tmp_path / "x"), "fp8-delayed")
    results = [m.model.layers[0].mlp.up_proj(torch.ones(1, 64)) for m in (again, fresh)]
    assert torch.equal(*results)
    duotone.load_recipe_state(fresh, duotone.recipe_state(model))
    assert not torch.equal(fresh.model.layers[0].mlp.up_proj(torch.ones(1, 64)), results[0])


def test_hooks_of_devices_are_on_converted_modules(plain) -> None:
    require("accelerate")
    model = AUTO.from_pretrained(plain, quantization_config=DuotoneConfig("mxfp8"), device_map={"": "cpu"})
    reference, _ = load(plain)
    assert torch.equal(model(batch(0)).logits, reference(batch(0)).logits)


@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_quantized_parameters_that_would_be_offloaded_are_refused(place: str, plain) -> None:
    """They loaded, and the first forward ended in an error about addresses."""
    require("accelerate")
    devices = {"model.embed_tokens": "cpu", "model.layers": place, "model.norm": "meta", "lm_head": "cpu"}
    with pytest.raises(duotone.UserError, match=r"^accelerate would offload weights, which exist as planes [^\n]*$"):
        AUTO.from_pretrained(
            plain,
            quantization_config=DuotoneConfig("mxfp8", quantize_parameters=True),
            device_map={**devices, "model.rotary_emb": "cpu"},
        )


def test_dequantize_gives_a_plain_model(plain) -> None:
    model, _ = load(plain, quantize_parameters=True)
    values = {name: p.dequantize() if hasattr(p, "planes") else p for name, p in model.named_parameters()}
    model.dequantize()
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert_same_bits(dict(model.named_parameters()), values)


def test_wrong_recipes_are_one_line(plain) -> None:
    with pytest.raises(duotone.UserError, match=r"^[^\n]*mxfp9[^\n]*$"):
        load(plain, "mxfp9")


# Trainer


def trainer(path, callback, steps: int = 4, model=None, masters: bool = False, **options):
    require("accelerate")
    data = [{"input_ids": row, "labels": row} for at in range(2) for row in batch(at)]
    arguments = transformers.TrainingArguments(
        path, max_steps=steps, per_device_train_batch_size=2, save_steps=2, report_to=[], use_cpu=ON_CPU, seed=3,
        disable_tqdm=True, **{"learning_rate": 1e-2, "lr_scheduler_type": "constant", **options},
    )  # fmt: skip
    model = llama() if model is None else model
    optimizer = duotone.optim.AdamW(model.parameters(), lr=1e-2) if masters else None
    return transformers.Trainer(
        model, arguments, train_dataset=data, eval_dataset=data, callbacks=[callback], optimizers=(optimizer, None)
    )


SCHEDULE = Schedule(phases=(Phase("nvfp4", 0), Phase("fp8-delayed", 0.75)))


EARLY = Schedule(phases=(Phase("nvfp4", 0), Phase("fp8-delayed", 0.25)))


@pytest.mark.parametrize("recipe", [*RECIPES, SCHEDULE, EARLY], ids=[*RECIPES, "schedule", "in its second phase"])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(recipe, tmp_path) -> None:
    def callback():
        return DuotoneCallback(schedule=recipe) if isinstance(recipe, Schedule) else DuotoneCallback(recipe)

    whole = trainer(tmp_path, callback())
    whole.train()
    again = trainer(tmp_path / "again", callback())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(dict(again.model.named_parameters()), dict(whole.model.named_parameters()))
    assert_same_bits(duotone.rng_state(again.model), duotone.rng_state(whole.model))
    assert_same_bits(duotone.recipe_state(again.model), duotone.recipe_state(whole.model))


def test_a_plain_model_expects_all_that_trainer_saved_under_delayed_scaling(tmp_path) -> None:
    callback = DuotoneCallback("fp8-delayed")
    run = trainer(tmp_path, callback, 2)
    run.train()
    assert repr(callback) == "DuotoneCallback(fp8-delayed)"
    run.save_model(str(tmp_path / "model"))
    loaded, info = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not info["unexpected_keys"] and not info["missing_keys"]
    values = run.model.state_dict()
    assert all(torch.equal(tensor, values[name].cpu()) for name, tensor in loaded.state_dict().items())
    hooks = len(run.model._state_dict_hooks)
    run.train()
    assert len(run.model._state_dict_hooks) == hooks


@pytest.mark.parametrize("saves", ["steps", "best"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_best_model_has_the_scales_that_it_was_saved_with(recipe: str, saves: str, tmp_path) -> None:
    """Trainer knows after an evaluation what "best" saves."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "learning_rate": 1.0}
    options = {"metric_for_best_model": "eval_loss", "save_strategy": saves, **best}
    run = trainer(tmp_path, DuotoneCallback(recipe), 6, **options)
    run.train()
    checkpoint = run.state.best_model_checkpoint
    assert not checkpoint.endswith("-6")  # the rate is too high
    assert run.evaluate()["eval_loss"] == run.state.best_metric
    again = trainer(tmp_path, DuotoneCallback(recipe), 6, **options)
    again.train(resume_from_checkpoint=checkpoint)
    assert again.evaluate()["eval_loss"] == run.state.best_metric


PHASES = [("mxfp8", "fp8-delayed"), ("fp8-delayed", "nvfp4"), ("mxfp8", "bf16")]


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("recipes", PHASES, ids=" then ".join)
def test_the_best_model_of_an_earlier_phase_follows_its_recipe(recipes, quantized: bool, tmp_path) -> None:
    """Without a reload Trainer would end in an error after the last step."""
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    phases = (Phase(recipes[0], 0), Phase(recipes[1], 0.5, convert_parameters=quantized))
    model = quantized_model(recipes[0]) if quantized else llama()
    run = trainer(tmp_path, DuotoneCallback(schedule=Schedule(phases=phases)), 4, model, **best)
    evaluate, losses = run.evaluate, []

    def worse_each_time(*arguments, **options):
        metrics = evaluate(*arguments, **options)
        metrics["eval_loss"] += 1e6 * len(losses)
        losses.append(metrics["eval_loss"])
        return metrics

    run.evaluate = worse_each_time
    run.train()
    run.evaluate = evaluate
    assert run.state.best_model_checkpoint.endswith("-2")
    assert run.evaluate()["eval_loss"] == run.state.best_metric
    assert {row.a for row in duotone.plan(run.model) if row.a}  # under the recipe of the first phase
    assert run.model.model.layers[0].mlp.up_proj.recipe.name == recipes[0]


class Stops(transformers.Trainer):
    """Ends with an exception, or finds that a batch is too large, in its second step."""

    def training_step(self, *arguments, **options):
        if self.state.global_step == 1 and self._train_batch_size > 1:
            raise self.error
        return super().training_step(*arguments, **options)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("CUDA out of memory.")], ids=["stop", "retry"])
def test_a_schedule_leaves_nothing_in_a_model_whose_training_ended_early(error, tmp_path) -> None:
    """A retry with a smaller batch has more steps, so a schedule over fractions has to be timed again."""
    callback = DuotoneCallback(schedule=Schedule(phases=(Phase("mxfp8", 0), Phase("fp8-current", 0.5))))
    run = trainer(tmp_path, callback, -1, num_train_epochs=1, auto_find_batch_size=True, save_strategy="no")
    run.__class__, run.error = Stops, error
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            run.train()
    else:
        run.train()
        assert run.state.global_step == 8 and not run.model._forward_hooks
    model = run.model.cpu().eval()
    tokens = batch(0)
    plain = llama().eval()
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        with duotone.autocast(enabled=False):
            assert torch.equal(model(tokens).logits, plain(tokens).logits)
        duotone.convert(model, "bf16")
        assert torch.equal(model(tokens).logits, duotone.convert(plain, "bf16")(tokens).logits)
        assert torch.equal(duotone.revert(model)(tokens).logits, duotone.revert(plain)(tokens).logits)
    again = trainer(tmp_path, DuotoneCallback("nvfp4"), 1, model, save_strategy="no")
    again.train()
    assert not again.model._forward_hooks


def test_a_report_tells_what_ran(tmp_path) -> None:
    trainer(tmp_path, DuotoneCallback("mxfp8", report=tmp_path / "report.txt"), 2).train()
    head, _, *rows = (tmp_path / "report.txt").read_text().splitlines()
    assert head == "2 steps, at the end under mxfp8"
    assert any(row.startswith("model.layers.0.self_attn.q_proj") and "wgrad  mxfp8_e4m3" in row for row in rows)
    with pytest.raises(duotone.UserError, match=r"^report is .*, in a folder that is not there; create"):
        DuotoneCallback("mxfp8", report=tmp_path / "no" / "report.txt")


def test_a_schedule_decides_each_step(tmp_path, monkeypatch) -> None:
    calls = []

    def at(schedule: Schedule, step: int):
        calls.append((schedule.phase(step).recipe.name, step))
        return schedule.phase(step).recipe

    monkeypatch.setattr(Schedule, "at", at)
    run = trainer(tmp_path, DuotoneCallback(schedule=SCHEDULE), gradient_accumulation_steps=2)
    run.train()
    names = [("nvfp4", 0), ("nvfp4", 1), ("nvfp4", 2), ("fp8-delayed", 3)]
    assert calls == [pair for pair in names for _ in range(2)]
    run.model.train()(input_ids=batch(0).to(run.model.device))
    assert len(calls) == 8  # nothing follows the schedule after training


def test_a_checkpoint_without_states_and_a_plain_model_are_refused(tmp_path) -> None:
    converted = duotone.convert(llama(), "mxfp8")
    trainer(tmp_path, transformers.TrainerCallback(), 2, converted).train()
    with pytest.raises(duotone.UserError, match=r"^no DuotoneCallback saved the seeds and scales[^\n]*$"):
        trainer(tmp_path, DuotoneCallback("mxfp8")).train(resume_from_checkpoint=True)
    with pytest.raises(duotone.UserError, match=r"^nothing in the model follows recipes: give .* a recipe$"):
        trainer(tmp_path / "x", DuotoneCallback()).train()


def test_states_of_another_recipe_and_damaged_ones_are_refused(tmp_path) -> None:
    trainer(tmp_path, DuotoneCallback("fp8-delayed"), 2).train()
    file = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(file.read_text())
    state["stateful_callbacks"]["duotone"] = "no states"
    file.write_text(json.dumps(state))
    with pytest.raises(duotone.UserError, match=r"^the seeds and scales of a checkpoint cannot be read[^\n]*$"):
        trainer(tmp_path, DuotoneCallback("fp8-delayed")).train(resume_from_checkpoint=True)
    trainer(tmp_path / "other", DuotoneCallback("mxfp8"), 2).train()
    with pytest.raises(
        duotone.UserError, match=r"^the checkpoint was saved under mxfp8, and the model follows fp8-delayed[^\n]*$"
    ):
        trainer(tmp_path / "other", DuotoneCallback("fp8-delayed")).train(resume_from_checkpoint=True)


def test_a_model_of_a_config_trains_under_trainer(plain, tmp_path) -> None:
    model, _ = load(plain, "nvfp4")
    run = trainer(tmp_path / "run", DuotoneCallback(), 2, model)
    run.train()
    _, info = AUTO.from_pretrained(tmp_path / "run" / "checkpoint-2", output_loading_info=True)
    assert not any(info.values())


def quantized_model(recipe: str = "mxfp8"):
    return duotone.convert_parameters(duotone.convert(llama(), recipe), recipe)


def planes(model) -> dict[str, torch.Tensor]:
    tensors = {name: p for name, p in model.named_parameters() if isinstance(p, duotone.QuantizedTensor)}
    return {f"{name}.{at}": part for name, tensor in tensors.items() for at, part in enumerate(tensor.parts)}


@pytest.mark.parametrize("masters", [False, True])
def test_quantized_parameters_resume_with_the_planes_that_they_had(masters: bool, tmp_path) -> None:
    def run(path, steps: int = 4):
        model = quantized_model("nvfp4")
        return trainer(path, DuotoneCallback(), steps, model, masters)

    whole, again = run(tmp_path), run(tmp_path)
    whole.train()
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert len(planes(again.model)) > 14
    assert_same_bits(planes(again.model), planes(whole.model))


def test_quantized_parameters_resume_with_a_warning_where_their_planes_are_not_found(tmp_path) -> None:
    trainer(tmp_path, DuotoneCallback(), 2, quantized_model()).train()
    (tmp_path / "checkpoint-2" / "duotone_planes.pt").unlink()
    with pytest.warns(UserWarning, match="duotone_planes.pt of the checkpoint was not found, so planes were encoded"):
        trainer(tmp_path, DuotoneCallback(), 4, quantized_model()).train(resume_from_checkpoint=True)


def test_a_phase_may_change_the_format_of_quantized_parameters(tmp_path) -> None:
    phases = (Phase("mxfp8", 0), Phase("nvfp4", 0.25, convert_parameters=True))
    runs = [
        trainer(tmp_path, DuotoneCallback(schedule=Schedule(phases=phases)), 4, quantized_model()) for _ in range(2)
    ]
    runs[0].train()
    weight = runs[0].model.model.layers[0].mlp.up_proj.weight
    assert weight.formats[0].name == "nvfp4_16x16"
    runs[1].train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert_same_bits(planes(runs[1].model), planes(runs[0].model))


def test_a_run_resumes_where_the_format_of_quantized_parameters_changes(tmp_path) -> None:
    """At the end of a phase, and in the middle of the next one."""
    phases = (Phase("mxfp8", 0), Phase("nvfp4", 2, convert_parameters=True))

    def run(path) -> transformers.Trainer:
        callback = DuotoneCallback(schedule=Schedule(phases=phases))
        return trainer(path, callback, 6, quantized_model(), save_total_limit=None)

    whole = run(tmp_path)
    whole.train()
    for step in (2, 4):
        again = run(tmp_path)
        again.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{step}"))
        assert planes(again.model), step
        assert_same_bits(planes(again.model), planes(whole.model))


def test_evaluations_and_the_trained_model_follow_the_schedule(tmp_path) -> None:
    """The learning rate is 0, so losses differ by recipe alone."""
    schedule = Schedule(phases=(Phase("nvfp4-1d-weight", 0), Phase("mxfp8", 0.5)))
    callback = DuotoneCallback(schedule=schedule, report=tmp_path / "report.txt")
    options = {"eval_strategy": "steps", "eval_steps": 2, "lr_scheduler_type": "constant", "learning_rate": 0.0}
    run = trainer(tmp_path, callback, **options)
    run.train()
    losses = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    expected = {}
    for recipe in ("nvfp4-1d-weight", "mxfp8"):
        plain = trainer(tmp_path / recipe, DuotoneCallback(recipe), **options)
        expected[recipe] = plain.evaluate()["eval_loss"]
    assert losses == [expected["nvfp4-1d-weight"], expected["mxfp8"]] and losses[0] != losses[1]
    assert run.evaluate()["eval_loss"] == expected["mxfp8"]
    report = (tmp_path / "report.txt").read_text()
    assert report.startswith("4 steps, at the end under mxfp8\n") and "mxfp8_e4m3" in report and "nvfp4" not in report
    run.train()  # begins anew, under the first recipe
    assert [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry] == losses


@pytest.mark.parametrize("way", ["model_init", "add_callback"])
def test_a_model_that_is_not_there_when_the_trainer_is_built_is_converted(way: str, tmp_path) -> None:
    require("accelerate")
    data = [{"input_ids": row, "labels": row} for row in batch(0)]
    arguments = transformers.TrainingArguments(
        tmp_path, max_steps=2, report_to=[], use_cpu=ON_CPU, disable_tqdm=True, save_strategy="no"
    )
    if way == "model_init":
        run = transformers.Trainer(
            model_init=lambda: llama(), args=arguments, train_dataset=data, callbacks=[DuotoneCallback("mxfp8")]
        )
    else:
        run = transformers.Trainer(llama(), arguments, train_dataset=data)
        run.add_callback(DuotoneCallback("mxfp8"))
    whole = transformers.Trainer(llama(), arguments, train_dataset=data, callbacks=[DuotoneCallback("mxfp8")])
    run.train()
    whole.train()
    assert_same_bits(dict(run.model.named_parameters()), dict(whole.model.named_parameters()))

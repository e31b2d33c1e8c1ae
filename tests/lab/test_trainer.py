import dataclasses

import pytest
import torch

from duotone import recipes
from duotone.errors import UserError
from duotone.recipes import Phase, Schedule
from duotone_lab.training import checkpoint, data, loop
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.trainer import Trainer

HYBRID = "mxfp8-fwd-nvfp4-bwd"


def state_of(trainer):
    return {**checkpoint.unique_state(trainer.model)[0], **trainer.checkpoint({}).training}


def assert_same_bits(left, right):
    assert left.keys() == right.keys()
    different = [name for name in left if not torch.equal(left[name], right[name])]
    assert not different


def test_the_same_arguments_give_the_same_bits(config, corpus):
    runs = []
    for _ in range(2):
        trainer = Trainer(config, recipes.load("nvfp4"), corpus)
        runs.append(([trainer.step() for _ in range(3)], trainer.heldout_loss(), state_of(trainer)))
    assert runs[0][:2] == runs[1][:2]
    assert_same_bits(runs[0][2], runs[1][2])


def test_every_recipe_starts_from_the_same_weights_and_batches(config, corpus):
    trainers = [Trainer(config, recipes.load(name), corpus) for name in ("bf16", "mxfp8")]
    states = [checkpoint.unique_state(trainer.model)[0] for trainer in trainers]
    assert_same_bits(*states)
    assert abs(trainers[0].step() - trainers[1].step()) < 0.02


def test_the_loss_falls(config, corpus):
    trainer = Trainer(dataclasses.replace(config, steps=30), recipes.load("mxfp8"), corpus)
    before = trainer.heldout_loss()
    losses = [trainer.step() for _ in range(30)]
    assert losses[0] > 5.3 and losses[-1] < 4.6
    assert trainer.heldout_loss() < before - 0.8


@pytest.mark.parametrize("fixture", ["config", "untied"])
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4", HYBRID])
def test_a_restored_trainer_continues_bit_for_bit(request, tmp_path, corpus, recipe, fixture):
    config = request.getfixturevalue(fixture)
    straight = Trainer(config, recipes.load(recipe), corpus)
    losses = [straight.step() for _ in range(6)]

    first = Trainer(config, recipes.load(recipe), corpus)
    for _ in range(3):
        first.step()
    path = checkpoint.save(tmp_path, first.checkpoint({}))
    torch.manual_seed(99)
    second = Trainer(config, recipes.load(recipe), corpus)
    second.step()
    second.restore(checkpoint.load(path), path)
    assert second.completed == 3
    assert [second.step() for _ in range(3)] == losses[3:]
    assert second.heldout_loss() == straight.heldout_loss()
    assert_same_bits(state_of(second), state_of(straight))


def two_phases(start=3):
    return Schedule((Phase(recipes.load("nvfp4"), 0), Phase(recipes.load("bf16"), start)), title="two")


def test_a_schedule_trains_each_step_under_the_recipe_of_its_phase(config, corpus):
    scheduled = Trainer(config, two_phases(0.5), corpus)
    plain = Trainer(config, recipes.load("nvfp4"), corpus)
    for _ in range(3):
        assert scheduled.recipe.name == "nvfp4" and scheduled.step() == plain.step()
    assert scheduled.recipe.name == "bf16"
    assert scheduled.heldout_loss() == plain.heldout_loss()  # of the phase that the last step was in
    for _ in range(3):
        assert scheduled.step() == plain.step(recipes.load("bf16"))
    assert_same_bits(state_of(scheduled), state_of(plain))
    assert scheduled.heldout_loss() != plain.heldout_loss()


def delayed_phases():
    """Delayed scaling sets in late, and then changes the length of its history."""
    arguments = (
        recipes.load("mxfp8"),
        recipes.DelayedScaling(amax_history_len=4),
        recipes.DelayedScaling(amax_history_len=2),
    )
    return Schedule(tuple(Phase(recipe, start) for recipe, start in zip(arguments, (0, 2, 4), strict=True)))


@pytest.mark.parametrize("stop", [1, 3, 5])
@pytest.mark.parametrize("make", [two_phases, delayed_phases])
def test_a_schedule_continues_bit_for_bit_from_before_at_and_after_a_change_of_phase(
    tmp_path, config, corpus, stop, make
):
    straight = Trainer(config, make(), corpus)
    losses = [straight.step() for _ in range(6)]
    first = Trainer(config, make(), corpus)
    for _ in range(stop):
        first.step()
    path = checkpoint.save(tmp_path, first.checkpoint({}))
    second = Trainer(config, make(), corpus)
    second.restore(checkpoint.load(path), path)
    assert [second.step() for _ in range(6 - stop)] == losses[stop:]
    assert second.heldout_loss() == straight.heldout_loss()
    assert_same_bits(state_of(second), state_of(straight))


def test_a_checkpoint_of_another_schedule_is_refused(tmp_path, config, corpus):
    path = checkpoint.save(tmp_path, Trainer(config, two_phases(), corpus).checkpoint({}))
    with pytest.raises(UserError, match="another recipe: phases"):
        Trainer(config, two_phases(4), corpus).restore(checkpoint.load(path), path)


def test_a_phase_that_could_not_run_is_refused_before_the_first_step(config, corpus):
    mixed = recipes.RuleRecipe(rules=(recipes.Rule(fprop="mxfp8_e4m3", dgrad="identity", wgrad="nvfp4_rht"),))
    wrong = recipes.RuleRecipe(rules=(recipes.Rule(tensor_type="input", format="mxfp8_e4m3"),), strict=True)
    Trainer(config, Schedule((Phase(mixed, 0), Phase(mixed, 5))), corpus)
    with pytest.raises(UserError, match="strict: no rule of recipe rules matches"):
        Trainer(config, Schedule((Phase(mixed, 0), Phase(wrong, 5))), corpus)


def test_sampled_statistics_are_of_the_phase_of_their_step(config, corpus):
    result = loop.Run("two", two_phases(5))
    loop.train(Trainer(config, result.recipe, corpus), result)
    assert {row["format"] for row in result.observed["statistics"]} >= {"nvfp4", "identity"}


def changed_text(corpus, config, tmp_path):
    path = tmp_path / "other.txt"
    path.write_text("other text " * 2000)
    return config, "mxfp8", data.load([str(path)], context=32)


OTHERS = {
    "seed 1 there, 2 here": lambda corpus, config, _: (dataclasses.replace(config, seed=2), "mxfp8", corpus),
    "another recipe: recipe 'mxfp8' there, 'nvfp4' here": lambda corpus, config, _: (config, "nvfp4", corpus),
    "another recipe: recipe 'mxfp8' there, 'fp8-delayed' here": lambda corpus, config, _: (
        config,
        "fp8-delayed",
        corpus,
    ),
    "the data has changed": changed_text,
}


@pytest.mark.parametrize("words", OTHERS)
def test_a_checkpoint_of_another_run_is_refused_and_changes_nothing(tmp_path, config, corpus, words):
    saved = Trainer(config, recipes.load("mxfp8"), corpus)
    saved.step()
    path = checkpoint.save(tmp_path, saved.checkpoint({}))
    other_config, recipe, text = OTHERS[words](corpus, config, tmp_path)
    other = Trainer(other_config, recipes.load(recipe), text)
    before = {name: tensor.clone() for name, tensor in state_of(other).items()}
    with pytest.raises(UserError, match=words) as raised:
        other.restore(checkpoint.load(path), path)
    assert "\n" not in str(raised.value)
    assert_same_bits(before, state_of(other))
    assert other.completed == 0


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(tmp_path, config, untied, corpus):
    saved = Trainer(config, recipes.load("bf16"), corpus)
    path = checkpoint.save(tmp_path, saved.checkpoint({}))
    other = Trainer(untied, recipes.load("bf16"), corpus)
    before = {name: tensor.clone() for name, tensor in state_of(other).items()}
    with pytest.raises(UserError, match=r"has another config: preset model tied True there, False here"):
        other.restore(checkpoint.load(path), path)
    assert_same_bits(before, state_of(other))


def test_a_checkpoint_that_lacks_a_tensor_is_refused(tmp_path, config, corpus):
    trainer = Trainer(config, recipes.load("bf16"), corpus)
    trainer.step()
    saved = trainer.checkpoint({})
    training = {name: tensor for name, tensor in saved.training.items() if name != "exp_avg/norm.weight"}
    with pytest.raises(UserError, match=r"exp_avg/norm.weight is absent there"):
        Trainer(config, recipes.load("bf16"), corpus).restore(dataclasses.replace(saved, training=training), tmp_path)


def test_the_learning_rate_warms_up_and_decays_to_a_tenth(config):
    config = TrainConfig(dataclasses.replace(config.preset, warmup=4, learning_rate=1.0), steps=24)
    rates = [config.learning_rate(step) for step in range(24)]
    assert rates[:4] == pytest.approx([0.2, 0.4, 0.6, 0.8]) and rates[4] == 1.0
    assert rates[14] == pytest.approx(0.55)
    assert sorted(rates[4:], reverse=True) == rates[4:] and 0.1 < rates[-1] < 0.11


def test_cuda_without_a_device_is_refused(config, corpus, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match="no CUDA device is available here: choose --device cpu"):
        Trainer(dataclasses.replace(config, device="cuda"), recipes.load("bf16"), corpus)
    with pytest.raises(UserError, match="unknown device 'tpu': choose cpu or cuda"):
        Trainer(dataclasses.replace(config, device="tpu"), recipes.load("bf16"), corpus)

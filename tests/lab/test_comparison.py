import dataclasses
import json

import pytest

from duotone import recipes
from duotone.errors import UserError
from duotone_lab.training import comparison, presets
from duotone_lab.training.comparison import compare, plan_runs, planned
from duotone_lab.training.loop import Progress

SETTINGS = (
    "command preset model parameters data data_bytes digests steps tokens_per_step context seed seeds judged_step "
    "linears learning_rate noise config"
).split()
RUN = (
    "name recipe is_reference is_noise train_loss heldout_loss final_train_loss final_heldout_loss repeats judged_loss "
    "gap_percent gap_margin gaps rank step_ms "
    "tokens_per_second peak_memory_bytes weight_bytes saved_activation_bytes plan statistics drift spreads products "
    "operands events modules error"
).split()


@pytest.fixture(scope="module")
def result(request):
    text_file, corpus = (request.getfixturevalue(name) for name in ("text_file", "corpus"))
    config = comparison.TrainConfig(presets.get("tiny"), steps=8, seed=1, data=(str(text_file),))
    runs = plan_runs(config, [recipes.load(name) for name in ("mxfp8", "bf16", "nvfp4")])
    return compare(config, runs, corpus, {"command": "duotone"})


def test_the_document_is_json_and_has_the_fields_of_the_report(result):
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert list(result["settings"]) == SETTINGS
    assert all(list(run) == RUN for run in result["runs"])
    machine = {"torch", "python", "commit", "device", "processor", "threads", "compiled_casts"}
    assert set(result["machine"]) == machine
    assert result["partial"] is False
    assert result["settings"]["model"] == "gpt: 2 layers of 64, 2 heads, SwiGLU 96, tied head"


def test_the_reference_comes_first_and_its_noise_run_second(result):
    assert [run["name"] for run in result["runs"]] == ["bf16", "bf16 (noise)", "mxfp8", "nvfp4"]
    assert [run["is_reference"] for run in result["runs"]] == [True, False, False, False]
    assert [run["is_noise"] for run in result["runs"]] == [False, True, False, False]


def test_gaps_are_relative_to_the_held_out_loss_of_bf16(result):
    reference = result["runs"][0]["final_heldout_loss"]
    for run in result["runs"]:
        assert run["gap_percent"] == pytest.approx(100 * (run["final_heldout_loss"] / reference - 1), abs=1e-9)
    noise = result["runs"][1]
    assert result["settings"]["noise"] == {"perturbation": 1e-6}
    assert abs(noise["gap_percent"]) < 0.2 and noise["train_loss"] != result["runs"][0]["train_loss"]


def test_losses_differ_between_recipes_but_little(result):
    finals = [run["final_heldout_loss"] for run in result["runs"]]
    assert len(set(finals)) == 4 and max(finals) < 1.02 * min(finals)


def test_speed_and_memory_are_consistent(result):
    for run in result["runs"]:
        assert run["tokens_per_second"] == pytest.approx(128 / run["step_ms"] * 1e3)
        assert run["peak_memory_bytes"] > run["saved_activation_bytes"] > run["weight_bytes"] > 100_000
        assert sum(row["saved"] for row in run["modules"]) == run["saved_activation_bytes"]
    saved = {run["name"]: run["saved_activation_bytes"] for run in result["runs"]}
    assert saved["nvfp4"] < saved["mxfp8"]


def test_high_precision_rows_of_the_plan_are_visible(result):
    mxfp8 = result["runs"][2]
    rows = {(row["module"], row["gemm"]): row for row in mxfp8["plan"]}
    assert rows["embedding", "-"]["reason"] and rows["lm_head", "fprop"]["a"] == "identity"
    assert rows["lm_head", "fprop"]["reason"]
    assert rows["layers.0.mlp.down", "dgrad"]["a"] == "mxfp8_e4m3" and not rows["layers.0.mlp.down", "dgrad"]["native"]


def test_a_stop_gives_a_partial_document_with_every_run(config, corpus):
    heard = []

    class Counting(Progress):
        def step(self, number, loss):
            heard.append(number)

    runs = plan_runs(config, [recipes.load("mxfp8")])
    result = compare(config, runs, corpus, progress=Counting(), should_stop=lambda: len(heard) >= 8)
    lengths = {run["name"]: len(run["train_loss"]) for run in result["runs"]}
    assert result["partial"] is True and lengths == {"bf16": 6, "bf16 (noise)": 2, "mxfp8": 0}
    assert result["settings"]["judged_step"] == 2  # both held-out losses are there: bf16 has one at 2, 3, 4 and 6
    reference, noise, unstarted = result["runs"]
    assert reference["judged_loss"] == dict(map(tuple, reference["heldout_loss"]))[2]
    gap = 100 * (noise["final_heldout_loss"] / reference["judged_loss"] - 1)
    assert [reference["gap_percent"], unstarted["gap_percent"]] == [0.0, None]
    assert noise["gap_percent"] == pytest.approx(gap, abs=1e-9)
    assert result["runs"][2]["final_heldout_loss"] is None
    json.dumps(result, allow_nan=False)


def test_one_failing_recipe_leaves_the_others(config, corpus, monkeypatch):
    real = comparison.train

    def train(trainer, run, **kwargs):
        if run.name == "mxfp8":
            raise UserError("no room")
        real(trainer, run, **kwargs)

    monkeypatch.setattr(comparison, "train", train)
    result = compare(config, plan_runs(config, [recipes.load("mxfp8"), recipes.load("fp8-current")]), corpus)
    assert [run["error"] for run in result["runs"]] == [None, None, "no room", None]
    assert result["runs"][2]["gap_percent"] is None and result["runs"][3]["gap_percent"] is not None


def test_a_strict_recipe_that_would_fall_back_is_refused_when_runs_are_planned(config):
    rule = recipes.Rule(tensor_type="input", format="mxfp8_e4m3")
    one_sided = recipes.RuleRecipe(rules=(rule,), title="one-sided", strict=True)
    with pytest.raises(UserError, match="strict"):
        plan_runs(config, [dataclasses.replace(recipes.load("mxfp8"), strict=True), one_sided])


def test_two_recipes_of_one_name_are_refused(config):
    with pytest.raises(UserError, match="compare takes each recipe once, and 'mxfp8' comes twice"):
        plan_runs(config, [recipes.load("mxfp8"), recipes.load("mxfp8")])


def test_the_plan_of_a_preset_needs_no_weights():
    rows = planned(comparison.TrainConfig(presets.get("small"), steps=1), recipes.load("mxfp8"))
    assert len(rows) == 12 * (4 * 3 + 2) + 3 + 1
    assert {row.a for row in rows if row.gemm == "fprop"} == {"mxfp8_e4m3", "identity"}

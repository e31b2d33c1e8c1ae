"""`--model` of compare, train and plan: what is trained, where it is told, and what is refused."""

import json
import shutil
from importlib import import_module

import pytest

from duotone_lab.training import checkpoint

LLAMA = "hf:LlamaForCausalLM"
TINY = ["--preset", "tiny", "--steps", "2"]


@pytest.fixture(autouse=True, scope="module")
def imported() -> None:
    """What transformers imports may print to stderr, before a test looks at it."""
    import_module("transformers.models.mixtral.modeling_mixtral")


@pytest.mark.parametrize(("model", "words"), [("gpt", "gpt: 2 layers of 64"), (LLAMA, f"{LLAMA}: llama, 2 layers")])
def test_progress_result_and_report_say_which_model_it_was(duotone, text_file, tmp_path, model, words):
    arguments = [*TINY, "--data", text_file, "--recipes", "mxfp8", "--model", model, "--out", tmp_path]
    code, _, progress = duotone("compare", *arguments)
    assert code == 0 and f"mxfp8: 2 steps of 128 tokens, {model}\n" in progress
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["settings"]["model"].startswith(words)
    assert words in (tmp_path / "report.html").read_text()
    assert all(run["error"] is None and len(run["train_loss"]) == 2 for run in result["runs"])
    module = {"gpt": "layers.0.attention.qkv", LLAMA: "model.layers.0.self_attn.q_proj"}[model]
    assert any(row["module"] == module and row["a"] == "mxfp8_e4m3" for row in result["runs"][2]["plan"])


def test_a_run_resumes_with_its_model_and_no_other(duotone, refused, text_file, tmp_path):
    arguments = [*TINY, "--data", text_file, "--model", LLAMA, "--out", tmp_path, "--save-every", "1"]
    assert duotone("train", *arguments)[0] == 0
    newest = checkpoint.latest(tmp_path / "checkpoints")
    whole = checkpoint.load(newest).meta
    assert whole["config"]["model"] == LLAMA
    shutil.rmtree(newest)
    same_shapes = "hf:MistralForCausalLM"
    others = {
        "gpt": f"config: model '{LLAMA}' there, 'gpt' here",
        same_shapes: f"config: model '{LLAMA}' there, '{same_shapes}' here",
    }
    for other, message in others.items():
        assert message in refused("train", "--resume", "--out", tmp_path, "--model", other)
    code, _, progress = duotone("train", "--resume", "--out", tmp_path)
    assert code == 0 and f"{LLAMA}, from step 1" in progress
    assert checkpoint.load(newest).meta["history"] == whole["history"]


def test_the_plan_of_a_model_names_its_modules_and_what_stays(duotone):
    code, out, _ = duotone("plan", "--preset", "tiny", "--model", "hf:MixtralForCausalLM")
    assert code == 0 and out.splitlines()[0] == "mxfp8 on cpu, preset tiny, model hf:MixtralForCausalLM"
    assert "model.layers.1.self_attn.o_proj" in out and "MixtralTopKRouter" in out


@pytest.mark.parametrize("command", ["compare", "train", "plan"])
@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("llama", "unknown model 'llama': choose one of gpt"),
        ("hf:Nothing", "hf:Nothing is neither a folder with a config.json nor a causal language model"),
    ],
)
def test_an_unknown_model_is_refused(refused, tmp_path, command, model, message):
    out = [] if command == "plan" else ["--out", tmp_path / "new"]
    assert message in refused(command, "--model", model, *out)
    assert not (tmp_path / "new").exists()


def test_strict_refuses_what_a_model_multiplies_without_a_linear(refused):
    line = refused("plan", "--preset", "tiny", "--model", "hf:MixtralForCausalLM", "--strict")
    assert "strict: model.layers.0.mlp.gate stays in high precision: MixtralTopKRouter holds weight" in line

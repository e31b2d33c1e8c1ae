"""`duotone export`: what a run of `duotone train` learned, as files for servers."""

import json
import math

import pytest
import safetensors.torch
import torch

import duotone as library
from duotone_lab.cli import export_command, main
from duotone_lab.training import checkpoint


@pytest.fixture(scope="module")
def run(shared_text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    options = ["--preset", "tiny", "--steps", "4", "--recipe", "mxfp8", "--data", shared_text_file, "--out", folder]
    assert main.run(["train", *map(str, options)]) == 0
    return folder


def newest(run):
    return checkpoint.load(checkpoint.latest(run / "checkpoints"))


def stored(folder):
    (path,) = folder.glob("*.safetensors")
    return safetensors.torch.load_file(path)


def test_the_files_hold_the_weights_of_the_newest_checkpoint(duotone, run, tmp_path):
    code, text, err = duotone("export", run, "--scheme", "BF16", "--out", tmp_path / "a")
    assert code == 0 and err == "" and f"Exported: {tmp_path / 'a'}" in text
    tensors, model = stored(tmp_path / "a"), newest(run).model
    assert tensors.keys() == model.keys() and all(tensors[name].equal(model[name].bfloat16()) for name in tensors)


def test_the_scheme_is_that_of_the_recipe_and_a_scale_of_activations_comes_from_the_text(duotone, run, tmp_path):
    assert duotone("export", run)[0] == 0  # into the folder of the run
    config = json.loads((run / "exported/config.json").read_text())
    assert config["quantization_config"]["format"] == "mxfp8-quantized"
    assert duotone("export", run, "--scheme", "NVFP4", "--out", tmp_path / "b")[0] == 0
    scales = [tensor for name, tensor in stored(tmp_path / "b").items() if name.endswith("input_global_scale")]
    assert len(scales) == 8 and all(0 < scale.item() < math.inf for scale in scales)


def test_the_losses_are_those_of_the_weights_before_and_after(duotone, run, tmp_path):
    _, text, _ = duotone("export", run, "--scheme", "MXFP4", "--out", tmp_path / "c")
    trainer = export_command._trained(run)
    plain = library.revert(trainer.model)
    before = trainer.heldout_loss()
    for name, weight in library.load(tmp_path / "c").items():
        values = weight.dequantize() if isinstance(weight, library.QuantizedTensor) else weight
        with torch.no_grad():
            plain.get_parameter(name).copy_(values)
    after = trainer.heldout_loss()
    assert f"held-out loss {before:.4f} before, {after:.4f} after" in text and abs(before - after) > 1e-4


def test_files_of_a_folder_stay_without_force(duotone, refused, run, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "choose another --out, or replace them with --force" in refused("export", run, "--out", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
    assert duotone("export", run, "--out", tmp_path, "--force")[0] == 0
    assert (tmp_path / "notes.txt").read_text() == "mine" and (tmp_path / "config.json").exists()


def test_what_cannot_be_exported_is_one_line(refused, run, tmp_path):
    assert "holds no checkpoint: give the --out of a run of duotone train" in refused("export", tmp_path)
    assert "the nearest is FP8_DYNAMIC" in refused("export", run, "--scheme", "INT8", "--out", tmp_path / "d")
    assert "matches no module" in refused("export", run, "--ignore", "nothing", "--out", tmp_path / "d")
    assert not (tmp_path / "d").exists()

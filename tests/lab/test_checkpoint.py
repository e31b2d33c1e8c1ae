import json
import os
import shutil

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from duotone import files
from duotone.errors import UserError
from duotone_lab.training import checkpoint
from duotone_lab.training.checkpoint import Checkpoint


class Tied(nn.Module):
    def __init__(self, width=4):
        super().__init__()
        self.embedding = nn.Embedding(3, width)
        self.lm_head = nn.Linear(width, 3, bias=False)
        self.lm_head.weight = self.embedding.weight


def make(step, model=None):
    tensors, aliases = checkpoint.unique_state(model or Tied())
    training = {"step/w": torch.tensor(float(step)), "seed": torch.tensor([1 << 60])}
    return Checkpoint(step, tensors, aliases, training, {"recipe": {"recipe": "bf16"}, "history": {"loss": [[1, 0.1]]}})


def test_what_is_saved_reads_back_bit_for_bit(tmp_path):
    saved = make(7, Tied().bfloat16())
    path = checkpoint.save(tmp_path, saved)
    result = checkpoint.load(path)
    assert (result.step, result.aliases, result.meta) == (7, saved.aliases, saved.meta)
    for stored, inputs in ((result.model, saved.model), (result.training, saved.training)):
        assert stored.keys() == inputs.keys()
        for name in inputs:
            assert stored[name].dtype == inputs[name].dtype and torch.equal(stored[name], inputs[name])


def test_a_tied_tensor_is_stored_once_and_its_other_name_is_told(tmp_path):
    path = checkpoint.save(tmp_path, make(1))
    assert list(load_file(path / "model.safetensors")) == ["embedding.weight"]
    assert json.loads((path / "meta.json").read_text())["aliases"] == {"lm_head.weight": "embedding.weight"}


def test_only_the_newest_are_kept(tmp_path):
    for step in (5, 10, 15, 100000000):
        checkpoint.save(tmp_path, make(step))
    assert [path.name for path in checkpoint.steps(tmp_path)] == ["step-00000010", "step-00000015", "step-100000000"]
    assert checkpoint.latest(tmp_path).name == "step-100000000"
    assert len(os.listdir(tmp_path)) == 3


@pytest.mark.parametrize("failing", ["model.safetensors", "training.safetensors", "meta.json", "SHA256SUMS"])
def test_a_full_disk_leaves_the_earlier_checkpoint(tmp_path, monkeypatch, failing):
    earlier = checkpoint.save(tmp_path, make(1))
    real = files.write_synced

    def write(path, content):
        if path.name == failing:
            real(path, content[: len(content) // 2])
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(files, "write_synced", write)
    with pytest.raises(UserError, match=r"step-00000002 \(No space left on device\): earlier ones are kept") as raised:
        checkpoint.save(tmp_path, make(2))
    assert "\n" not in str(raised.value)
    assert os.listdir(tmp_path) == [earlier.name]
    assert checkpoint.load(checkpoint.latest(tmp_path)).step == 1


def test_every_file_is_on_disk_before_the_checkpoint_takes_its_name(tmp_path, monkeypatch):
    events = []
    real_sync, real_rename = os.fsync, os.rename
    monkeypatch.setattr(files.os, "fsync", lambda fd: (events.append("sync"), real_sync(fd)))
    monkeypatch.setattr(files.os, "rename", lambda a, b: (events.append("rename"), real_rename(a, b)))
    checkpoint.save(tmp_path, make(1))
    assert events == ["sync"] * 5 + ["rename", "sync"]


def test_a_half_written_checkpoint_is_not_seen(tmp_path):
    checkpoint.save(tmp_path, make(1))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / ".step-00000002.123")
    assert checkpoint.latest(tmp_path).name == "step-00000001"


@pytest.mark.parametrize("name", ["model.safetensors", "training.safetensors", "meta.json", "SHA256SUMS"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "emptied", "removed"])
def test_damage_to_any_file_is_told_in_one_line(tmp_path, name, damage):
    checkpoint.save(tmp_path, make(0))
    path = checkpoint.save(tmp_path, make(1))
    content = (path / name).read_bytes()
    flipped = bytes([content[10] ^ 1])
    damaged = {"truncated": content[:-1], "flipped": content[:10] + flipped + content[11:], "emptied": b""}
    if damage == "removed":
        (path / name).unlink()
    else:
        (path / name).write_bytes(damaged[damage])
    if (name, damage) == ("SHA256SUMS", "truncated"):
        assert checkpoint.load(path).step == 1
        return
    with pytest.raises(UserError, match=r"step-00000001 cannot be used .* remove that folder") as raised:
        checkpoint.load(path)
    assert "\n" not in str(raised.value)


def test_without_another_checkpoint_the_way_out_is_a_new_run(tmp_path):
    path = checkpoint.save(tmp_path, make(1))
    (path / "meta.json").write_bytes(b"")
    with pytest.raises(UserError, match=r"does not match SHA256SUMS\): it is the only one, so train anew with another"):
        checkpoint.load(path)


def test_another_layout_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "LAYOUT", 2)
    path = checkpoint.save(tmp_path, make(1))
    monkeypatch.undo()
    with pytest.raises(UserError, match="its layout is not 1"):
        checkpoint.load(path)


def test_no_checkpoint_is_told(tmp_path):
    with pytest.raises(UserError, match="no checkpoint to resume from"):
        checkpoint.latest(tmp_path / "absent")


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (Tied(8), r"embedding.weight is \(3, 4\) torch.float32 there and \(3, 8\) torch.float32 here"),
        (Tied().bfloat16(), "embedding.weight is .*torch.float32 there and .*torch.bfloat16 here"),
        (nn.Linear(2, 2), "bias is absent there and"),
    ],
)
def test_another_model_is_named_by_its_first_difference(tmp_path, other, words):
    path = checkpoint.save(tmp_path, make(1))
    with pytest.raises(UserError, match=f"is of another model: {words}"):
        checkpoint.require_same_model(checkpoint.load(path), other, path)


def test_an_untied_model_is_not_the_tied_one(tmp_path):
    untied = Tied()
    untied.lm_head.weight = nn.Parameter(untied.embedding.weight.detach().clone())
    path = checkpoint.save(tmp_path, make(1))
    with pytest.raises(UserError, match=r"lm_head.weight is tied to embedding.weight there and \(3, 4\)"):
        checkpoint.require_same_model(checkpoint.load(path), untied, path)


def test_a_checkpoint_of_ranks_says_how_to_resume_it(tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / ".metadata").write_bytes(b"")
    with pytest.raises(UserError, match="of a run over ranks: resume it under torchrun with --parallel"):
        checkpoint.load(checkpoint.latest(tmp_path))

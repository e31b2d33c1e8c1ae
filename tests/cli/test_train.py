import json
import os
import signal
import subprocess
import sys

import pytest

from duotone.lab import checkpoint
from duotone.lab.trainer import Trainer


@pytest.fixture
def arguments(text_file):
    return ["train", "--preset", "tiny", "--steps", "6", "--seed", "2", "--recipe", "nvfp4", "--data", text_file]


def newest(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def assert_same_run(left, right):
    """The same losses, weights, moments and seeds, bit for bit."""
    assert left.step == right.step and left.meta["history"] == right.meta["history"]
    for mine, theirs in ((left.model, right.model), (left.training, right.training)):
        assert mine.keys() == theirs.keys() and all(mine[name].equal(theirs[name]) for name in mine)


def stop_after(monkeypatch, steps):
    step = Trainer.step

    def interrupted(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        if self.done == steps:
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    monkeypatch.setattr(Trainer, "step", interrupted)


def test_it_leaves_checkpoints_and_a_report(duotone, arguments, tmp_path):
    code, text, progress = duotone(*arguments, "--save-every", "2", "--out", tmp_path / "a")
    assert code == 0 and sorted(os.listdir(tmp_path / "a")) == ["checkpoints", "report.html", "result.json"]
    assert sorted(os.listdir(tmp_path / "a" / "checkpoints")) == [f"step-0000000{step}" for step in (2, 4, 6)]
    (run,) = json.loads((tmp_path / "a" / "result.json").read_text())["runs"]
    assert run["gap_percent"] is None and len(run["train_loss"]) == 6
    assert f"{run['final_heldout_loss']:.4f}" in text and "nvfp4: step 6/6" in progress


def test_ctrl_c_and_resume_in_a_new_process_end_as_an_uninterrupted_run(duotone, arguments, tmp_path, monkeypatch):
    assert duotone(*arguments, "--out", tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        code, text, _ = duotone(*arguments, "--out", tmp_path / "parts")
    assert code == 130 and "stopped at step 4" in text
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["partial"]
    command = [sys.executable, "-m", "duotone", "train", "--resume", "--out", tmp_path / "parts"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "from step 4" in done.stderr
    assert_same_run(newest(tmp_path / "parts"), newest(tmp_path / "whole"))
    assert not json.loads((tmp_path / "parts" / "result.json").read_text())["partial"]


@pytest.fixture
def stopped(duotone, arguments, tmp_path, monkeypatch):
    """The folder of a run that was stopped after two steps of six, which were saved one by one."""
    with monkeypatch.context() as patched:
        stop_after(patched, 2)
        duotone(*arguments, "--save-every", "1", "--out", tmp_path / "run")
    return tmp_path / "run"


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--seed", "3"], "another config: seed 2 there, 3 here"),
        (["--steps", "9"], "another config: steps 6 there, 9 here"),
        (["--strict"], "another recipe: strict False there, True here"),
        (["--recipe", "mxfp8"], "another recipe: recipe 'nvfp4' there, 'mxfp8' here"),
        (["--preset", "demo"], "is of another model"),
    ],
)
def test_resume_with_other_settings_is_refused_and_changes_nothing(refused, stopped, changed, message):
    before = contents(stopped)
    assert message in refused("train", "--resume", "--out", stopped, *changed)
    assert contents(stopped) == before


def test_resume_after_the_data_changed_is_refused(refused, stopped, text_file):
    text_file.write_text("changed " * 2000)
    assert "the data has changed" in refused("train", "--resume", "--out", stopped)


def test_a_truncated_checkpoint_is_refused_and_the_one_before_it_works(duotone, refused, stopped):
    newest_folder = checkpoint.latest(stopped / "checkpoints")
    path = newest_folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    before = contents(stopped)
    assert "model.safetensors does not match SHA256SUMS" in refused("train", "--resume", "--out", stopped)
    assert contents(stopped) == before
    newest_folder.rename(stopped / "damaged")
    code, _, progress = duotone("train", "--resume", "--out", stopped)
    assert code == 0 and "from step 1" in progress


def test_a_finished_run_has_nothing_to_resume(duotone, arguments, tmp_path):
    duotone(*arguments, "--out", tmp_path / "a")
    before = contents(tmp_path / "a")
    code, text, _ = duotone("train", "--resume", "--out", tmp_path / "a")
    assert code == 0 and "is at its last step, 6: nothing is left to train" in text
    assert contents(tmp_path / "a") == before


def test_a_new_run_does_not_overwrite_an_old_one(refused, stopped, arguments):
    before = contents(stopped)
    assert "holds checkpoints: continue them with --resume" in refused(*arguments, "--out", stopped)
    assert contents(stopped) == before


def test_nothing_to_resume_is_told_and_nothing_made(refused, tmp_path):
    assert "no checkpoint to resume from" in refused("train", "--resume", "--out", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


SCHEDULE = """
[[phases]]
from = 0
recipe = "nvfp4"
[[phases]]
from = 0.5
recipe = "mxfp8-fwd-bf16-bwd"
"""


def test_a_schedule_is_resumed_in_its_later_phase_and_ends_as_an_uninterrupted_run(
    duotone, text_file, tmp_path, monkeypatch
):
    (tmp_path / "half.toml").write_text(SCHEDULE)
    command = ["train", "--preset", "tiny", "--steps", "6", "--recipe", tmp_path / "half.toml", "--data", text_file]
    assert duotone(*command, "--out", tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        assert duotone(*command, "--out", tmp_path / "parts")[0] == 130
    code, _, progress = duotone("train", "--resume", "--out", tmp_path / "parts")
    assert code == 0 and "from step 4" in progress
    assert_same_run(newest(tmp_path / "parts"), newest(tmp_path / "whole"))
    (run,) = json.loads((tmp_path / "whole" / "result.json").read_text())["runs"]
    assert run["name"] == "half" and [phase["from"] for phase in run["recipe"]["phases"]] == [0, 0.5]
    code, _, _ = duotone(*command[:-4], "--recipe", "nvfp4", "--data", text_file, "--out", tmp_path / "nvfp4")
    alone = newest(tmp_path / "nvfp4").meta["history"]["train_loss"]
    scheduled = newest(tmp_path / "whole").meta["history"]["train_loss"]
    assert scheduled[:3] == alone[:3] and scheduled[4:] != alone[4:]


def test_strict_reaches_every_phase_of_a_schedule(refused, text_file, tmp_path):
    (tmp_path / "rules.toml").write_text("[[rules]]\ntensor_type = 'input'\nformat = 'mxfp8_e4m3'")
    (tmp_path / "wrong.toml").write_text(SCHEDULE.replace("mxfp8-fwd-bf16-bwd", "rules.toml"))
    command = ["train", "--preset", "tiny", "--steps", "6", "--data", text_file, "--strict", "--out", tmp_path / "out"]
    message = refused(*command, "--recipe", tmp_path / "wrong.toml")
    assert "strict: no rule of recipe rules matches" in message
    assert not (tmp_path / "out" / "checkpoints").exists()


def test_a_comparison_takes_recipes_alone(refused, tmp_path):
    message = refused("compare", "--recipes", "mxfp8-then-bf16-fprop", "--out", tmp_path / "out")
    assert "mxfp8-then-bf16-fprop is a schedule, not a recipe" in message and "duotone train --recipe" in message

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest

from duotone import files
from duotone_lab.cli import main
from duotone_lab.training import checkpoint, outputs, presets
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.optimizer import MasterAdamW
from duotone_lab.training.trainer import Trainer


@pytest.fixture(scope="module")
def arguments(shared_text_file):
    return ["train", "--preset", "tiny", "--steps", "6", "--seed", "2", "--recipe", "nvfp4", "--data", shared_text_file]


def newest(folder):
    return checkpoint.load(checkpoint.latest(folder / "checkpoints"))


def assert_same_run(left, right):
    """The same losses, weights, moments and seeds, bit for bit."""
    assert left.step == right.step and left.meta["history"] == right.meta["history"]
    for one, other in ((left.model, right.model), (left.training, right.training)):
        assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def stop_after(monkeypatch, steps, number=signal.SIGINT):
    step = Trainer.step

    def interrupted(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        if self.completed == steps:
            os.kill(os.getpid(), number)
        return loss

    monkeypatch.setattr(Trainer, "step", interrupted)


def test_it_leaves_checkpoints_and_a_report(duotone, arguments, tmp_path):
    code, text, progress = duotone(*arguments, "--save-every", "2", "--out", tmp_path / "a")
    assert code == 0 and sorted(os.listdir(tmp_path / "a")) == [
        "checkpoints",
        "planes.csv",
        "report.html",
        "result.json",
    ]
    assert sorted(os.listdir(tmp_path / "a" / "checkpoints")) == [f"step-0000000{step}" for step in (2, 4, 6)]
    (run,) = json.loads((tmp_path / "a" / "result.json").read_text())["runs"]
    assert run["gap_percent"] is None and len(run["train_loss"]) == 6
    assert f"{run['final_heldout_loss']:.4f}" in text and "nvfp4: step 6/6" in progress


@pytest.fixture(scope="module")
def finished_once(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("finished") / "run"
    assert main.run([str(argument) for argument in (*arguments, "--out", folder)]) == 0
    return folder


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of the folder of a run that ended after its six steps."""
    return shutil.copytree(finished_once, tmp_path / "finished")


def test_ctrl_c_and_resume_in_a_new_process_end_as_an_uninterrupted_run(
    duotone, arguments, finished, tmp_path, monkeypatch
):
    with monkeypatch.context() as patched:
        stop_after(patched, 4)
        code, text, _ = duotone(*arguments, "--out", tmp_path / "parts")
    assert code == 130 and "stopped at step 4" in text
    assert json.loads((tmp_path / "parts" / "result.json").read_text())["partial"]
    command = [sys.executable, "-m", "duotone", "train", "--resume", "--out", tmp_path / "parts"]
    process = subprocess.run(command, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    assert "from step 4" in process.stderr
    assert_same_run(newest(tmp_path / "parts"), newest(finished))
    assert not json.loads((tmp_path / "parts" / "result.json").read_text())["partial"]


@pytest.mark.parametrize(("name", "expected"), [("SIGTERM", 143), ("SIGHUP", 129)])
def test_other_signals_save_as_ctrl_c_does(duotone, arguments, tmp_path, monkeypatch, name, expected):
    stop_after(monkeypatch, 4, getattr(signal, name))
    code, text, _ = duotone(*arguments, "--out", tmp_path / "run")
    assert code == expected and "stopped at step 4" in text and newest(tmp_path / "run").step == 4
    assert json.loads((tmp_path / "run" / "result.json").read_text())["partial"]


def test_a_longer_run_goes_on_as_if_it_had_been_meant_so_where_learning_rates_agree(
    duotone, arguments, tmp_path, monkeypatch
):
    """Up to the end of the warm-up, the learning rates of a run of 6 steps are those of a run of 9."""
    assert duotone(*arguments[:4], "9", *arguments[5:], "--out", tmp_path / "whole")[0] == 0
    with monkeypatch.context() as patched:
        stop_after(patched, 3)
        duotone(*arguments, "--out", tmp_path / "parts")
    code, _, progress = duotone("train", "--resume", "--steps", "9", "--out", tmp_path / "parts")
    assert code == 0 and "learning rates" not in progress
    whole, parts = newest(tmp_path / "whole"), newest(tmp_path / "parts")
    assert parts.step == 9 and parts.meta["config"] == whole.meta["config"]
    assert parts.meta["history"]["train_loss"] == whole.meta["history"]["train_loss"]
    for one, other in ((parts.model, whole.model), (parts.training, whole.training)):
        assert one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_a_finished_run_is_extended_at_the_learning_rates_of_the_longer_one(duotone, finished, monkeypatch):
    rates = []
    step = MasterAdamW.step
    monkeypatch.setattr(MasterAdamW, "step", lambda self, rate: (rates.append(rate), step(self, rate)))
    code, text, progress = duotone("train", "--resume", "--steps", "9", "--out", finished)
    assert code == 0 and newest(finished).step == 9
    assert "steps 1 to 6 had the learning rates of a run of 6 steps, and from step 7 on they are those of a" in progress
    config = TrainConfig(presets.get("tiny"), steps=9)
    assert rates == [config.learning_rate(step) for step in (6, 7, 8)]
    code, text, _ = duotone("train", "--resume", "--out", finished)
    assert code == 0 and "is at its last step, 9" in text


def test_another_length_that_moves_a_phase_behind_is_refused(duotone, refused, text_file, tmp_path):
    (tmp_path / "half.toml").write_text(SCHEDULE)
    command = ["train", "--preset", "tiny", "--steps", "6", "--recipe", tmp_path / "half.toml", "--data", text_file]
    duotone(*command, "--out", tmp_path / "run")
    before = contents(tmp_path / "run")
    message = refused("train", "--resume", "--steps", "12", "--out", tmp_path / "run")
    assert "step 4 of the checkpoint" in message and "one of mxfp8-fwd-bf16-bwd, but of a run of 12 steps" in message
    assert contents(tmp_path / "run") == before


def test_a_schedule_of_two_phases_needs_two_steps(refused, text_file, tmp_path):
    (tmp_path / "half.toml").write_text(SCHEDULE)
    arguments = ["--steps", "1", "--recipe", tmp_path / "half.toml", "--data", text_file, "--out", tmp_path / "run"]
    message = refused("train", "--preset", "tiny", *arguments)
    assert "schedule half over 1 steps: two phases start at step 0; train more steps" in message


@pytest.fixture(scope="module")
def stopped_once(arguments, tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped") / "run"
    with pytest.MonkeyPatch.context() as patched:
        stop_after(patched, 2)
        main.run([str(argument) for argument in (*arguments, "--save-every", "1", "--out", folder)])
    return folder


@pytest.fixture
def stopped(stopped_once, tmp_path):
    """A copy of the folder of a run that was stopped after two steps of six, which were saved one by one."""
    return shutil.copytree(stopped_once, tmp_path / "run")


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (["--seed", "3"], "another config: seed 2 there, 3 here"),
        (["--steps", "1"], "is at step 2: give --steps of at least 2"),
        (["--strict"], "another recipe: strict False there, True here"),
        (["--recipe", "mxfp8"], "another recipe: recipe 'nvfp4' there, 'mxfp8' here"),
        (["--preset", "demo"], "another config: preset name 'tiny' there, 'demo' here"),
    ],
)
def test_resume_with_other_settings_is_refused_and_changes_nothing(refused, stopped, changed, message):
    before = contents(stopped)
    assert message in refused("train", "--resume", "--out", stopped, *changed)
    assert contents(stopped) == before


def test_resume_after_the_data_changed_is_refused(refused, stopped, shared_text_file):
    before = shared_text_file.read_text()
    try:
        shared_text_file.write_text("changed " * 2000)
        assert "the data has changed" in refused("train", "--resume", "--out", stopped)
    finally:
        shared_text_file.write_text(before)


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


def test_a_damaged_only_checkpoint_is_not_one_to_remove(refused, stopped):
    earlier, last = checkpoint.steps(stopped / "checkpoints")
    shutil.rmtree(earlier)
    (last / "meta.json").write_text("{}")
    message = refused("train", "--resume", "--out", stopped)
    assert "meta.json does not match SHA256SUMS): it is the only one, so train anew with another --out" in message


def test_a_folder_in_use_is_refused_and_its_user_named(duotone, refused, stopped, arguments):
    before = contents(stopped)
    with outputs.locked(stopped):
        message = refused("train", "--resume", "--out", stopped)
        assert f"{stopped} is in use by process {os.getpid()} on " in message and "choose another --out" in message
    assert contents(stopped) == before
    (stopped / outputs.LOCK).write_text("process 1 on a machine that is off")
    assert duotone("train", "--resume", "--out", stopped)[0] == 0
    assert sorted(os.listdir(stopped)) == ["checkpoints", "planes.csv", "report.html", "result.json"]


def test_a_new_run_in_a_folder_in_use_is_refused(refused, arguments, tmp_path):
    (tmp_path / "run").mkdir()
    with outputs.locked(tmp_path / "run"):
        assert "is in use by process" in refused(*arguments, "--out", tmp_path / "run")
    assert os.listdir(tmp_path / "run") == []


def test_leftovers_of_killed_saves_are_in_nobodys_way_and_go(duotone, stopped):
    """A checkpoint that was moved aside for one that never came is the newest."""
    folder = stopped / "checkpoints"
    for name in (".step-00000006.partial", ".step-00000001.partial"):
        (folder / name).mkdir()
        (folder / name / "half").write_text("")
    (folder / "step-00000002").rename(folder / ".step-00000002.before")
    code, _, progress = duotone("train", "--resume", "--out", stopped)
    assert code == 0 and "from step 2" in progress
    assert all(name.startswith("step-") for name in os.listdir(folder))


def test_a_full_disk_at_the_first_save_speaks_of_no_earlier_checkpoint(duotone, arguments, tmp_path, monkeypatch):
    real = files.write_synced

    def refuse(path, content):
        if "checkpoints" in path.parts:
            raise OSError(28, "No space left on device")
        real(path, content)

    monkeypatch.setattr(files, "write_synced", refuse)
    code, text, progress = duotone(*arguments, "--save-every", "3", "--out", tmp_path / "run")
    assert code == 2 and "(No space left on device): no other is saved; make room\n" in progress
    assert "earlier" not in progress and "Report: " in text  # the losses are not lost with the checkpoint
    assert len(json.loads((tmp_path / "run" / "result.json").read_text())["runs"][0]["train_loss"]) == 6


def test_a_finished_run_has_nothing_to_resume(duotone, finished):
    before = contents(finished)
    code, text, _ = duotone("train", "--resume", "--out", finished)
    assert code == 0 and "is at its last step, 6: nothing is left to train" in text
    assert contents(finished) == before


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

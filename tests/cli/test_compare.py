import json
import os
import signal

import pytest

from duotone import files
from duotone_lab.training import data, outputs
from duotone_lab.training.trainer import Trainer

TINY = ["compare", "--preset", "tiny", "--steps", "3"]


def test_it_leaves_a_report_and_its_numbers_and_ends_with_a_table(duotone, text_file, tmp_path):
    out = tmp_path / "runs" / "a"
    arguments = [*TINY[:-1], "6", "--data", text_file, "--recipes", "mxfp8", "bf16", "--seed", "3", "--out", out]
    code, text, progress = duotone(*arguments)
    assert code == 0 and sorted(os.listdir(out)) == ["planes.csv", "report.html", "result.json"]
    result = json.loads((out / "result.json").read_text())
    assert [run["name"] for run in result["runs"]] == ["bf16", "bf16 (noise)", "mxfp8"]
    settings = result["settings"]
    assert (settings["seed"], settings["steps"], settings["data"]) == (3, 6, str(text_file))
    assert settings["command"].startswith("duotone compare --preset tiny --steps 6 --data ")
    assert "<svg" in (out / "report.html").read_text()
    lines = text.splitlines()
    assert lines[0].split() == ["rank", "recipe", "held-out", "gap", "%", "step", "ms", "peak", "MiB", "native"]
    assert f"{result['runs'][2]['final_heldout_loss']:.4f}" in lines[3] and "0 of 24" in lines[3]
    assert "cannot be ranked" in " ".join(lines[4:]) and lines[-1] == f"Report: {out / 'report.html'}"
    assert max(map(len, lines[:-1])) <= 80
    assert "mxfp8: 6 steps of 128 tokens" in progress and "mxfp8: step 6/6, loss" in progress


def test_the_same_seed_gives_the_same_losses(duotone, text_file, tmp_path):
    losses = []
    for name in ("a", "b"):
        duotone(*TINY, "--data", text_file, "--recipes", "nvfp4", "--out", tmp_path / name)
        result = json.loads((tmp_path / name / "result.json").read_text())
        losses.append([(run["train_loss"], run["heldout_loss"]) for run in result["runs"]])
    assert losses[0] == losses[1]


def test_ctrl_c_writes_a_partial_report_and_ends_with_130(duotone, text_file, tmp_path, monkeypatch):
    step = Trainer.step

    def interrupted(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        if self.completed == 2 and self.recipe.name == "mxfp8":
            os.kill(os.getpid(), signal.SIGINT)
        return loss

    monkeypatch.setattr(Trainer, "step", interrupted)
    before = signal.getsignal(signal.SIGINT)
    code, text, err = duotone(
        *TINY[:-1], "4", "--data", text_file, "--recipes", "mxfp8", "nvfp4", "--out", tmp_path / "a"
    )
    assert code == 130 and signal.getsignal(signal.SIGINT) is before
    assert "stopped at step 2" in text and "did not start" in text and "Partial report: " in text
    assert err.splitlines()[-1] == f"Continue with: duotone compare --resume --out {tmp_path / 'a'}"
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["partial"] and [len(run["train_loss"]) for run in result["runs"]] == [4, 4, 2, 0]
    assert (tmp_path / "a" / "report.html").stat().st_size > 10_000


def test_runs_that_are_complete_are_on_disk_when_a_later_one_breaks(duotone, text_file, tmp_path, monkeypatch):
    step = Trainer.step

    def broken(self, *args, **kwargs):
        if self.recipe.name == "mxfp8":
            raise RuntimeError("a bug")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        duotone(*TINY, "--data", text_file, "--recipes", "mxfp8", "--out", tmp_path / "a")
    result = json.loads((tmp_path / "a" / "result.json").read_text())
    assert result["partial"] and [len(run["train_loss"]) for run in result["runs"]] == [3, 3, 0]


def test_several_seeds_are_paired_and_ranked(duotone, text_file, tmp_path):
    arguments = ("--recipes", "mxfp8", "--seeds", "2", "--as", "8192x16384", "--out", tmp_path)
    code, text, progress = duotone(*TINY, "--data", text_file, *arguments)
    result = json.loads((tmp_path / "result.json").read_text())
    page, message = (tmp_path / "report.html").read_text(), "linears 8192 wide with 16384 tokens"
    assert "on an NVIDIA H200" in text and message in page and result["settings"]["size"] == [8192, 16384]
    assert duotone("report", tmp_path, "--as", "4096x8192")[0] == 0
    assert "for linears 4096 wide with 8192 tokens" in (tmp_path / "report.html").read_text()
    reference, mxfp8 = result["runs"]
    assert code == 0 and [run["name"] for run in result["runs"]] == ["bf16", "mxfp8"]
    assert "mxfp8, seed 1: step 3/3" in progress and "run 4 of 4" in progress and "all ETA 0:0" in progress
    repeats = [(run["repeats"][0]["seed"], run["repeats"][0]["heldout_loss"][-1][1]) for run in (reference, mxfp8)]
    gaps = [100 * (mxfp8["final_heldout_loss"] / reference["final_heldout_loss"] - 1)]
    gaps += [100 * (repeats[1][1] / repeats[0][1] - 1)]
    assert [seed for seed, _ in repeats] == [1, 1] and [gap for _, gap in mxfp8["gaps"]] == pytest.approx(gaps)
    assert mxfp8["gap_percent"] == pytest.approx(sum(gaps) / 2)
    assert mxfp8["gap_margin"] == pytest.approx(12.7062 * abs(gaps[0] - gaps[1]) / 2, rel=1e-5)  # t of one degree
    assert "cannot be ranked" not in text and f"± {mxfp8['gap_margin']:.3f}" in text


TIMED = dict.fromkeys(("step_ms", "tokens_per_second"))


def runs_of(folder):
    """The runs of the result in `folder` without times."""
    return [{**run, **TIMED} for run in json.loads((folder / "result.json").read_text())["runs"]]


def test_a_stopped_comparison_goes_on_and_ends_as_an_uninterrupted_one(duotone, text_file, tmp_path, monkeypatch):
    """Stopped within a run: its losses, statistics, memory and rounding go on from the step that was the last."""
    sizes = ("--seeds", "2", "--batch", "3", "--context", "16")
    arguments = [*TINY, "--data", text_file, "--recipes", "nvfp4", *sizes]
    duotone(*arguments, "--out", tmp_path / "whole")
    step, steps = Trainer.step, []

    def interrupted(self, *args, **kwargs):
        steps.append(self.recipe.name)
        if len(steps) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", interrupted)
    assert duotone(*arguments, "--out", tmp_path / "parts")[0] == 130
    code, _, err = duotone("compare", "--resume", "--out", tmp_path / "parts")
    assert code == 0 and "nvfp4, seed 0: 3 steps of 48 tokens" in err and ", from step 2\n" in err
    assert steps == (["bf16"] * 3 + ["nvfp4"] * 3) * 2, "no step twice"
    assert runs_of(tmp_path / "parts") == runs_of(tmp_path / "whole")
    settings = json.loads((tmp_path / "parts" / "result.json").read_text())["settings"]
    assert (settings["context"], settings["tokens_per_step"], settings["judged_step"]) == (16, 48, 3)
    assert sorted(os.listdir(tmp_path / "parts")) == ["planes.csv", "report.html", "result.json"]


def test_a_comparison_that_dies_goes_on_from_its_newest_checkpoint(duotone, refused, text_file, tmp_path, monkeypatch):
    """In the run of noise, which has the recipe of the reference. A folder that is compared anew keeps none of it."""
    arguments = [*TINY, "--data", text_file, "--recipes", "bf16", "--save-every", "1", "--out", tmp_path / "a"]
    step, steps = Trainer.step, []

    def dying(self, *args, **kwargs):
        if (steps.append(self.completed + 1), len(steps))[1] == 6:
            raise RuntimeError("a bug")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "step", dying)
    with pytest.raises(RuntimeError, match="a bug"):
        duotone(*arguments)
    newest = max((tmp_path / "a" / "unfinished").glob("*/*2")) / "model.safetensors"
    content, resume = newest.read_bytes(), ("compare", "--resume", "--save-every", "1", "--out", tmp_path / "a")
    newest.write_bytes(content[:-1])
    code, _, err = duotone(*resume)
    assert code == 2 and "model.safetensors does not match SHA256SUMS): remove that folder" in err
    newest.write_bytes(content)
    assert duotone(*resume)[0] == 0 and steps == [1, 2, 3, 1, 2, 3, 3]
    parts = runs_of(tmp_path / "a")
    assert duotone(*arguments, "--force")[0] == 0 and steps[7:] == [1, 2, 3] * 2
    assert parts == runs_of(tmp_path / "a")


def test_a_full_disk_costs_a_comparison_no_run(duotone, text_file, tmp_path, monkeypatch):
    """A checkpoint fails, and so do the numbers of a whole run. It goes on from the checkpoint between."""
    real, step, steps = files.write_synced, Trainer.step, []

    def write(path, content):
        if len(steps) in (1, 3) and (path.suffix == ".safetensors" or "result.json" in path.name):
            raise OSError(28, "No space left on device")
        real(path, content)

    def dying(self, *args, **kwargs):
        if (steps.append(self.completed + 1), len(steps))[1] == 4:
            raise RuntimeError("a bug")
        return step(self, *args, **kwargs)

    monkeypatch.setattr(files, "write_synced", write)
    monkeypatch.setattr(Trainer, "step", dying)
    arguments = [*TINY, "--data", text_file, "--recipes", "bf16", "--save-every", "1", "--out", tmp_path / "a"]
    with pytest.raises(RuntimeError, match="a bug"):
        duotone(*arguments)
    assert duotone("compare", "--resume", "--out", tmp_path / "a")[0] == 0
    assert "--resume" not in json.loads((tmp_path / "a" / "result.json").read_text())["settings"]["command"]
    assert steps == [1, 2, 3, 1, 3, 1, 2, 3]
    assert [len(run["train_loss"]) for run in runs_of(tmp_path / "a")] == [3, 3]


def test_what_cannot_go_on_is_refused_in_one_line(duotone, refused, text_file, tmp_path):
    duotone(*TINY[:-1], "1", "--data", text_file, "--recipes", "bf16", "--out", tmp_path / "a")
    path = tmp_path / "a" / "result.json"
    result, resume = json.loads(path.read_text()), ["compare", "--resume", "--out", tmp_path / "a"]
    text_file.write_text(text_file.read_text() + "more")
    assert "the data or the model has changed" in refused(*resume)
    path.write_text(json.dumps({**result, "settings": {**result["settings"], "config": {"preset": 1}}}))
    assert "cannot go on (config lacks or adds" in refused(*resume)
    path.write_text(json.dumps({**result, "runs": result["runs"][1:]}))
    assert "cannot go on (it has no reference)" in refused(*resume)
    assert "cannot read" in refused("compare", "--resume", "--out", tmp_path)


def test_a_report_is_replaced_only_when_forced(duotone, refused, text_file, tmp_path, monkeypatch):
    arguments = ["--preset", "tiny", "--steps", "1", "--data", text_file, "--out", tmp_path / "a"]
    assert duotone("compare", "--recipes", "bf16", *arguments)[0] == 0
    before = (tmp_path / "a" / "report.html").read_bytes()
    monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("the text was read first"))
    for command in (["compare", "--recipes", "bf16"], ["train"]):
        assert "holds a report: choose another --out, or replace it with --force" in refused(*command, *arguments)
    assert (tmp_path / "a" / "report.html").read_bytes() == before
    monkeypatch.undo()
    assert duotone("compare", "--recipes", "bf16", *arguments, "--force")[0] == 0
    assert (tmp_path / "a" / "report.html").read_bytes() != before


def test_json_is_all_that_stdout_gets(duotone, text_file, tmp_path):
    code, text, _ = duotone(
        *TINY[:-1], "1", "--data", text_file, "--recipes", "mxfp8", "--json", "--out", tmp_path / "a"
    )
    document = json.loads(text)
    assert code == 0 and [run["name"] for run in document["runs"]] == ["bf16", "bf16 (noise)", "mxfp8"]
    assert {"rank", "gap_percent"} <= document["runs"][2].keys() and "plan" not in document["runs"][2]


def test_a_folder_in_use_is_refused(refused, text_file, tmp_path):
    with outputs.locked(tmp_path):
        assert "is in use by process" in refused(*TINY, "--data", text_file, "--recipes", "mxfp8", "--out", tmp_path)


def test_a_diverged_run_is_told_and_gives_exit_code_1(duotone, text_file, tmp_path, monkeypatch):
    step = Trainer.step

    def diverging(self, *args, **kwargs):
        loss = step(self, *args, **kwargs)
        return float("nan") if self.recipe.name == "mxfp8" and self.completed == 2 else loss

    monkeypatch.setattr(Trainer, "step", diverging)
    code, text, _ = duotone(*TINY, "--data", text_file, "--recipes", "mxfp8", "--out", tmp_path / "a")
    assert code == 1 and "the loss is nan at step 2" in text
    assert json.loads((tmp_path / "a" / "result.json").read_text())["runs"][2]["final_train_loss"] is None


@pytest.fixture
def bad(tmp_path, text_file):
    """Files that a command must refuse, by name."""
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "binary.bin").write_bytes(b"\x7fELF\0\0" * 100)
    (tmp_path / "key.toml").write_text('[[rules]]\nformat = "mxfp8_e4m3"\ncolour = "red"\n')
    (tmp_path / "format.toml").write_text('[[rules]]\nformat = "mxfp9"\n')
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes", "mxfp9"], "'mxfp9' is unknown"),
        (["--recipes", "mxfp8", "mxfp8"], "'mxfp8' comes twice"),
        (["--recipes", "{bad}/key.toml"], "no key 'colour'"),
        (["--recipes", "{bad}/format.toml"], "mxfp9"),
        (["--recipes", "{bad}/absent.toml"], "cannot be read"),
        (["--preset", "huge"], "unknown preset 'huge'"),
        (["--device", "cuda"], "no CUDA device is available here"),
        (["--data", "{bad}/empty.txt"], "empty.txt is empty"),
        (["--data", "{bad}/short.txt"], "short.txt is 5 bytes"),
        (["--data", "{bad}/binary.bin"], "binary.bin is binary"),
        (["--data", "{bad}/absent.txt"], "no data file matches"),
        (["--out", "{bad}/empty.txt/runs"], "empty.txt is not a folder"),
        (["--resume", "--out", "{bad}/runs"], "leave all but --out and --seeds"),
        (["--batch", "0"], "0 is not in the range"),
        (["--lr", "nan"], "learning rate nan is not a positive number"),
        (["--context", "9000000"], "is 1"),
    ],
)
def test_bad_input_is_one_line_and_changes_nothing(refused, bad, monkeypatch, arguments, message):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = sorted(bad.rglob("*"))
    defaults = {"--data": bad / "words.txt", "--out": bad / "runs" / "new"}
    inputs = [argument.format(bad=bad) for argument in arguments]
    missing = [part for name, value in defaults.items() if name not in inputs for part in (name, value)]
    assert message in refused(*TINY, *missing, *inputs)
    assert sorted(bad.rglob("*")) == before


def test_the_arguments_are_checked_before_the_first_step(refused, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "step", lambda *_: pytest.fail("a step was taken"))
    path = tmp_path / "one-sided.toml"
    path.write_text('[[rules]]\ntensor_type = "input"\nformat = "mxfp8_e4m3"\n')
    line = refused(*TINY, "--data", text_file, "--recipes", path, "--strict", "--out", tmp_path / "a")
    assert "strict" in line and not (tmp_path / "a").exists()


def test_a_result_that_cannot_be_written_keeps_the_earlier_one(duotone, text_file, tmp_path, monkeypatch):
    arguments = [*TINY[:-1], "1", "--data", text_file, "--recipes", "bf16", "--out", tmp_path / "a"]
    duotone(*arguments)
    before = (tmp_path / "a" / "result.json").read_bytes()
    monkeypatch.setattr(files.os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    code, text, err = duotone(*arguments, "--force")
    assert code == 2 and "bf16 (noise)" in text
    assert "result.json (No space left on device): make room" in err.splitlines()[-1]
    assert (tmp_path / "a" / "result.json").read_bytes() == before


def test_without_data_the_text_is_pythons_own(duotone, tmp_path, monkeypatch):
    corpora = []
    real = data.load
    monkeypatch.setattr(data, "load", lambda paths, *, context: corpora.append(paths) or real(paths, context=context))
    code, _, _ = duotone(*TINY[:3], "--steps", "1", "--recipes", "bf16", "--out", tmp_path / "a")
    assert code == 0 and corpora == [()]
    settings = json.loads((tmp_path / "a" / "result.json").read_text())["settings"]
    assert settings["data"] == "the Python documentation and standard library" and settings["data_bytes"] > 1_000_000

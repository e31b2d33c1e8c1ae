import json
import os
import signal

import pytest
import torch

from bench.subjects import layer
from bench.subjects.catalog import SUBJECTS
from bench.timing import records

FAST = ("--turns", 2, "--seconds", 0.001, "--device", "cpu")


@pytest.fixture(autouse=True)
def _plain_candidates(monkeypatch):
    monkeypatch.setattr(layer, "compile_module", lambda module: module)
    monkeypatch.setattr(layer, "torchao_recipes", tuple)  # whether it is installed or not


@pytest.fixture
def unmeasured(monkeypatch):
    """Fails the test where something is measured."""

    def fail(*_):
        raise AssertionError("measured")

    monkeypatch.setattr(records, "measure", fail)


def test_the_table_and_the_lines_have_the_same_ratios(duotone, tmp_path):
    path = tmp_path / "lines.jsonl"
    arguments = ("bench", "linear", "--shape", "16x32x32", "--shape", "32x16x16", "--recipe", "bf16", *FAST)
    code, out, _ = duotone(*arguments, "--out", path)
    assert code == 0
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["shape"] for line in lines] == ["16x32x32"] * 3 + ["32x16x16"] * 3
    assert [line["candidate"] for line in lines[:3]] == ["torch bf16 eager", "torch bf16 compiled", "bf16"]
    tables = [table.splitlines() for table in out.split("linear, ")[1:]]
    assert "16x32x32, on " in tables[0][0] and "ratio: speed over torch bf16 compiled" in tables[0][0]
    rows = [row.split() for table in tables for row in table[2:]]
    assert [row[-1] for row in rows] == [f"{line['ratio']:.2f}" for line in lines]
    assert [row[-4] for row in rows] == [f"{line['ms']:,.3f}" for line in lines]
    assert duotone(*arguments, "--out", path)[0] == 0
    assert len(path.read_text().splitlines()) == 2 * len(lines)


def test_one_thread_has_backward_run_in_the_thread_that_asks_for_it(duotone, tmp_path, monkeypatch):
    measure, seen = records.measure, []

    def noting(*arguments):
        seen.append(torch.autograd.is_multithreading_enabled())
        return measure(*arguments)

    monkeypatch.setattr(records, "measure", noting)
    path, shape = tmp_path / "lines.jsonl", ("--shape", "16x32x32", "--recipe", "bf16", *FAST)
    for more, kind in ((["--one-thread"], "linear, one thread"), ([], "linear")):
        code, out, _ = duotone("bench", "linear", *shape, *more, "--out", path)
        assert code == 0 and f"{kind}, 16x32x32, on " in out
        assert json.loads(path.read_text().splitlines()[-1])["what"] == kind
    assert seen == [False, True] and torch.autograd.is_multithreading_enabled()


@pytest.mark.parametrize(
    ("subject", "more"),
    [
        ("mlp", ["--shape", "8x16x32", "--cached"]),
        ("grouped", ["--shape", "256x16x16", "--device-splits"]),
        ("attention", ["--shape", "1x32x2x1x16"]),
        ("cast", ["--shape", "32x32", "--tensor", "weight"]),
        ("host", ["--shape", "8x16x16"]),
        ("train", ["--shape", "32x32x32x1", "--sequence", "16", "--vocabulary", "64"]),
    ],
)
def test_every_subject_runs(duotone, subject, more):
    code, out, _ = duotone("bench", subject, "--recipe", "fp8-current", *more, *FAST)
    assert code == 0 and out.startswith(subject)
    rows = [line for line in out.splitlines() if line.startswith("fp8-current")]
    assert rows and "Error" not in out


def test_a_candidate_that_raises_is_a_row_with_its_error(duotone, tmp_path):
    path = tmp_path / "lines.jsonl"
    code, out, _ = duotone("bench", "cast", "--shape", "32x32", "--recipe", "bf16", *FAST, "--out", path)
    assert code == 0 and "UserError: nothing is cast: the planes are the tensor itself" in out
    copy, failed, _ = (json.loads(line) for line in path.read_text().splitlines())
    assert copy["ratio"] == 1.0 and copy["unit"] == "GB/s" and copy["rate"] > 0
    assert failed["ms"] is None and failed["ratio"] is None and "nothing is cast" in failed["error"]


def test_the_default_device_is_cuda_where_there_is_one(monkeypatch, refused, unmeasured):
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert "multiple of 128" in refused("bench", "grouped", "--shape", "100x8x8")
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no CUDA device is available here" in refused("bench", "linear", "--device", "cuda")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["linear", "--shape", "12x"], "--shape '12x' is not MxKxN: give 3 positive whole numbers"),
        (["linear", "--shape", f"{'9' * 5000}x8x8"], "is not MxKxN: give 3 positive whole numbers"),
        (["cast", "--shape", "8x8x8"], "--shape '8x8x8' is not MxN: give 2 positive whole numbers"),
        (["grouped", "--shape", "100x8x8"], "M is 100, and has to be a multiple of 128: give 128"),
        (["train", "--shape", "64x200x64x1"], "WIDTH is 200, and has to be a multiple of 128"),
        (["linear", "--recipe", "mxfp9"], "'mxfp9' is unknown"),
        (["linear", "--recipe", "mxfp8", "--recipe", "mxfp8"], "'mxfp8' is given twice"),
        (["linear", "--device", "tpu"], "unknown device 'tpu'"),
        (["linear", "--turns", "0"], "0 is not in the range"),
        (["linear", "--seconds", "0"], "0.0 is not in the range"),
        (["linear", "--tensor", "input"], "No such option"),
        (
            [
                "linear",
                "--shape",
                "16x32x32",
                "--recipe",
                "mxfp8",
                "--only",
                "eager",
                "--only",
                "zzz",
                "--device",
                "cpu",
            ],
            "--only 'zzz' is in the name of no candidate: choose from torch bf16 eager; torch bf16 compiled; mxfp8\n",
        ),
        (["matmul"], "No such command"),
    ],
)
def test_bad_input_is_one_line_before_anything_is_measured(refused, unmeasured, arguments, message):
    assert message in refused("bench", *arguments)


@pytest.mark.parametrize("subject", ["linear", "cast", "mlp", "host"])
def test_sizes_that_overflow_are_one_line(refused, subject):
    shape = "x".join(["99999999999904"] * len(SUBJECTS[subject].dims))
    assert "does not fit the device" in refused("bench", subject, "--shape", shape, "--recipe", "mxfp8", *FAST)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no file that is always full")
def test_a_disk_that_fills_does_not_take_the_table(duotone):
    shape = ("--shape", "16x32x32", "--recipe", "bf16", *FAST)
    code, out, err = duotone("bench", "linear", *shape, "--out", "/dev/full")
    assert code == 2 and "bf16" in out and "cannot write to /dev/full" in err


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_measured(refused, unmeasured, tmp_path):
    assert f"cannot write to {tmp_path} " in refused("bench", "linear", "--device", "cpu", "--out", tmp_path)


def test_what_happens_is_told_on_stderr_when_it_takes_long(capsys):
    from bench.timing.status import StatusLines

    status = StatusLines("linear, 8x8x8")
    status.interval = 0.001
    with status as tell:
        tell("bf16: turn 1 of 6")
        while "turn 1 of 6 (" not in (result := capsys.readouterr()).err:
            pass
    assert result.out == "" and result.err.startswith("linear, 8x8x8: ")


def test_on_a_terminal_a_line_moves(monkeypatch):
    import sys

    from bench.timing.status import display

    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with display("linear") as tell:
        tell("bf16: [turn] 1")


def test_the_help_names_subjects_and_shapes(duotone):
    code, out, _ = duotone("bench")
    assert code == 0 and all(name in out for name in SUBJECTS)
    assert "16384x2048x5632x24" in duotone("bench", "train", "--help")[1]


def test_seconds_that_are_no_number_are_refused(refused, unmeasured):
    assert "--seconds is nan" in refused("bench", "linear", "--shape", "16x16x16", "--seconds", "nan")


TWO_SHAPES = ("bench", "linear", "--shape", "16x32x32", "--shape", "32x16x16", "--recipe", "bf16", *FAST)


def at_the_second_shape(monkeypatch, happens):
    """Let `happens()` come before the second shape is measured."""
    measure = records.measure

    def measured(case, *more):
        if case.shape == "32x16x16":
            happens()
        return measure(case, *more)

    monkeypatch.setattr(records, "measure", measured)


def control_c():
    os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(("number", "expected"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_a_signal_keeps_what_is_complete_and_ends_with_its_code(duotone, monkeypatch, tmp_path, number, expected):
    path = tmp_path / "lines.jsonl"
    before = signal.getsignal(signal.SIGINT)
    at_the_second_shape(monkeypatch, lambda: os.kill(os.getpid(), number))
    code, out, err = duotone(*TWO_SHAPES, "--out", path)
    assert code == expected and signal.getsignal(signal.SIGINT) is before
    assert "16x32x32, on " in out and "32x16x16, on " not in out
    assert {json.loads(line)["shape"] for line in path.read_text().splitlines()} == {"16x32x32"}
    assert err.splitlines()[-1] == f"stopped: 1 of 2 tables are complete, in {path}"


def test_a_second_ctrl_c_stops_at_once(duotone, monkeypatch):
    at_the_second_shape(monkeypatch, lambda: (control_c(), control_c(), pytest.fail("went on")))
    code, out, err = duotone(*TWO_SHAPES)
    assert code == 130 and "16x32x32, on " in out
    assert err.splitlines()[-1] == "stopped: 1 of 2 tables are complete"


def test_outside_of_a_clone_it_says_where_the_benches_are(monkeypatch, refused, tmp_path):
    monkeypatch.setattr("duotone_lab.cli.bench_command.CLONE", tmp_path)
    assert "clone the repository of Duotone and run `duotone bench` there" in refused("bench", "linear")


def test_the_short_form_of_help_works_below_bench(duotone):
    assert duotone("bench", "-h")[1] == duotone("bench", "--help")[1] == duotone("bench")[1]
    assert duotone("bench", "linear", "-h")[1].startswith("Usage: duotone bench linear [OPTIONS]")

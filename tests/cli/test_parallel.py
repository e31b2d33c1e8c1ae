"""`--parallel`: what it takes, and a run under torchrun that loses a rank."""

import json
from pathlib import Path

import pytest
from launching import torchrun

from duotone.errors import UserError
from duotone_lab.training import presets
from duotone_lab.training.forecast import Parallel
from duotone_lab.training.models import parameter_count

LOSES_A_RANK = Path(__file__).with_name("losing_a_rank.py")


def test_axes_are_read_and_printed() -> None:
    assert Parallel.parse("fsdp=4, tp=2") == Parallel(fsdp=4, tp=2) and Parallel.parse("ep=8").ranks == 8
    assert str(Parallel(fsdp=4, tp=2)) == "fsdp=4,tp=2"


@pytest.mark.parametrize("text", ["", "fsdp", "fsdp=0", "fsdp=2,fsdp=2", "dp=2", "tp=2;ep=2", "fsdp=-1"])
def test_other_axes_are_one_line(text: str) -> None:
    with pytest.raises(UserError, match="--parallel") as error:
        Parallel.parse(text)
    assert "\n" not in str(error.value)


def test_a_process_that_torchrun_did_not_start_says_how_to_start_it() -> None:
    from duotone_lab.cli.main import run

    assert run(["train", "--parallel", "fsdp=2", "--preset", "tiny"]) == 2


def test_a_plan_predicts_what_each_rank_holds_and_sends(capsys: pytest.CaptureFixture[str]) -> None:
    """tests/distributed/trainer_worker.py compares predictions with counts. Here: FSDP2 alone in bf16, by hand."""
    from duotone_lab.cli.main import run

    assert run(["plan", "--preset", "tiny", "--recipe", "bf16", "--parallel", "fsdp=4"]) == 0
    line = capsys.readouterr().out.splitlines()[-1]
    count = parameter_count("gpt", presets.get("tiny"))
    assert line.startswith(f"each of 4 ranks: {12 * count / 4 / 2**20:.1f} MiB of parameters and optimizer, ")
    assert line.endswith(f"0.00 MiB exchanged, {4 * count / 2**20:.2f} MiB reduced a step")


def test_a_plan_says_which_weights_travel_in_high_precision(capsys: pytest.CaptureFixture[str]) -> None:
    """Delayed scales do not keep weights from travelling as codes; a cut by tensor parallelism does."""
    from duotone_lab.cli.main import run

    lines: list[str] = []
    for parallel in ("fsdp=4", "fsdp=2,tp=2"):
        assert run(["plan", "--preset", "tiny", "--recipe", "fp8-delayed", "--parallel", parallel]) == 0
        lines.append(capsys.readouterr().out.splitlines()[-1])
    assert "high precision" not in lines[0]
    assert lines[1].endswith("a step; 8 weights travel in high precision: tensor parallelism cuts them")


def test_a_run_that_loses_a_rank_goes_on_from_its_newest_checkpoint(tmp_path: Path) -> None:
    """In a step, then in a save. The report is of the whole run, and tells memory and bytes of each rank."""
    options = "train --parallel fsdp=2 --preset tiny --recipe fp8-current --steps 6 --save-every 2 --out".split()
    process = torchrun(LOSES_A_RANK, *options, tmp_path, restarts=2)
    assert process.stderr.count(", from step 2") == 2, "what a rank began to save is no checkpoint"
    text = "\n".join(line for line in process.stderr.splitlines() if "torch/distributed/elastic" not in line)
    assert "duotone: a rank was lost" in text and "Traceback" not in text
    assert "rank 0: " in process.stdout and "MiB gathered" in process.stdout and process.stdout.count("Report: ") == 1
    run = json.loads((tmp_path / "result.json").read_text())["runs"][0]
    assert [step for step, _ in run["train_loss"]] == [1, 2, 3, 4, 5, 6]
    assert [event["text"].split(":")[0] for event in run["events"]] == ["rank 0", "rank 1"]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}" for step in (2, 4, 6)
    ]


def test_a_run_over_ranks_resumes_with_its_own_settings_and_to_more_steps(tmp_path: Path) -> None:
    options = "train --parallel fsdp=2 --preset tiny --recipe fp8-current --batch 4 --steps 1 --out".split()
    torchrun(LOSES_A_RANK, *options, tmp_path)
    again = ["train", "--parallel", "fsdp=2", "--resume", "--out", tmp_path]
    process = torchrun(LOSES_A_RANK, *again, "--steps", "3")
    assert ", from step 1" in process.stderr and "learning rates of a run of 1 steps" in process.stderr
    assert "warning" not in process.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert [step for step, _ in result["runs"][0]["train_loss"]] == [1, 2, 3]
    assert result["runs"][0]["name"] == "fp8-current" and result["settings"]["config"]["preset"]["batch"] == 4
    with pytest.raises(AssertionError, match="has another recipe: recipe 'fp8-current' there, 'nvfp4' here"):
        torchrun(LOSES_A_RANK, *again, "--recipe", "nvfp4")

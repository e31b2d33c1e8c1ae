"""Every example runs as it is and does what it says."""

import re
import runpy
import shutil
from pathlib import Path

import pytest
from launching import torchrun

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_training_loop_trains_and_prints_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_training_loop.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "0.fprop: mxfp8_e4m3 x mxfp8_e4m3" in text
    assert "0.wgrad: nvfp4_rht_sr x nvfp4_rht" in text
    loss = float(re.search(r"loss after 50 steps: ([0-9.]+)", text).group(1))
    assert loss < 0.9  # predicting zeros gives 1.0


def test_torchrun_fsdp_trains_and_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    words = []
    for _ in range(2):
        process = torchrun(EXAMPLES / "torchrun_fsdp.py", tmp_path)
        words.append(process.stdout.splitlines()[0].split(", loss "))
        shutil.rmtree(tmp_path / "step-00000020")
    assert [steps for steps, _ in words] == ["steps 1 to 20", "steps 16 to 20"]
    assert words[0][1] == words[1][1] and float(words[0][1]) < 0.9  # predicting zeros gives 1.0

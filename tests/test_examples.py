"""Every example runs as it is and does what it says."""

import re
import runpy
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_training_loop_trains_and_prints_what_ran(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_training_loop.py"), run_name="__main__")
    text = capsys.readouterr().out
    assert "0.fprop: mxfp8_e4m3 x mxfp8_e4m3" in text
    assert "0.wgrad: nvfp4_rht_sr x nvfp4_rht" in text
    loss = float(re.search(r"loss after 50 steps: ([0-9.]+)", text).group(1))
    assert loss < 0.9  # predicting zeros gives 1.0

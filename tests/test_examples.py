"""Every example runs as it is and does what it says."""

import re
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_own_training_loop_trains_and_prints_what_ran() -> None:
    script = EXAMPLES / "own_training_loop.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert "0.fprop: mxfp8_e4m3 x mxfp8_e4m3" in done.stdout
    assert "0.wgrad: nvfp4_rht_sr x nvfp4_rht" in done.stdout
    loss = float(re.search(r"loss after 50 steps: ([0-9.]+)", done.stdout).group(1))
    assert loss < 0.9  # predicting zeros gives 1.0

"""The roll of delayed scaling by its kernel, in Triton's interpreter, has the bits of the plain one; without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")


def test_an_interpreted_roll_has_the_bits_of_the_plain_one() -> None:
    """Also of histories with infinities and NaN; in a process of its own, all of whose kernels are interpreted."""
    script = Path(__file__).with_name("interpreted_roll.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    told = re.search(r"^(\d+) comparisons, 0 differ$", done.stdout, re.M)
    assert done.returncode == 0 and told, done.stdout + done.stderr
    assert int(told[1]) > 150

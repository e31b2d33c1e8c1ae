"""The kernels' logic, in Triton's interpreter, has the bits of the plain stages; without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")


@pytest.mark.parametrize("more", ["", pytest.param("all", marks=pytest.mark.slow)])
def test_interpreted_kernels_have_the_bits_of_their_plain_twins(more: str) -> None:
    """In a process of its own: a kernel is interpreted or compiled for as long as its process lives."""
    script = Path(__file__).with_name("interpreted.py")
    done = subprocess.run([sys.executable, str(script), more], capture_output=True, text=True, check=False)
    told = re.search(r"^(\d+) comparisons, 0 differ$", done.stdout, re.M)
    assert done.returncode == 0 and told, done.stdout + done.stderr
    assert int(told[1]) > 200

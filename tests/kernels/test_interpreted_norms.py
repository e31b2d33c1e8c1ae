"""Norms in Triton's interpreter are those of float64, and their casts those of the norm; without a GPU."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")


def test_interpreted_norms_are_those_of_float64() -> None:
    """In a process of its own: a kernel is interpreted or compiled for as long as its process lives."""
    script = Path(__file__).with_name("interpreted_norms.py")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    told = re.search(r"^(\d+) comparisons, 0 differ$", done.stdout, re.M)
    assert done.returncode == 0 and told, done.stdout + done.stderr
    assert int(told[1]) > 250

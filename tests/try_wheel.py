"""A script: the wheel with other versions of Python and torch, each in an environment that is removed afterwards.

python tests/try_wheel.py dist/duotone-*.whl

A pair that cannot be installed here is skipped with a line. A wheel that fails with a pair fails the script.
"""

import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

PAIRS = (("3.12", "2.11.0"), ("3.13", "2.15.0"), ("3.14", "2.15.0"))
"""Versions of Python and torch: the oldest torch, and the newest that all tests ran with."""
SPACE = 12 * 2**30
"""Bytes that have to be free. An environment takes 4.7 GB, and its downloads 2.7 GB while it is installed."""
PATIENCE = 200
"""Seconds for an installation. One took 39 s."""


def skipped(wheel: Path, python: str, torch: str) -> str:
    """Check the wheel in an environment with these versions. Why there is none, or ""."""
    found = [shutil.which(f"python{python}"), *map(str, Path.home().glob(f".pyenv/versions/{python}.*/bin/python"))]
    runs = [name for name in found if name and subprocess.run([name, "-V"], capture_output=True).returncode == 0]
    if not runs:
        return f"no Python {python} is here"
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < SPACE:
            return f"{folder} has no {SPACE >> 30} GiB"
        install = "-m pip --retries 1 --timeout 20 install --quiet --no-compile --no-cache-dir".split()
        program = f"{folder}/bin/python"
        packages = [f"torch=={torch}", str(wheel)]
        try:  # Debian's Python makes no environment without python3-venv
            subprocess.run([runs[0], "-m", "venv", folder], check=True, capture_output=True, text=True)
            subprocess.run([program, *install, *packages], check=True, timeout=PATIENCE, capture_output=True, text=True)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            return str(error.stderr or error).strip().splitlines()[-1]
        subprocess.run([program, Path(__file__).with_name("check_wheel.py"), wheel], check=True)
    return ""


def report(pair: tuple[str, str]) -> None:
    reason = skipped(Path(sys.argv[1]).resolve(), *pair)
    if reason:
        print(f"skipped: the wheel with Python {pair[0]} and torch {pair[1]}: {reason}")


if __name__ == "__main__":
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(report, PAIRS))

"""A script: the wheel with other versions of Python and torch, each in an environment that is removed afterwards.

python tests/try_wheel.py dist/duotone-*.whl

Each Python that is installed compiles the sources. A Python that is absent is skipped with a line, and so is a pair
that cannot be installed here. A wheel that fails with a pair fails the script.
"""

import shutil
import subprocess
import sys
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13", "3.14")
PAIRS = (("3.12", "2.11.0"), ("3.13", "2.15.0"), ("3.14", "2.15.0"))
"""Versions of Python and torch: the oldest torch, and the newest that all tests ran with."""
SPACE = 12 * 2**30
"""Bytes that have to be free. An environment takes 4.7 GB, and its downloads 2.7 GB while it is installed."""
PATIENCE = 200
"""Seconds for an installation. One took 39 s."""


def installed(version: str) -> str:
    """The path of a Python of this version that runs, or ""."""
    paths = [shutil.which(f"python{version}"), *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))]
    runs = (path for path in paths if path and subprocess.run([path, "-V"], capture_output=True).returncode == 0)
    return next(runs, "")


def compile_sources(wheel: Path) -> None:
    """Byte-compile the wheel with each Python. What one warns of, such as syntax that it gives up, is an error."""
    programs = {version: installed(version) for version in VERSIONS}
    with tempfile.TemporaryDirectory() as folder:
        zipfile.ZipFile(wheel).extractall(folder)
        for program in filter(None, programs.values()):
            subprocess.run([program, "-I", "-W", "error", "-m", "compileall", "-q", "-f", folder], check=True)
    print(f"the sources compile with Python {', '.join(version for version in VERSIONS if programs[version])}")
    for version in VERSIONS:
        if not programs[version]:
            print(f"skipped: the sources with Python {version}: none is here")


def skipped(wheel: Path, python: str, torch: str) -> str:
    """Check the wheel in an environment with these versions. Why there is none, or ""."""
    base = installed(python)
    if not base:
        return f"no Python {python} is here"
    with tempfile.TemporaryDirectory() as folder:
        if shutil.disk_usage(folder).free < SPACE:
            return f"{folder} has no {SPACE >> 30} GiB"
        install = "-m pip --retries 1 --timeout 20 install --quiet --no-compile --no-cache-dir".split()
        program = f"{folder}/bin/python"
        packages = [f"torch=={torch}", str(wheel)]
        try:  # Debian's Python makes no environment without python3-venv
            subprocess.run([base, "-m", "venv", folder], check=True, capture_output=True, text=True)
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
    compile_sources(Path(sys.argv[1]))
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(report, PAIRS))

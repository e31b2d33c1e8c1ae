"""A script: the lines of `src` that `make test` runs, and how many of those of `make test-all` these are.

python tests/measure_coverage.py     # about twice the time of `make test-all`

Lines of processes that tests start count. Bodies of Triton kernels do not: Python does not run them.
"""

import subprocess
import sys
from collections import Counter
from pathlib import Path

from coverage import Coverage

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build/coverage"
CONFIG = """
[run]
source_pkgs = duotone
    duotone_lab
parallel = True
data_file = {data}
concurrency = thread
    multiprocessing
patch = subprocess
    _exit
disable_warnings = no-data-collected
    module-not-imported
    couldnt-parse
[report]
exclude_also =
    @triton.jit
    if TYPE_CHECKING:
"""
SPREAD = ("-n", "auto", "--maxprocesses", "8", "--dist", "loadfile", "--no-loadscope-reorder", "-q")
KINDS = {"make test": "not slow and not rest", "the rest": "slow or rest"}


def lines_run(kind: str) -> Counter[tuple[str, bool]]:
    """Run the tests of a kind: whether each line, written "file:number", ran."""
    folder = BUILD / kind.replace(" ", "-")
    folder.mkdir(parents=True)
    config = folder / "coverage.ini"
    config.write_text(CONFIG.format(data=folder / "data"))
    command = [sys.executable, "-m", "coverage", "run", f"--rcfile={config}", "-m", "pytest", *SPREAD]
    subprocess.run([*command, "-m", KINDS[kind]], cwd=ROOT, check=False)
    measured = Coverage(config_file=str(config))
    measured.combine()
    counts = Counter[tuple[str, bool]]()
    for path in measured.get_data().measured_files():
        name = str(Path(path).relative_to(ROOT))
        _, statements, _, missing, _ = measured.analysis2(path)
        counts.update((f"{name}:{line}", line not in set(missing)) for line in statements)
    return counts


def main() -> None:
    """Print both numbers, then the files of which `make test` leaves out most lines."""
    quick, rest = (lines_run(kind) for kind in KINDS)
    ran_quick, ran = ({line for line, has_run in each if has_run} for each in (quick, quick + rest))
    every = {line for line, _ in quick + rest}
    print(f"make test: {len(ran_quick)} of {len(every)} lines, {len(ran_quick) / len(every):.1%}")
    print(f"make test-all: {len(ran)} of {len(every)} lines, {len(ran) / len(every):.1%}")
    print(f"make test runs {len(ran_quick) / len(ran):.1%} of the lines of make test-all; left out are most of")
    for name, count in Counter(line.split(":")[0] for line in ran - ran_quick).most_common(15):
        print(f"{count:6} {name}")


if __name__ == "__main__":
    main()

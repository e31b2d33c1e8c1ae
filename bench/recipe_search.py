"""Does the recipe of `duotone search` lose more than uniform recipes that are at least as fast by the same prediction?

python -m bench.recipe_search >> bench/results/DATE-cpu-search.jsonl

The demo model for 1.3 times the speed of bf16 on an H200, then the recipe and those uniform ones under three paired
seeds. The records go to stdout, progress to stderr. A few minutes on two cores; needs the extras `cli` and `search`.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path

from bench.timing.records import emit
from duotone_lab.cli.main import run
from duotone_lab.training.ranking import margin

QUESTION = "duotone search on the demo model"
BUDGET, SIZE, SEEDS = "speed=1.3", "4096x8192", "3"


def call(*arguments: str) -> float:
    """Run a command of duotone, whose tables go to stderr; gives its seconds."""
    start = time.monotonic()
    with redirect_stdout(sys.stderr):
        code = run(arguments)
    if code:
        raise SystemExit(code)
    return time.monotonic() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        searched, compared = Path(folder, "search"), Path(folder, "compare")
        seconds = call("search", "--budget", BUDGET, "--as", SIZE, "--seeds", SEEDS, "--out", str(searched))
        evidence = json.loads((searched / "evidence.json").read_text())
        cpu = sum(os.times()[:4])
        keys = ("speeds", "chosen", "predicted", "uniform", "measured", "off_by", "verdict")
        command = evidence["command"].partition(" --out")[0]
        about = {"question": QUESTION, "command": command, "threads": evidence["machine"]["threads"]}
        emit(
            "cpu",
            {**about, "seconds": round(seconds, 1), "cpu_seconds": round(cpu, 1)} | {k: evidence[k] for k in keys},
        )
        least = evidence["predicted"]["speed"]
        faster = [name for name, uniform in evidence["uniform"].items() if (uniform["speed"] or 0.0) >= least]
        call("compare", "--recipes", str(searched / "recipe.toml"), *faster, "--seeds", SEEDS, "--out", str(compared))
        runs = {entry["name"]: entry for entry in json.loads((compared / "result.json").read_text())["runs"]}
    gaps = {name: dict(entry["gaps"]) for name, entry in runs.items()}
    for name in faster:
        differences = [gaps["searched"][seed] - gap for seed, gap in gaps[name].items()]
        mean, width = statistics.fmean(differences), margin(differences) or float("inf")
        entry = {key: runs[name][key] for key in ("gap_percent", "gap_margin", "gaps")}
        verdict = {"searched_less_this": mean, "margin": width, "searched_is_worse": mean - width > 0}
        emit(
            "cpu",
            {"question": QUESTION, "uniform": name, "speed": evidence["uniform"][name]["speed"], **entry, **verdict},
        )


if __name__ == "__main__":
    main()

"""Comparisons read back from `result.json`: to go on, or two of them on one page.

A continued comparison keeps complete runs and starts all others again. On one page the runs of both are judged against
one reference, at the last step that all have.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from duotone.errors import UserError
from duotone.recipes import HighPrecision, Recipe, from_dict
from duotone_lab.memory.step_memory import StepMemory
from duotone_lab.training import meta, outputs
from duotone_lab.training.document import curves_of
from duotone_lab.training.loop import Run
from duotone_lab.training.ranking import Judgement
from duotone_lab.training.schema import Document, RunEntry, Settings, fits, observations

SAME = ("model", "parameters", "data", "context")
"""Settings that two results must share: losses of different models or texts cannot be compared."""

SHOWN = ("preset", "steps", "tokens_per_step", "learning_rate", "seed", "seeds")
OF_PRESET = ("warmup", "heldout_batches")


def load(path: Path) -> Document:
    """The document at `path`; UserError unless it is one."""
    result = outputs.read_json(path, "give the folder of a comparison or a run", "run its command again")
    if not fits(result, Document):
        raise UserError(f"{path} is not the result of a comparison or a run: give the folder of one")
    return cast(Document, result)


def recipes_of(result: Document, path: Path) -> list[Recipe]:
    """The recipes of a comparison; UserError if `result` is of something else, or of a version without seeds."""
    runs = result["runs"]
    wrong = meta.unlike(meta.LIKE_CONFIG, result["settings"].get("config"), "config")
    if not any(run["is_reference"] for run in runs):
        wrong = "it has no reference"
    if wrong:
        raise UserError(f"the comparison in {path} cannot go on ({wrong}): compare anew with another --out, or --force")
    chosen = [run for run in runs if not run["is_reference"] and not run["is_noise"]]
    return [from_dict(run["recipe"], where=str(path), default_name=run["name"]) for run in chosen]


def take_over(runs: Sequence[Run], result: Document, steps: int) -> list[Run]:
    """`runs`, with complete runs of `result` (all `steps` steps) in their places."""
    whole = {(run.name, run.seed): run for run in runs_of(result) if run.is_over(steps) and not run.error}
    return [
        replace(whole[run.name, run.seed], recipe=run.recipe, label=run.label, is_observed=run.is_observed)
        if (run.name, run.seed) in whole
        else run
        for run in runs
    ]


def runs_of(result: Document) -> list[Run]:
    """The runs of `result` under all seeds, with a stand-in for their recipe, which only `recipes_of` reads."""
    runs = []
    for entry in result["runs"]:
        memory = (entry["peak_memory_bytes"], entry["weight_bytes"], entry["saved_activation_bytes"])
        first = Run(
            entry["name"],
            HighPrecision(),
            result["settings"].get("seed", 0),
            is_reference=entry["is_reference"],
            is_noise=entry["is_noise"],
            train_loss=[*entry["train_loss"]],
            heldout_loss=[*entry["heldout_loss"]],
            step_seconds=[entry["step_ms"] / 1e3] if entry["step_ms"] else [],
            memory=StepMemory(*(count or 0 for count in memory)) if any(memory) else None,
            observed=observations(entry),
            error=entry["error"],
        )
        runs += [first, *(replace(first, **repeat) for repeat in entry.get("repeats", ()))]
    return runs


def merged(first: Document, second: Document, label: str, *, command: str) -> Document:
    """The runs of `first`, then those of `second` with `label` behind their names.

    The reference is that of `first`, or its first run if it has none. UserError if the two cannot be compared.
    """
    left, right = first["settings"], second["settings"]
    others = _shown(right)
    if other := next((key for key in SAME if left.get(key) != right.get(key)), None):
        values = f"{left.get(other)!r} and {right.get(other)!r}"
        raise UserError(f"the two results differ in their {other}, {values}: give two of one model and text")
    if not first["runs"] or not second["runs"]:
        raise UserError("one of the two results has no run: give two that have")
    name = next((entry["name"] for entry in first["runs"] if entry["is_reference"]), first["runs"][0]["name"])
    runs_of_first: list[RunEntry] = [{**entry, "is_reference": entry["name"] == name} for entry in first["runs"]]
    runs_of_second: list[RunEntry] = [
        {**entry, "name": f"{entry['name']} ({label})", "is_reference": False}
        for entry in second["runs"]
        if not entry["is_noise"]
    ]
    results: list[Document] = [{**first, "runs": runs_of_first}, {**second, "runs": runs_of_second}]
    runs = [run for result in results for run in runs_of(result)]
    failed = {run.name for run in runs if run.error}
    seeds = [{run.seed for run in runs if run.name == name} for name in {run.name for run in runs} - failed]
    shared = set[int]().union(*seeds).intersection(*seeds)
    judgement = Judgement([run for run in runs if run.seed in shared or not shared or run.name in failed])
    entries: list[RunEntry] = [
        {
            **entry,
            **curves_of(judgement.recipes[entry["name"]]),
            **judgement.verdict(entry["name"]),
            "steps": result["settings"].get("steps", 0),
        }
        for result in results
        for entry in result["runs"]
    ]
    settings: Settings = {
        **left,
        "command": command,
        "steps": judgement.step or left.get("steps", 0),
        "seed": min(shared, default=left.get("seed", 0)),
        "seeds": len(shared) or max(map(len, judgement.recipes.values())),
        "judged_step": judgement.step,
        "noise": {},
        "differences": {key: [value, others[key]] for key, value in _shown(left).items() if value != others[key]},
        "compared": _compared(judgement.step, sorted(shared), bool(failed), left.get("steps") == right.get("steps")),
    }
    settings.pop("search", None)  # its goal is not that of the other runs
    return {**first, "partial": first["partial"] or second["partial"], "settings": settings, "runs": entries}


def _shown(settings: Settings) -> dict[str, object]:
    """Settings in which two results may differ."""
    preset = settings.get("config", {}).get("preset")
    fields = preset if isinstance(preset, dict) else {}
    return {**{key: settings.get(key) for key in SHOWN}, **{key: fields.get(key) for key in OF_PRESET}}


def _compared(step: int | None, seeds: Sequence[int], has_failed: bool, is_as_long: bool) -> str:
    """Where and under which seeds runs of two results are compared, in words."""
    if step is None or not seeds:
        return f"The runs have no {'seed' if step else 'held-out step'} in common, so those of the second have no gap."
    under = f"seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"
    all_of = "All that did not fail" if has_failed else "All"
    text = f"{all_of} are compared at step {step}, the last that they share, under {under}, which all have."
    return text if is_as_long else f"{text} Longer runs have other learning rates there."

"""A comparison that goes on: the runs that its `result.json` holds whole are taken over, all others start again."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from duotone.errors import UserError
from duotone.lab.loop import Run
from duotone.lab.memory import StepMemory
from duotone.lab.schema import Document, RepeatEntry, RunEntry
from duotone.recipes import Recipe, any_from_dict


def load(path: Path) -> Document:
    """The document at `path`; UserError unless it is one."""
    try:
        result = json.loads(path.read_bytes())
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror}): give the folder of a comparison or a run") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is no JSON ({error}): run its command again") from error
    if not isinstance(result, dict) or not {"settings", "runs", "machine"} <= result.keys():
        raise UserError(f"{path} is not the result of a comparison or a run: give the folder of one")
    return cast(Document, result)


def recipes_of(result: Document, path: Path) -> list[Recipe]:
    """The recipes of a comparison; UserError where `result` is of something else, or of a version without seeds."""
    settings, runs = result["settings"], result["runs"]
    if "config" not in settings or not any(run["is_reference"] for run in runs):
        raise UserError(f"{path} is not of a comparison that can go on: compare anew with another --out, or --force")
    chosen = [run for run in runs if not run["is_reference"] and not run["is_noise"]]
    recipes = [any_from_dict(run["recipe"], where=str(path), default_name=run["name"]) for run in chosen]
    return [recipe for recipe in recipes if isinstance(recipe, Recipe)]


def take_over(runs: Sequence[Run], result: Document, steps: int) -> None:
    """Fill those of `runs` that `result` holds to their last step of `steps`."""
    entries = {entry["name"]: entry for entry in result["runs"]}
    for run in runs:
        if (entry := entries.get(run.name)) is None:
            continue
        curves = entry if run.is_observed else _repeat(entry, run.seed)
        if curves is None or not curves["train_loss"] or curves["error"] or curves["train_loss"][-1][0] != steps:
            continue
        run.train_loss, run.heldout_loss = [*curves["train_loss"]], [*curves["heldout_loss"]]
        if run.is_observed:
            run.plan, run.statistics = [*entry["plan"]], [*entry["statistics"]]
            run.step_seconds = [entry["step_ms"] / 1e3] if entry["step_ms"] else []
            memory = (entry["peak_memory_bytes"], entry["weight_bytes"], entry["saved_activation_bytes"])
            run.memory = StepMemory(*(count or 0 for count in memory))


def _repeat(entry: RunEntry, seed: int) -> RepeatEntry | None:
    """The run of that seed, which is not the first."""
    return next((repeat for repeat in entry.get("repeats", ()) if repeat["seed"] == seed), None)

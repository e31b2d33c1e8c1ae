"""What the comparison found, in sentences that claim no more than the run shows."""

from collections.abc import Sequence

from duotone.lab.schema import Document, RunEntry
from duotone.report.numbers import broken, finite, listing, percent
from duotone.report.series import first_broken


def reference_of(result: Document) -> RunEntry | None:
    """The run that the others are compared with."""
    return next((run for run in result["runs"] if run["is_reference"]), None)


def noise_gap(result: Document) -> float | None:
    """How far two runs end apart that differ in nothing that matters, in percent, without sign."""
    noise = result["settings"].get("noise") or {}
    gaps = [noise.get("gap_percent"), *(run["gap_percent"] for run in result["runs"] if run["is_noise"])]
    return next((abs(gap) for gap in gaps if finite(gap)), None)


def trouble(result: Document, run: RunEntry) -> str | None:
    """What went wrong with a run, as the rest of a sentence that starts with its name, or None."""
    if run["error"]:
        return f"failed: {run['error']}"
    steps = [step for curve in (run["train_loss"], run["heldout_loss"]) if (step := first_broken(curve)) is not None]
    if steps:
        return f"diverged: its loss is not a finite number from step {min(steps):g}"
    if broken(run["final_train_loss"]) or broken(run["final_heldout_loss"]):
        return "diverged: its final loss is not a finite number"
    if not run["train_loss"]:
        return "did not start" if run["final_heldout_loss"] is None else None
    last, planned = run["train_loss"][-1][0], result["settings"].get("steps")
    if result["partial"] and planned and last < planned - 1:
        return f"stopped at step {last:g} of {planned}"
    return None


def verdict(result: Document) -> str:
    """The gaps of all recipes that ended, ranked, with the noise as the yardstick."""
    reference, noise = reference_of(result), noise_gap(result)
    if reference is None:
        return "There is no reference run, so there is no gap to tell."
    name = reference["name"]
    if not finite(reference["final_heldout_loss"]):
        return f"The reference {name} has no final held-out loss, so there is no gap to tell."
    others = [run for run in result["runs"] if not run["is_reference"] and not run["is_noise"]]
    ended = [(gap, run["name"]) for run in others if finite(gap := run["gap_percent"]) and trouble(result, run) is None]
    if not ended:
        return f"No recipe has ended with a held-out loss that could be compared with {name}."
    ended.sort(key=lambda pair: pair[0])
    within = [recipe for gap, recipe in ended if noise is not None and abs(gap) <= noise]
    beyond = [(gap, recipe) for gap, recipe in ended if recipe not in within]
    sentences = [f"{listing(within)} cannot be told from {name} here: within the noise."] if within else []
    sentences += _ranking([pair for pair in beyond if pair[0] < 0], "below", name)
    sentences += _ranking([pair for pair in beyond if pair[0] >= 0], "above", name)
    return " ".join(sentences)


def _ranking(runs: Sequence[tuple[float, str]], side: str, reference: str) -> list[str]:
    """A sentence about the runs on one side of the reference; none for no runs."""
    if not runs:
        return []
    (gap, name), *rest = runs
    first = f"{name} ends {percent(abs(gap))} {side} the held-out loss of {reference}"
    return [f"{listing([first, *(f'{name} {percent(abs(gap))}' for gap, name in rest)])}."]

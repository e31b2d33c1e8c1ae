"""The findings of a comparison, in sentences that claim no more than the runs show."""

from collections.abc import Sequence

from duotone_lab.report.numbers import SPACE, broken, finite, listing, percent
from duotone_lab.report.series import first_broken
from duotone_lab.training.schema import Document, RunEntry


def reference_of(result: Document) -> RunEntry | None:
    """The run that the others are compared with."""
    return next((run for run in result["runs"] if run["is_reference"]), None)


def noise_gap(result: Document) -> float | None:
    """How far two runs end apart that differ in nothing that matters, in percent, without sign."""
    gaps = (run["gap_percent"] for run in result["runs"] if run["is_noise"])
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
    last, planned = run["train_loss"][-1][0], run.get("steps", result["settings"].get("steps"))
    if result["partial"] and planned and last < planned - 1:
        return f"stopped at step {last:g} of {planned}"
    return None


def verdict(result: Document) -> str:
    """The gaps of all recipes that ended, beside what a gap must exceed: its interval over seeds, or the noise."""
    reference = reference_of(result)
    if reference is None:
        return "There is no reference run, so there is no gap to tell."
    name = reference["name"]
    if not finite(reference["final_heldout_loss"]):
        return f"The reference {name} has no final held-out loss, so there is no gap to tell."
    ended = sorted(compared(result), key=lambda run: run["gap_percent"] or 0.0)
    if all(run["is_reference"] or run["is_noise"] for run in result["runs"]):
        return f"{name} ran alone: name another recipe to compare it with."
    if not ended:
        return f"No recipe has ended with a held-out loss that could be compared with {name}."
    is_ranked = any(run.get("rank") for run in ended)
    within = [run["name"] for run in ended if is_within(run, result)]
    beyond = [run for run in ended if not is_within(run, result)]
    how = "within the noise"
    if is_ranked:
        how = f"zero lies within {'its interval' if len(within) == 1 else 'their intervals'}"
    sentences = [f"{listing(within)} cannot be told from {name} here: {how}."] if within else []
    sentences += _ranking([run for run in beyond if (run["gap_percent"] or 0.0) < 0], "below", name)
    sentences += _ranking([run for run in beyond if (run["gap_percent"] or 0.0) >= 0], "above", name)
    if not is_ranked:
        subject = "these recipes cannot be ranked" if len(ended) > 1 else f"{ended[0]['name']} cannot be ranked"
        sentences.append(f"With one seed {subject}.")
    return " ".join([*sentences, result["settings"].get("compared", "")]).rstrip()


def compared(result: Document) -> list[RunEntry]:
    """The recipes with a gap to the reference."""
    others = [run for run in result["runs"] if not run["is_reference"] and not run["is_noise"]]
    return [run for run in others if finite(run["gap_percent"]) and trouble(result, run) is None]


def is_within(run: RunEntry, result: Document) -> bool:
    """Whether the gap of a run may be none: zero lies in its interval, or it is below the noise."""
    least = run.get("gap_margin")
    least = noise_gap(result) if least is None else least
    return least is not None and finite(run["gap_percent"]) and abs(run["gap_percent"]) <= least


def gap_text(run: RunEntry) -> str:
    """`0.41 %`, or `0.41 ± 0.10 %` where several seeds give an interval."""
    gap, width = run["gap_percent"], run.get("gap_margin")
    size = percent(None if gap is None else abs(gap))
    return size if width is None else f"{size.removesuffix(SPACE + '%')} ± {percent(width)}"


def _ranking(runs: Sequence[RunEntry], side: str, reference: str) -> list[str]:
    """A sentence about the runs on one side of the reference; none for no runs."""
    if not runs:
        return []
    first, *rest = runs
    start = f"{first['name']} ends {gap_text(first)} {side} the held-out loss of {reference}"
    others = [f"{run['name']} {gap_text(run)}" for run in rest]
    return [f"{listing([start, *others])}."]

"""What the comparison found, in sentences that claim no more than the run shows."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from duotone.report.numbers import broken, finite, listing, percent
from duotone.report.plan_table import counts
from duotone.report.series import first_broken

Run = Mapping[str, Any]
Result = Mapping[str, Any]


def reference_of(result: Result) -> Run | None:
    """The run that the others are compared with."""
    return next((run for run in result["runs"] if run["is_reference"]), None)


def noise_gap(result: Result) -> float | None:
    """How far two runs end apart that differ in nothing that matters, in percent, without sign."""
    noise = (result.get("settings") or {}).get("noise") or {}
    rows = [run["gap_percent"] for run in result["runs"] if run["is_noise"]]
    found = [value for value in (noise.get("gap_percent"), *rows) if finite(value)]
    return abs(found[0]) if found else None


def reached(run: Run) -> float | None:
    """The last step that has a training loss."""
    return run["train_loss"][-1][0] if run["train_loss"] else None


def trouble(result: Result, run: Run) -> str | None:
    """What went wrong with a run, as the rest of a sentence that starts with its name, or None."""
    if run["error"]:
        return f"failed: {run['error']}"
    steps = [first_broken(run[name]) for name in ("train_loss", "heldout_loss")]
    found = [step for step in steps if step is not None]
    if found:
        return f"diverged: its loss is not a finite number from step {min(found):g}"
    if broken(run["final_train_loss"]) or broken(run["final_heldout_loss"]):
        return "diverged: its final loss is not a finite number"
    last, planned = reached(run), (result.get("settings") or {}).get("steps")
    if last is None and run["final_heldout_loss"] is None:
        return "did not start"
    if result["partial"] and last is not None and planned and last < planned - 1:
        return f"stopped at step {last:g} of {planned}"
    return None


def troubles(result: Result) -> list[tuple[str, str]]:
    """Each run that did not go well, and what happened to it."""
    found = ((run["name"], trouble(result, run)) for run in result["runs"])
    return [(name, what) for name, what in found if what is not None]


def verdict(result: Result) -> str:
    """The gaps of all recipes that ended, ranked, with the noise as the yardstick."""
    reference, noise = reference_of(result), noise_gap(result)
    if reference is None:
        return "There is no reference run, so there is no gap to tell."
    if not finite(reference["final_heldout_loss"]):
        return f"The reference {reference['name']} has no final held-out loss, so there is no gap to tell."
    others = [run for run in result["runs"] if not run["is_reference"] and not run["is_noise"]]
    whole = [run for run in others if finite(run["gap_percent"]) and trouble(result, run) is None]
    ended = sorted(whole, key=lambda run: run["gap_percent"])
    if not ended:
        return f"No recipe has ended with a held-out loss that could be compared with {reference['name']}."
    within = [run for run in ended if noise is not None and abs(run["gap_percent"]) <= noise]
    beyond = [run for run in ended if run not in within]
    sentences = []
    if within:
        names = listing([run["name"] for run in within])
        sentences.append(f"{names} cannot be told from {reference['name']} here: within the noise.")
    for side, runs in (
        ("below", [run for run in beyond if run["gap_percent"] < 0]),
        ("above", [run for run in beyond if run["gap_percent"] >= 0]),
    ):
        if runs:
            sentences.append(_ranking(runs, side, reference["name"]))
    return " ".join(sentences)


def yardstick(result: Result) -> str:
    """How much of a gap means nothing, and where that number comes from."""
    reference, noise = reference_of(result), noise_gap(result)
    if reference is None:
        return ""
    if noise is None:
        return "No noise run has ended, so nothing says how small a gap still means something."
    told = ((result.get("settings") or {}).get("noise") or {}).get("perturbation")
    how = f"perturbed by {_power(told)}" if finite(told) else "barely changed"
    return (
        f"Yardstick: {reference['name']} run a second time with its initial weights {how} ends "
        f"{percent(noise)} away. A gap of that size says nothing; with one repeat and one seed, "
        "a gap a few times as large says little."
    )


def speed_caveat(result: Result) -> str | None:
    """That emulated step times are not the hardware's, with the names of the recipes this is about."""
    emulated = [run["name"] for run in result["runs"] if counts(run["plan"])["emulated"]]
    if not emulated:
        return None
    device = (result.get("machine") or {}).get("device") or "this device"
    who = f"{listing(emulated)} {'run' if len(emulated) > 1 else 'runs'}"
    return (
        f"{who} emulated GEMMs here: the numerics are those of the formats, but the step time is that of "
        f"emulation on {device}. It says nothing about hardware that multiplies these formats natively."
    )


def _power(value: float) -> str:
    """`1e-6` rather than `1e-06`."""
    return re.sub(r"e([+-])0", r"e\1", f"{value:g}")


def _ranking(runs: Sequence[Run], side: str, reference: str) -> str:
    first, *rest = (f"{run['name']} {percent(abs(run['gap_percent']))}" for run in runs)
    name, _, gap = first.rpartition(" ")
    return f"{listing([f'{name} ends {gap} {side} the held-out loss of {reference}', *rest])}."

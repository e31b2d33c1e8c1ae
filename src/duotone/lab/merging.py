"""Two results on one page: the runs of both, judged against one reference at the last step that all have."""

from duotone.errors import UserError
from duotone.lab.continuation import runs_of
from duotone.lab.ranking import Judgement
from duotone.lab.schema import Document, RunEntry, Settings

SAME = ("model", "parameters", "data", "context")
"""What two results must share: losses of other models or texts say nothing about each other."""

SHOWN = ("preset", "steps", "tokens_per_step", "learning_rate", "seed", "seeds")


def merged(first: Document, second: Document, label: str, *, command: str) -> Document:
    """The runs of `first`, then those of `second` with `label` behind their names.

    The reference is that of `first`, or its first run if it has none. UserError where the two cannot be compared.
    """
    left, right = first["settings"], second["settings"]
    if other := next((key for key in SAME if left.get(key) != right.get(key)), None):
        told = f"{left.get(other)!r} and {right.get(other)!r}"
        raise UserError(f"the two results differ in their {other}, {told}: give two of one model and text")
    if not first["runs"] or not second["runs"]:
        raise UserError("one of the two results has no run: give two that have")
    name = next((entry["name"] for entry in first["runs"] if entry["is_reference"]), first["runs"][0]["name"])
    mine: list[RunEntry] = [{**entry, "is_reference": entry["name"] == name} for entry in first["runs"]]
    theirs: list[RunEntry] = [
        {**entry, "name": f"{entry['name']} ({label})", "is_reference": False}
        for entry in second["runs"]
        if not entry["is_noise"]
    ]
    results: list[Document] = [{**first, "runs": mine}, {**second, "runs": theirs}]
    judgement = Judgement([run for result in results for run in runs_of(result)])
    settings: Settings = {
        **left,
        "command": command,
        "seeds": max(map(len, judgement.recipes.values())),
        "judged_step": judgement.step,
        "differences": {key: [left.get(key), right.get(key)] for key in SHOWN if left.get(key) != right.get(key)},
    }
    entries: list[RunEntry] = [{**entry, **judgement.verdict(entry["name"])} for entry in [*mine, *theirs]]
    return {**first, "partial": first["partial"] or second["partial"], "settings": settings, "runs": entries}

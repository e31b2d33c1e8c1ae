"""Module names, many at a time: `layers.0.mlp` to `layers.11.mlp` become `layers.{0–11}.mlp`."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from duotone_lab.training.schema import RunEntry

DASH = "\N{EN DASH}"
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


def pattern(name: str) -> str:
    """`name` with each number between its dots replaced by a star."""
    return NUMBER.sub("*", name)


def compact(names: Iterable[str]) -> list[str]:
    """A short list that stands for `names`, exactly where they differ in at most one number."""
    groups = defaultdict(list)
    for name in names:
        groups[pattern(name)].append(name)
    result = []
    for shape, members in groups.items():
        fields = list(zip(*(map(int, NUMBER.findall(name)) for name in members), strict=True))
        varying = [index for index, field in enumerate(fields) if len(set(field)) > 1]
        if len(members) == 1 or len(varying) != 1:
            result.extend(members if len(members) <= 3 else [f"{shape} ({len(members)} modules)"])
            continue
        texts = (f"{{{ranges(field)}}}" if len(set(field)) > 1 else str(field[0]) for field in fields)
        result.append(NUMBER.sub(lambda _, texts=texts: next(texts), members[0]))
    return result


def memory(runs: Sequence[RunEntry]) -> list[tuple[str, list[int | None]]]:
    """For each kind of module the bytes of weights of the first run, then what is saved for backward in each run."""
    sums: list[dict[str, list[int]]] = []
    for run in runs:
        sums.append(defaultdict(lambda: [0, 0]))
        for entry in run.get("modules", ()):
            cell = sums[-1][pattern(entry["module"]) or "(model)"]
            cell[0], cell[1] = cell[0] + entry["weights"], cell[1] + entry["saved"]
    first = next(filter(None, sums), {})
    return [
        (kind, [weights, *(part[kind][1] if kind in part else None for part in sums)])
        for kind, (weights, _) in first.items()
        if weights or any(kind in part and part[kind][1] for part in sums)
    ]


def ranges(numbers: Iterable[int]) -> str:
    """`0–3, 7` for 0, 1, 2, 3 and 7."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(f"{low}" if low == high else f"{low}{DASH}{high}" for low, high in runs)

"""Which recipe to use, in words: the speed of each on a named GPU, and the gap that it costs."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from duotone.observe import speeds
from duotone.observe.candidates import recipe_of
from duotone.observe.speeds import UNKNOWN, Shape, Speed
from duotone.recipes.roles import PLANES_OF_GEMM
from duotone_lab.report.module_names import pattern
from duotone_lab.report.numbers import finite, listing, number, percent
from duotone_lab.report.verdict import compared, gap_text, is_within, reference_of
from duotone_lab.training.schema import Document, RunEntry, SearchEntry, Settings

EXAMPLE = (4096, 8192)
"""The width and the tokens of the reported speeds, if those of the model were not measured."""

SEEDING = frozenset({"seed", "seeds"})
"""Settings in which two results may differ without another loss of the same recipe."""

UNNAMED = (4096, 14336)
"""Features in and out of the linear that stands for a model whose result names none."""

WORTH = 1.05
"""A recipe below this speed over bf16 is not called faster."""

ONE_SEED = 1.0
"""Percent by which gaps of small models may differ from one seed to the next."""

CONFIDENCE = ((0.25, "high"), (1.0, "moderate"))
"""The largest gap in percent (the upper end of the 95 % interval) for each level of safety; above it is low."""


@dataclass(frozen=True)
class Hardware:
    """A GPU, and the speed of each run on it over bf16. `what` was measured; `source` names the measurement."""

    name: str
    what: str
    source: str
    speeds: dict[str, Speed]

    def speed(self, run: RunEntry) -> Speed:
        """The speed of a run."""
        return self.speeds.get(run["name"], UNKNOWN)


def hardware(result: Document) -> Hardware:
    """The GPU that the runs were on; else the measured one, for the model's linears or for wider ones."""
    runs, reference, settings = result["runs"], reference_of(result), result["settings"]
    is_asked = settings.get("size") is not None or "search" in settings
    if result["machine"].get("device") == "cuda" and reference is not None and not is_asked:
        times = {run["name"]: ms for run in runs if finite(ms := run["step_ms"]) and ms > 0}
        base = times.get(reference["name"])
        ratios = {name: Speed(base / ms, "measured") for name, ms in times.items() if base is not None}
        return Hardware(str(result["machine"].get("processor")), "a step of this model", "measured in this run", ratios)
    table, size, note = speeds.measured(), settings.get("size"), ""
    ratios = _speeds(runs, _shapes(settings, size))
    if not is_asked and all(speed.ratio is None for speed in ratios.values()):
        size, note = EXAMPLE, "; the linears of this model were not measured"
        ratios = _speeds(runs, _shapes(settings, size))
    what = "the linears of this model" if size is None else f"linears {size[0]} wide with {size[1]} tokens"
    return Hardware(table.device, what, f"{table.source}, {table.date}{note}", ratios)


def _shapes(settings: Settings, size: Sequence[int] | None) -> dict[str, Shape]:
    """Tokens, features in and out of each linear, by its module."""
    linears = settings.get("linears") or {"": UNNAMED}
    sizes, tokens = [(inputs, outputs) for inputs, outputs in linears.values()], settings.get("tokens_per_step") or 0
    if size is not None:
        sizes, tokens = speeds.widened(sizes, size[0]), size[1]
    return {module: (tokens, *linear) for module, linear in zip(linears, sizes, strict=True)}


def _speeds(runs: Sequence[RunEntry], shapes: Mapping[str, Shape]) -> dict[str, Speed]:
    """The speeds of linears under each run: of each GEMM with its formats, or with the name of a run without a plan."""
    table, result = speeds.measured(), {}
    for run in runs:
        plan = {(row["module"], row["gemm"]): (row["a"] or "", row["b"] or "") for row in run["plan"]}
        parts = [
            (recipe_of(plan[module, kind], kind) if (module, kind) in plan else run["name"], shape)
            for module, shape in shapes.items()
            for kind in PLANES_OF_GEMM
        ]
        result[run["name"]] = table.model_speed(parts)
    return result


def module_speeds(result: Document) -> dict[str, list[str]]:
    """For each kind of linear its speed over bf16 under each run, where the measured table knows it; "" elsewhere."""
    shapes = _shapes(result["settings"], result["settings"].get("size")).items()
    kinds = {pattern(module): {module: shape} for module, shape in shapes}
    return {kind: [*map(_short, _speeds(result["runs"], linear).values())] for kind, linear in kinds.items()}


def _short(speed: Speed) -> str:
    return "" if speed.ratio is None else f"{'≈ ' * (speed.basis != 'measured')}{number(speed.ratio, 2)} times"


def answer(result: Document) -> str:
    """What to use on that GPU, and why; "" without a recipe that could be compared.

    Two results that were trained differently name no recipe.
    """
    if differing := _differing(result):
        return f"No recipe is named: the two results differ in {differing}, so their gaps are not of recipes alone."
    runs, reference, where = compared(result), reference_of(result), hardware(result)
    if reference is not None and (search := result["settings"].get("search")) is not None:
        for run in result["runs"]:
            if run["name"] == search["recipe"]:
                return _searched(search, run, where, reference["name"])
    if not runs or reference is None:
        return ""
    base, best = reference["name"], _best(result, where)
    if best is None:
        timed = [run for run in runs if where.speed(run).ratio is not None]
        others = [
            f"{run['name']} is {_times(where, run)}" + f", but ends {gap_text(run)} above" * _is_faster(run, where)
            for run in timed
        ]
        reasons = f" {'; '.join(others)}." if others else f" No speed is known there for {where.what}."
        return f"Stay with {base} on an {where.name}: nothing as good is known to be faster there.{reasons}"
    loss = f"its loss cannot be told from that of {base}"
    if not is_within(best, result):
        loss = (
            f"its loss ends {gap_text(best)} {'below' if (best['gap_percent'] or 0.0) < 0 else 'above'} that of {base}"
        )
        loss += ", which one seed cannot tell from none" * (not best.get("rank"))
    use = f"{_verb(best)} {best['name']} on an {where.name}"
    return f"{use}: {_times(where, best)} for {where.what}, and {loss}."


def _differing(result: Document) -> str:
    """The settings of two results that change the loss of every recipe, with both values; "" without any."""
    differences = result["settings"].get("differences", {}).items()
    texts = [
        f"{key.replace('_', ' ')} ({' and '.join(map(str, each))})" for key, each in differences if key not in SEEDING
    ]
    return listing(texts)


def _searched(search: SearchEntry, run: RunEntry, where: Hardware, base: str) -> str:
    """The recipe of a search: its predicted speed, its measured gap, and whether the goal is met."""
    gap, margin, speed = run["gap_percent"], run.get("gap_margin"), where.speed(run)
    bound = f"{search['kind']}={search['value']:g}"
    goal = {
        "speed": f"so {bound} is met",
        "memory": f"and it keeps {number(search['memory'], 2)} of the bytes for backward, so {bound} is met",
        "gap": f"and whether {bound} % is met cannot be told",
    }[search["kind"]]
    loss = "its loss is not measured"
    if gap is not None:
        loss = f"its loss ends {gap_text(run)} {'below' if gap < 0 else 'above'} that of {base}"
    if gap is not None and margin is not None:
        loss += " (zero lies in this interval)" * (abs(gap) <= margin)
        if search["kind"] == "gap" and abs(gap - search["value"]) > margin:
            goal = f"and {bound} % is {'not ' * (gap > search['value'])}met"
    fast = "its speed is unknown"
    if speed.ratio is not None:
        fast = f"predicted {number(speed.ratio, 2)} times as fast as {base}"
    return f"{_verb(run)} {run['name']} on an {where.name}: {fast} for {where.what}, {goal}; {loss}."


def _verb(run: RunEntry) -> str:
    """One seed is never more than a try."""
    return "Use" if run.get("rank") else "Try"


def confidence(result: Document) -> str:
    """How sure the answer is, and where its speed is from."""
    if _differing(result):
        return "Confidence: none, because gaps between runs that were trained differently do not rank recipes."
    runs, where = compared(result), hardware(result)
    best, unknown = _best(result, where), [run["name"] for run in runs if where.speed(run).ratio is None]
    speed = f"Speed: {where.source}." + (f" Unknown for {listing(unknown)}." if unknown else "")
    if not any(run.get("rank") for run in runs):
        return f"Confidence: low, because one seed cannot rank recipes. {speed}"
    if best is None:
        return f"Confidence: that of the intervals below. {speed}"
    most = (best["gap_percent"] or 0.0) + (best.get("gap_margin") or 0.0)
    word = next((word for limit, word in CONFIDENCE if most <= limit), "low")
    return f"Confidence: {word}, its gap may be up to {percent(most)}, the end of its 95 % interval. {speed}"


def _best(result: Document, where: Hardware) -> RunEntry | None:
    """The fastest recipe whose loss is not known to be higher than that of the reference.

    One seed knows of no gap up to `ONE_SEED`.
    """
    if "search" in result["settings"]:
        return next(iter(compared(result)), None)
    limits = [(run, 0.0 if run.get("rank") else ONE_SEED) for run in compared(result)]
    good = [run for run, limit in limits if is_within(run, result) or (run["gap_percent"] or 0.0) < limit]
    good = [run for run in good if _is_faster(run, where)]
    return max(good, key=lambda run: where.speed(run).ratio or 0.0, default=None)


def _is_faster(run: RunEntry, where: Hardware) -> bool:
    return (where.speed(run).ratio or 0.0) >= WORTH


def _times(where: Hardware, run: RunEntry) -> str:
    speed = where.speed(run)
    return f"{number(speed.ratio, 2)} times as fast" + (f" ({speed.basis})" * (speed.basis != "measured"))

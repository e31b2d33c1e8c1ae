"""Which recipe to use: what each is worth on a named GPU beside the gap that it costs, in words."""

from dataclasses import dataclass

from duotone.lab.schema import Document, RunEntry
from duotone.observe import speeds
from duotone.observe.speeds import UNKNOWN, Speed
from duotone.report.module_names import pattern
from duotone.report.numbers import finite, listing, number, percent
from duotone.report.verdict import compared, gap_text, is_within, reference_of

EXAMPLE = (8192, 4096, 14336)
"""The linear whose speed stands for large models where those of the model were not measured."""

WORTH = 1.05
"""A recipe below this speed over bf16 is not called faster."""

CONFIDENCE = ((0.25, "high"), (1.0, "moderate"))
"""Up to which gap in percent, the upper end of the 95 % interval, a choice is so safe; low beyond."""


@dataclass(frozen=True)
class Hardware:
    """A GPU, and the speed of each run on it over bf16. `what` is that speed's subject, `source` where it is from."""

    name: str
    what: str
    source: str
    speeds: dict[str, Speed]

    def speed(self, run: RunEntry) -> Speed:
        return self.speeds.get(run["name"], UNKNOWN)


def hardware(result: Document) -> Hardware:
    """The GPU that the runs were on; else the measured one, for the model's linears or for one that stands for them."""
    runs, reference, settings = result["runs"], reference_of(result), result["settings"]
    if result["machine"].get("device") == "cuda" and reference is not None:
        times = {run["name"]: ms for run in runs if finite(ms := run["step_ms"]) and ms > 0}
        base = times.get(reference["name"])
        known = {name: Speed(base / ms, "measured") for name, ms in times.items() if base is not None}
        return Hardware(str(result["machine"].get("processor")), "a step of this model", "measured in this run", known)
    table = speeds.measured()
    tokens, linears = settings.get("tokens_per_step") or 0, settings.get("linears") or []
    known = {run["name"]: table.model_speed(run["name"], tokens, linears) for run in runs}
    record = f"{table.source}, {table.date}"
    if any(speed.ratio is not None for speed in known.values()):
        return Hardware(table.device, "the work of the linears of this model", record, known)
    rows, inputs, outputs = EXAMPLE
    known = {run["name"]: table.speed(run["name"], EXAMPLE) for run in runs}
    what = f"a linear of {inputs} x {outputs} with {rows} tokens"
    note = "the linears of this model are outside of the measured shapes"
    return Hardware(table.device, what, f"{record}; {note}", known)


def module_speeds(result: Document) -> dict[str, list[str]]:
    """For each kind of linear its speed over bf16 under each run, where the measured table knows it; "" elsewhere."""
    table, tokens, runs = speeds.measured(), result["settings"].get("tokens_per_step") or 0, result["runs"]
    shapes: dict[str, tuple[int, int]] = {}
    for entry in (entry for run in runs for entry in run.get("modules", ())):
        if (linear := entry.get("linear")) is not None:
            shapes[pattern(entry["module"])] = linear[0], linear[1]
    return {
        kind: [_short(table.speed(run["name"], (tokens, *shape))) for run in runs] for kind, shape in shapes.items()
    }


def _short(speed: Speed) -> str:
    return "" if speed.ratio is None else f"{'≈ ' * (speed.basis != 'measured')}{number(speed.ratio, 2)} times"


def answer(result: Document) -> str:
    """What to use on that GPU, and why; "" without a recipe that could be compared."""
    runs, reference, where = compared(result), reference_of(result), hardware(result)
    if not runs or reference is None:
        return ""
    base, best = reference["name"], _best(result, where)
    if best is None:
        fast = [run for run in runs if _is_faster(run, where)]
        costly = [f"{run['name']} is {_times(where, run)} as fast, but ends {gap_text(run)} above" for run in fast]
        told = f" {listing(costly)}." if costly else ""
        return f"Stay with {base} on an {where.name}: nothing as good is known to be faster there.{told}"
    loss = f"its loss cannot be told from that of {base}"
    if not is_within(best, result):
        loss = f"its loss ends {gap_text(best)} below that of {base}"
    verb = "Use" if best.get("rank") else "Try"
    return f"{verb} {best['name']} on an {where.name}: {where.what} is {_times(where, best)} as fast, and {loss}."


def confidence(result: Document) -> str:
    """How sure the answer is, and where its speed is from."""
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
    """The fastest recipe whose loss is not known to be higher than that of the reference."""
    good = [run for run in compared(result) if is_within(run, result) or (run["gap_percent"] or 0.0) < 0]
    good = [run for run in good if _is_faster(run, where)]
    return max(good, key=lambda run: where.speed(run).ratio or 0.0, default=None)


def _is_faster(run: RunEntry, where: Hardware) -> bool:
    return (where.speed(run).ratio or 0.0) >= WORTH


def _times(where: Hardware, run: RunEntry) -> str:
    speed = where.speed(run)
    return f"{number(speed.ratio, 2)} times" + (" (interpolated)" if speed.basis == "interpolated" else "")

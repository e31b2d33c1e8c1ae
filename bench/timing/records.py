"""Records: what a case gave, one for each candidate, as JSON lines."""

import gc
import json
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from bench.timing.appending import append_lines
from bench.timing.case import Candidate, Case, Work
from bench.timing.duel import Pace, Timing, duel, failure
from duotone.errors import UserError
from duotone_lab.training import outputs

DIGITS = 5
RECOMPILES = 256
"""Compiled candidates share code objects; torch gives one up after 8 variants unless told otherwise."""


@dataclass(frozen=True)
class Record:
    """One candidate at one shape: the median, fastest and slowest turn in ms a step, or the error.

    `ratio` is the speed over `base`, in the case's unit; `host_us` the host time of a step where calls are queued;
    `peak_mib` extra memory of a step, for `train` all memory.
    """

    what: str
    shape: str
    candidate: str
    base: str
    ms: float | None = None
    min: float | None = None
    max: float | None = None
    calls: int | None = None
    ratio: float | None = None
    host_us: float | None = None
    peak_mib: float | None = None
    rate: float | None = None
    unit: str = ""
    error: str = ""


TOO_LARGE = ("alloc", "overflow")
"""What torch says of tensors that no memory holds, and of those whose size no integer does."""


def measure(case: Case, pace: Pace | None = None, tell: Callable[[str], None] = lambda _: None) -> list[Record]:
    """Run the duel of a case; what `tell` raises ends it. UserError where the inputs do not fit the device."""
    import torch._dynamo

    gc.collect()
    works, failed = {}, {}
    with torch._dynamo.config.patch(recompile_limit=RECOMPILES, accumulated_recompile_limit=RECOMPILES):
        candidates = candidates_of(case)
        for candidate in candidates:
            tell(f"{candidate.name}: making it")
            work = _make(candidate)
            (failed if isinstance(work, str) else works)[candidate.name] = work
        timings = duel({name: work.call for name, work in works.items()}, case.clock, pace, tell)
        records = [
            _record(case, candidate.name, works.get(candidate.name), {**failed, **timings}[candidate.name], tell)
            for candidate in candidates
        ]
    return _with_ratios(records, {name: work.amount for name, work in works.items()})


def candidates_of(case: Case) -> Sequence[Candidate]:
    """The candidates of a case; UserError if its shape does not fit the device."""
    try:
        return case.candidates()
    except (RuntimeError, TypeError) as error:
        if not isinstance(error, torch.OutOfMemoryError) and not any(word in str(error) for word in TOO_LARGE):
            raise
        raise UserError(f"{case.what}: {case.shape} does not fit the device; give a smaller --shape") from None


def _make(candidate: Candidate) -> Work | str:
    try:
        return candidate.make()
    except Exception as error:
        return failure(error)


def _record(case: Case, name: str, work: Work | None, timing: Timing | str, tell: Callable[[str], None]) -> Record:
    blank = Record(case.what, case.shape, name, case.base, unit=case.unit)
    if work is None or isinstance(timing, str):
        return replace(blank, error=str(timing))
    peak, error = None, ""
    if work.peak_mib is not None:
        tell(f"{name}: memory")
        try:
            peak = work.peak_mib()
        except Exception as raised:
            error = failure(raised)
    per_step = [value / work.steps for value in (timing.median, min(timing.turns), max(timing.turns))]
    return replace(
        blank,
        **dict(zip(("ms", "min", "max"), (round(value, DIGITS) for value in per_step), strict=True)),
        calls=timing.calls * work.steps,
        host_us=None if timing.host_us is None else round(timing.host_us / work.steps, 1),
        peak_mib=None if peak is None else round(peak, 1),
        rate=round(case.scale * work.amount / (1e-3 * per_step[0]), 2) if case.unit else None,
        error=error,
    )


def _with_ratios(records: Sequence[Record], amounts: dict[str, float]) -> list[Record]:
    """Speeds, amount per time, over the base of the same run."""
    speeds = {r.candidate: amounts[r.candidate] / r.ms for r in records if r.ms}
    return [
        replace(record, ratio=round(speeds[record.candidate] / speeds[record.base], DIGITS))
        if record.candidate in speeds and record.base in speeds
        else record
        for record in records
    ]


def describe(device: str) -> str:
    """The device as records name it."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def stamp(device: str) -> dict[str, str]:
    """When and where something is measured: what every JSON line begins with."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": now, "torch": torch.__version__, "python": platform.python_version(), "device": describe(device)}


def emit(device: str, values: Mapping[str, object]) -> None:
    """Print one JSON line: the stamp, then the values."""
    print(json.dumps({**stamp(device), **values}), flush=True)


def lines(records: Iterable[Record], device: str) -> str:
    """JSON lines with date, torch and device; what a record does not have is null."""
    when = stamp(device)
    return "".join(json.dumps({**when, **asdict(record)}) + "\n" for record in records)


def require_appendable(path: Path) -> None:
    """UserError unless lines can be added to `path`; makes its folder and the file."""
    outputs.make_folder(path.parent)
    append(path, "")


def append(path: Path, text: str) -> None:
    """Add the lines `text` to the file, all or none; UserError where that is impossible."""
    try:
        append_lines(path, text)
    except OSError as error:
        raise UserError(f"cannot write to {path} ({error.strerror}): choose a file that you may write") from None

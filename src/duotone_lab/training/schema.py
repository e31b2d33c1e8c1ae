"""The JSON document of a comparison or a training run, which the report page reads.

Types, lengths and bounds of all values are data here, and `fits` checks a document against them. So whatever fits has a
page, in a time that grows with the size of its file.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    NotRequired,
    Required,
    TypedDict,
    Union,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)


@dataclass(frozen=True)
class Within:
    """Numbers from `least` to `most`, or lists and texts of such a length. JSON has no NaN, and no infinities."""

    least: float
    most: float

    def __contains__(self, value: Any) -> bool:
        return self.least <= (value if isinstance(value, int | float) else len(value)) <= self.most


class Iso:
    """Times in ISO 8601."""

    def __contains__(self, value: str) -> bool:
        try:
            return bool(datetime.fromisoformat(value))
        except ValueError:
            return False


DEPTH = 50
"""How deep lists and tables of no declared type may lie in each other."""

Number = Annotated[float, Within(-1e100, 1e100)]
Magnitude = Annotated[float, Within(0, 1e100)]
Positive = Annotated[float, Within(1e-100, 1e100)]
Count = Annotated[int, Within(0, 2**63)]
Features = Annotated[int, Within(1, 2**53)]
Pair = Annotated[Sequence[Features], Within(2, 2)]
Power = Annotated[int, Within(-(2**20), 2**20)]
Name = Annotated[str, Within(0, 4000)]
"""A name of a module or of a run."""

Json = Mapping[str, object]
Loss = tuple[Count, Number | None]
"""A step, counted from one, and its loss in nats. None stands for a loss that was not finite."""

Losses = Sequence[Loss]


class GemmEntry(TypedDict):
    """One GEMM of one module: a row of `duotone.plan`."""

    module: Name
    gemm: str | None
    a: str | None
    b: str | None
    kernel: str | None
    native: bool | None
    reason: str | None
    ran: NotRequired[str]


class PlaneEntry(TypedDict):
    """What one plane of one tensor lost, as `duotone.observe` tells it; results of earlier versions have no events."""

    module: Name
    role: str
    plane: str
    format: str
    samples: Count | None
    snr_db: Number | None
    underflow: Number | None
    saturation: Number | None
    amax: Number | None
    bias: NotRequired[Number | None]
    cosine: NotRequired[Number | None]
    nan: NotRequired[Count]
    inf: NotRequired[Count]
    dynamic_range_bits: NotRequired[Number | None]
    amaxes_skipped: NotRequired[Count]
    spikes_clamped: NotRequired[Count]


class DriftEntry(TypedDict):
    """All modules together in one sampled step; the largest magnitude, and the largest that any scale could hold.

    Magnitudes are those of the values that codes stand for, after any rotation. `clipped` is the share of elements far
    above what their scale can hold. Exact planes have no limit.
    """

    step: Count
    role: str
    plane: str
    snr_db: Number | None
    amax: NotRequired[Magnitude]
    limit: NotRequired[Magnitude | None]
    clipped: NotRequired[Magnitude]


class SpreadEntry(TypedDict):
    """How many nonzero elements have a magnitude, and a scale, of each power of two, from `lowest` on."""

    role: str
    plane: str
    lowest: Power
    counts: Sequence[Count]
    scales: NotRequired[Sequence[Count]]


class OperandEntry(TypedDict):
    """One operand: how far its two planes differ as a share of it, and channels whose amax stands out."""

    module: Name
    role: str
    disagreement: Number | None
    channels: Count
    outliers: Count
    largest_channel: Count
    over_median: Number | None


class EventEntry(TypedDict):
    """What happened at a step of a run, in words."""

    step: Count
    text: str


class ProductEntry(TypedDict):
    """The relative error of one GEMM, and the error that independent errors of its operands would cause."""

    module: Name
    gemm: str
    error: Magnitude
    expected: Positive


class ModuleEntry(TypedDict):
    """Bytes that one module owns and that autograd keeps for it, as `duotone_lab.ledger` tells them."""

    module: Name
    weights: Count
    caches: Count
    saved: Count


class RepeatEntry(TypedDict):
    """The same recipe under another seed."""

    seed: Count
    train_loss: Losses
    heldout_loss: Losses
    error: str | None


class Verdict(TypedDict, total=False):
    """What all seeds say of a recipe, at the step where all are judged. Results of earlier versions have the gap alone.

    Gaps are in percent of the loss of the reference under the same seed: their mean, half of its 95 % interval, and
    each with its seed. Recipes that cannot be told apart share a rank.
    """

    judged_loss: Number | None
    gap_percent: Required[Number | None]
    gap_margin: Number | None
    gaps: Sequence[Sequence[Number]]
    rank: Count | None


class Observations(TypedDict):
    """What a run showed besides its losses. Results of earlier versions have the first two alone."""

    plan: Sequence[GemmEntry]
    statistics: Sequence[PlaneEntry]
    drift: NotRequired[Sequence[DriftEntry]]
    spreads: NotRequired[Sequence[SpreadEntry]]
    products: NotRequired[Sequence[ProductEntry]]
    operands: NotRequired[Sequence[OperandEntry]]
    events: NotRequired[Sequence[EventEntry]]
    modules: NotRequired[Sequence[ModuleEntry]]


def observations(source: Mapping[str, Any] | None = None) -> Observations:
    """The observations of an entry, or empty ones. Missing lists are empty."""
    return cast(Observations, {key: [*(source or {}).get(key, ())] for key in Observations.__annotations__})


class Curves(TypedDict):
    """The losses of one recipe under the first seed, and under others."""

    train_loss: Losses
    heldout_loss: Losses
    final_train_loss: Number | None
    final_heldout_loss: Number | None
    repeats: NotRequired[Sequence[RepeatEntry]]


class RunEntry(Curves, Verdict, Observations):
    """One recipe, its run under the first seed, and repeats under others. Numbers that do not exist are None.

    `steps`: the planned number, if the document has the runs of two results.
    """

    name: Name
    recipe: Json
    is_reference: bool
    is_noise: bool
    steps: NotRequired[Count]
    step_ms: Number | None
    tokens_per_second: Number | None
    peak_memory_bytes: Count | None
    weight_bytes: Count | None
    saved_activation_bytes: Count | None
    error: str | None


class Noise(TypedDict, total=False):
    """Relative noise on the initial weights of the noise run."""

    perturbation: Number


class SearchEntry(TypedDict):
    """The goal of a search, and the predicted cost and memory of its recipe, both over bf16."""

    recipe: str
    kind: Literal["speed", "memory", "gap"]
    value: Number
    gap_percent: Number
    speed: Number | None
    memory: Number


class Machine(TypedDict, total=False):
    """What the numbers were measured on."""

    torch: str
    python: str
    commit: str | None
    device: str
    processor: str
    threads: Count
    compiled_casts: bool


class Settings(TypedDict, total=False):
    """What was trained, on what and for how long.

    `linears`: features in and out of each that follows a recipe. `size`: the width and the tokens for which speeds are
    predicted, None for those of the model.
    """

    command: str | None
    preset: str
    model: str
    parameters: Count
    data: str
    data_bytes: Count
    digests: Json
    steps: Count
    tokens_per_step: Count
    context: Count
    seed: Count
    seeds: Count
    judged_step: Count | None
    linears: Mapping[str, Pair]
    size: Pair | None
    search: SearchEntry
    learning_rate: Number
    noise: Noise | None
    config: Json
    differences: Mapping[str, Sequence[object]]
    compared: str


class Document(TypedDict):
    """All runs; `partial` where they were stopped."""

    duotone: str
    created: Annotated[str, Iso()]
    partial: bool
    machine: Machine
    settings: Settings
    runs: Annotated[list[RunEntry], Within(0, 300)]


_fields = cache(partial(get_type_hints, include_extras=True))


def fits(value: object, kind: object, depth: int = 0) -> bool:
    """Whether `value`, read from JSON, is of `kind`, a type of this file. A table may have more keys.

    `depth` counts the lists and tables of no declared type that `value` lies in.
    """
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is Annotated:
        return fits(value, arguments[0]) and value in arguments[1]
    if origin is Literal:
        return value in arguments
    if origin in (UnionType, Union, Required, NotRequired):
        return any(fits(value, each) for each in arguments)
    if is_typeddict(kind):
        fields = _fields(kind)
        return (
            isinstance(value, dict)
            and getattr(kind, "__required_keys__", frozenset()) <= value.keys()
            and all(fits(value[key], fields.get(key, object), 1) for key in value)
        )
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(each, arguments[1], 1) for each in value.values())
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (list, Sequence):
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    if origin is object:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return depth < DEPTH and all(fits(each, object, depth + 1) for each in inner)
    kinds = (int, float) if kind is float else kind
    return isinstance(value, cast(type, kinds)) and (kind is bool or not isinstance(value, bool))

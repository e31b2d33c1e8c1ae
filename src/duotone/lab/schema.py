"""The JSON document of a comparison or a training run, which the report page reads."""

from collections.abc import Mapping, Sequence
from functools import cache
from types import UnionType
from typing import Any, NotRequired, Required, TypedDict, cast, get_args, get_origin, get_type_hints, is_typeddict

Json = Mapping[str, object]
Loss = tuple[int, float | None]
"""A step, counted from one, and its loss in nats. None stands for a loss that was not finite."""

Losses = Sequence[Loss]


class GemmEntry(TypedDict):
    """One GEMM of one module: a row of `duotone.plan`."""

    module: str
    gemm: str | None
    a: str | None
    b: str | None
    kernel: str | None
    native: bool | None
    reason: str | None
    ran: NotRequired[str]


class PlaneEntry(TypedDict):
    """What one plane of one tensor lost, as `duotone.observe` tells it; results of earlier versions have no events."""

    module: str
    role: str
    plane: str
    format: str
    samples: int | None
    snr_db: float | None
    underflow: float | None
    saturation: float | None
    amax: float | None
    bias: NotRequired[float | None]
    cosine: NotRequired[float | None]
    nan: NotRequired[int]
    inf: NotRequired[int]
    dynamic_range_bits: NotRequired[float | None]
    amaxes_skipped: NotRequired[int]
    spikes_clamped: NotRequired[int]


class DriftEntry(TypedDict):
    """All modules together in one sampled step; the largest magnitude, and the largest that any scale could hold.

    Magnitudes are those of the values that codes stand for, after any rotation. `clipped` is the share of elements far
    above what their scale can hold. Exact planes have no limit.
    """

    step: int
    role: str
    plane: str
    snr_db: float | None
    amax: NotRequired[float]
    limit: NotRequired[float | None]
    clipped: NotRequired[float]


class SpreadEntry(TypedDict):
    """How many nonzero elements have a magnitude, and a scale, of each power of two, from `lowest` on."""

    role: str
    plane: str
    lowest: int
    counts: Sequence[int]
    scales: NotRequired[Sequence[int]]


class OperandEntry(TypedDict):
    """One operand: how far its two planes differ as a share of it, and channels whose amax stands out."""

    module: str
    role: str
    disagreement: float | None
    channels: int
    outliers: int
    largest_channel: int
    over_median: float | None


class EventEntry(TypedDict):
    """What happened at a step of a run, in words."""

    step: int
    text: str


class ProductEntry(TypedDict):
    """The relative error of one GEMM, and the error that independent errors of its operands would cause."""

    module: str
    gemm: str
    error: float
    expected: float


class ModuleEntry(TypedDict):
    """Bytes that one module owns and that autograd keeps for it, as `duotone.observe.ledger` tells them."""

    module: str
    weights: int
    caches: int
    saved: int


class RepeatEntry(TypedDict):
    """The same recipe under another seed."""

    seed: int
    train_loss: Losses
    heldout_loss: Losses
    error: str | None


class Verdict(TypedDict, total=False):
    """What all seeds say of a recipe, at the step where all are judged. Results of earlier versions have the gap alone.

    Gaps are in percent of the loss of the reference under the same seed: their mean, half of its 95 % interval, and
    each with its seed. Recipes that cannot be told apart share a rank.
    """

    judged_loss: float | None
    gap_percent: Required[float | None]
    gap_margin: float | None
    gaps: Sequence[Sequence[float]]
    rank: int | None


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
    final_train_loss: float | None
    final_heldout_loss: float | None
    repeats: NotRequired[Sequence[RepeatEntry]]


class RunEntry(Curves, Verdict, Observations):
    """One recipe, its run under the first seed, and repeats under others. Numbers that do not exist are None.

    `steps`: the planned number, if the document has the runs of two results.
    """

    name: str
    recipe: Json
    is_reference: bool
    is_noise: bool
    steps: NotRequired[int]
    step_ms: float | None
    tokens_per_second: float | None
    peak_memory_bytes: int | None
    weight_bytes: int | None
    saved_activation_bytes: int | None
    error: str | None


class Noise(TypedDict, total=False):
    """Relative noise on the initial weights of the noise run, and how far that run ended from the reference."""

    perturbation: float
    gap_percent: float | None


class SearchEntry(TypedDict):
    """The goal of a search, and the predicted cost and memory of its recipe, both over bf16."""

    recipe: str
    kind: str
    value: float
    gap_percent: float
    speed: float | None
    memory: float


class Settings(TypedDict, total=False):
    """What was trained, on what and for how long.

    `linears`: features in and out of each that follows a recipe; results of earlier versions have a list of (in, out,
    count). `size`: the width and the tokens for which speeds are predicted, if they are not those of the model.
    """

    command: str | None
    preset: str
    model: str
    parameters: int
    data: str
    data_bytes: int
    digests: Json
    steps: int
    tokens_per_step: int
    context: int
    seed: int
    seeds: int
    judged_step: int | None
    linears: Mapping[str, Sequence[int]] | Sequence[Sequence[int]]
    size: Sequence[int]
    search: SearchEntry
    learning_rate: float
    noise: Noise | None
    config: Json
    differences: Mapping[str, Sequence[object]]
    compared: str


class Document(TypedDict):
    """All runs; `partial` where they were stopped."""

    duotone: str
    created: str
    partial: bool
    machine: Json
    settings: Settings
    runs: list[RunEntry]


_fields = cache(get_type_hints)


def fits(value: object, kind: object) -> bool:
    """Whether `value`, read from JSON, is of `kind`, a type of this file. A table may have more keys."""
    origin, arguments = get_origin(kind) or kind, get_args(kind)
    if origin is UnionType:
        return any(fits(value, each) for each in arguments)
    if is_typeddict(kind):
        fields = _fields(kind)
        return (
            isinstance(value, dict)
            and getattr(kind, "__required_keys__", frozenset()) <= value.keys()
            and all(fits(value[key], fields[key]) for key in fields.keys() & value.keys())
        )
    if origin is Mapping:
        return isinstance(value, dict) and all(fits(each, arguments[1]) for each in value.values())
    if origin is tuple:
        return isinstance(value, list) and len(value) == len(arguments) and all(map(fits, value, arguments))
    if origin in (list, Sequence):
        return isinstance(value, list) and all(fits(each, arguments[0]) for each in value)
    kinds = (int, float) if kind in (int, float) else kind
    return isinstance(value, cast(type, kinds))

"""The statistics of one sampled step: summed on the device, copied without waiting, and read after the copy."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.dispatch.casts import has_kernels
from duotone.formats import Format
from duotone.formats.hadamard import SIZE as GROUP
from duotone.observe.sampling import Sampler, Slots, spread
from duotone.observe.statistics import COLUMNS, EXTREMES, FIELDS, Key, summary, tally
from duotone.recipes.roles import QuantizerRole
from duotone.recipes.rules import DIRECTIONS
from duotone.state.delayed import DelayedState
from duotone.state.history import is_new
from duotone.tensor.plane import Plane, Planes

Row = dict[str, str | float | None]
SAMPLE = 1 << 16
"""Elements of an operand whose errors are measured."""

TOGETHER = 32
"""Modules whose errors are measured in one step: the host launches about 40 kernels for each of their operands."""

WAITING = 32
"""Samples that wait to be measured together: few launches, in 25 MB."""

NAMES = {"duotone_forward": ("input", "weight"), "duotone_backward": ("grad_output",)}
"""The tensors of a delayed state. Each has two slots."""


class Sample(NamedTuple):
    """fp32 (n,): elements of an operand, the values of their codes after any transform, and the limits of the codes."""

    x: Tensor
    values: Tensor
    ceiling: Tensor


class StepStatistics(Sampler):
    """What the encodes of a step lost. `send` ends the step, and the next one may begin.

    `names` gives each module's name in rows, by its name in roles. If they are more than `TOGETHER`, a step measures
    the errors of an even part, so that a fixed number of steps measures all.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self._names = names or {}
        mixed = sorted(self._names, key=lambda name: zlib.crc32(name.encode()))  # every part has all layers and kinds
        self._parts = max(1, math.ceil(len(mixed) / TOGETHER))
        self._part_of = {name: place % self._parts for place, name in enumerate(mixed)}
        self._turn = 0
        self._begin()

    def _begin(self) -> None:
        self.keys: list[tuple[Key, float]] = []
        """The key of each plane, with the largest element of its format."""
        self._whole: list[Tensor] = []
        self._twins: dict[int, int] = {}
        """Planes that are transposes of others. The others are measured for both."""
        self._waiting: dict[tuple[int, Format | None], list[tuple[int, Sample]]] = {}
        self._measured: list[tuple[list[int], Tensor]] = []

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes, slots: Slots) -> None:
        if x.is_cuda and is_capturing():
            return  # every replay would measure again, and nobody would read it
        is_its_turn = self._part_of.get(role.name, self._turn) == self._turn
        whole = torch.zeros(3, dtype=torch.int64, device=x.device)
        count(x, whole)
        for direction, matrix, plane in zip(DIRECTIONS, (x, x.t()), planes, strict=True):
            if plane is not None:
                key = self._names.get(role.name, role.name), role.tensor_type, direction, plane.format.name
                self.keys.append((key, plane.format.largest))
                self._whole.append(whole)
                if direction == "columnwise" and is_transposed(*planes):
                    self._twins[len(self.keys) - 1] = len(self.keys) - 2
                elif is_its_turn and math.isfinite(plane.format.largest) and matrix.numel():
                    self._wait(plane.format, sample(matrix, plane))

    def send(self, states: Mapping[str, DelayedState]) -> "Sent":
        """Start the copy of all numbers to the host, and of the delayed slots that have no amax yet."""
        self._measure()
        are_new = [is_new(state.amax_history, state.scale).double() for state in states.values()]
        places = [place for places, _ in self._measured for place in places]
        slots = [
            slot
            for name, state in states.items()
            for slot in slots_of(state.name if "." in state.name else name, state)
        ]
        tensors = [*(measured.flatten() for _, measured in self._measured), *are_new]
        device = next((t.device for t in (*self._whole, *tensors)), torch.device("cpu"))
        if self._whole:
            counts = torch.stack([each.to(device, non_blocking=True) for each in self._whole])
            amaxes = counts[:, :1].int().view(torch.float32)
            tensors.insert(len(self._measured), torch.cat([amaxes.double(), counts[:, 1:].double()], 1).flatten())
        numbers = torch.cat([t.to(device, non_blocking=True) for t in tensors]) if tensors else torch.empty(0)
        sent = Sent(self.keys, places, self._twins, slots, numbers)
        self._turn = (self._turn + 1) % self._parts
        self._begin()
        return sent

    def _wait(self, fmt: Format, sample: Sample) -> None:
        """Keep a sample of the newest plane. Samples of one size are measured together, in any formats."""
        if not sample.x.numel():
            return
        key = sample.x.numel(), fmt if fmt.transform else None
        self._waiting.setdefault(key, []).append((len(self.keys) - 1, sample))
        if sum(map(len, self._waiting.values())) == WAITING:
            self._measure()

    def _measure(self) -> None:
        """Measure the waiting samples and free them."""
        for (_, transformed), waiting in self._waiting.items():
            x, values, ceiling = (torch.stack(list(parts)) for parts in zip(*(one for _, one in waiting), strict=True))
            coded, decoded = x, values
            if transformed is not None:  # the groups of its transform lie one after the other
                coded, decoded = transformed.rotate(x).float(), transformed.unrotate(values, values.shape[1])
            measured = torch.cat(tally(x, decoded, coded, ceiling, torch.float32), 1)
            self._measured.append(([place for place, _ in waiting], measured))
        self._waiting.clear()


WIDTH = len(FIELDS) + len(EXTREMES)
"""Numbers of a measured sample."""


def count(x: Tensor, counts: Tensor) -> None:
    """Add a matrix to `counts`, int64 (3,), which starts as zeros: the bits of the largest finite magnitude as fp32,
    the number of NaN, and the number of infinities."""
    if has_kernels(x):
        from duotone.kernels.amax import tensor_census

        tensor_census(x.contiguous(), counts)
    elif x.numel():
        finite = torch.nan_to_num(x, 0.0, 0.0, 0.0).abs().amax().float()
        counts.copy_(torch.stack([finite.view(torch.int32), x.isnan().sum(), x.isinf().sum()]))


def is_transposed(row: Plane | None, col: Plane | None) -> bool:
    """Whether the columnwise plane has the codes of the rowwise one, in another order."""
    return row is not None and col is not None and row.format == col.format and row.format.is_derivable


def sample(x: Tensor, plane: Plane) -> Sample:
    """About `SAMPLE` elements of an operand that lies as the plane does. For a transform only whole groups."""
    elements, part = spread(x.detach(), plane, SAMPLE)
    cols = elements.shape[1] // GROUP * GROUP if part.format.transform else elements.shape[1]
    # Copied, because the operand may be freed or overwritten before it is measured.
    copied = elements[:, :cols].to(torch.float32, copy=True)
    parts = copied, part.values(torch.float32)[:, :cols], part.format.ceiling(part.parts)[:, :cols]
    return Sample(*(each.reshape(-1) for each in parts))


class Sent:
    """The numbers of a step on their way to the host."""

    def __init__(
        self,
        keys: list[tuple[Key, float]],
        places: list[int],
        twins: dict[int, int],
        slots: list[str],
        numbers: Tensor,
    ):
        self._keys, self._places, self._twins, self._slots = keys, places, twins, slots
        self._numbers = numbers.to("cpu", non_blocking=True)
        self._event: torch.cuda.Event | None = None
        if numbers.is_cuda:
            self._event = torch.cuda.Event()
            self._event.record(torch.cuda.current_stream(numbers.device))

    def is_there(self) -> bool:
        """Whether `read` would not wait."""
        return self._event is None or self._event.query()

    def read(self) -> tuple[list[Row], list[str]]:
        """A row for each module, role, plane and format, in order of first use, and the delayed slots without an amax.

        Waits for the device if need be. Several encodes of one plane, as of microbatches or experts, are one row.
        """
        if self._event is not None:
            self._event.synchronize()
        numbers = self._numbers
        samples, others = numbers[: WIDTH * len(self._places)], numbers[WIDTH * len(self._places) :]
        wholes, are_new = others[: 3 * len(self._keys)].reshape(-1, 3), others[3 * len(self._keys) :]
        measured = dict(zip(self._places, samples.reshape(-1, WIDTH).tolist(), strict=True))
        measured |= {twin: measured[place] for twin, place in self._twins.items() if place in measured}
        groups: dict[tuple[Key, float], list[int]] = {}
        for place, plane in enumerate(self._keys):
            groups.setdefault(plane, []).append(place)
        counts = wholes.tolist()
        rows = [
            _row(*plane, [counts[p] for p in places], [measured[p] for p in places if p in measured])
            for plane, places in groups.items()
        ]
        dead = [slot for slot, new in zip(self._slots, are_new.tolist(), strict=True) if slot and new]
        return rows, dead


def _row(key: Key, largest: float, wholes: Sequence[Sequence[float]], samples: Sequence[Sequence[float]]) -> Row:
    """One plane in one step, over its samples. Numbers that are not finite are None, because JSON has none."""
    amaxes, nans, infs = zip(*wholes, strict=True)
    row: Row = dict(zip(COLUMNS, key, strict=True))
    if samples:
        columns = [*zip(*samples, strict=True)]
        totals, extremes = [math.fsum(each) for each in columns[: len(FIELDS)]], [*map(max, columns[len(FIELDS) :])]
        row |= summary(totals, extremes)
        row["clipped"] = totals[FIELDS.index("clipped")] / max(1.0, totals[FIELDS.index("elements")])
        row |= {"scale": extremes[3] / largest, "smallest_scale": -extremes[4] / largest}
        if row["role"] == "grad_output" and (signal := row["snr_db"]) is not None:
            row["gradient_to_noise"] = 10 ** (float(signal) / 20)
    row |= {"amax": max(amaxes), "nan": int(sum(nans)), "inf": int(sum(infs))}
    return {name: _rounded(value) if isinstance(value, float) else value for name, value in row.items()}


def _rounded(value: float) -> float | None:
    return float(f"{value:.5g}") if math.isfinite(value) else None


def slots_of(name: str, state: DelayedState) -> list[str]:
    """Module, tensor and direction of each slot of the state of that name; "" for one without use."""
    module, _, kind = name.rpartition(".")
    tensors = NAMES[kind]
    names = []
    for index, largest in enumerate(state.largest):
        member, place = divmod(index, 2 * len(tensors))
        expert = f", expert {member}" if len(state.largest) > 2 * len(tensors) else ""
        direction = DIRECTIONS[place % 2]
        names.append(f"{module or 'a linear'}{expert}, {tensors[place // 2]} {direction}" if largest else "")
    return names

"""Statistics of sampled steps, step by step: how signal-to-noise moves, and how magnitudes are spread."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from duotone.observe import Tap
from duotone.observe.sampling import Slots
from duotone.observe.statistics import EXTREMES, FIELDS, Entry, decibels
from duotone.recipes.roles import PLANES_OF_GEMM, QuantizerRole
from duotone.tensor.context import Slot
from duotone.tensor.plane import Plane, Planes
from duotone_lab.training.schema import DriftEntry, EventEntry, OperandEntry, ProductEntry, SpreadEntry

LOWEST, HIGHEST = -40, 24
"""The powers of two that the spread of magnitudes tells apart; smaller and larger ones count as these."""

Side = tuple[str, str]
"""A role and a plane."""

TABLES = ("spreads", "scales", "steps", "extremes", "broken")
"""Sums by role and plane; the middle two by step before that, and the counts of NaN and infinity by step and module."""

OUTLIER = 8.0
"""A channel stands out if its amax is so many times the median of all channels."""

PART = 128
"""The products of the last step are computed again over so many tokens and rows of each operand."""


class Operand(NamedTuple):
    """A matrix, and the values of its codes."""

    exact: Tensor
    decoded: Tensor

    @property
    def error(self) -> float:
        """The error as a share of the matrix, in the Frobenius norm; 0 for a matrix of zeros."""
        size, wrong = self.exact.norm().item(), (self.decoded - self.exact).norm().item()
        return wrong / size if size > 0 and math.isfinite(size + wrong) else 0.0


@dataclass
class Channels:
    """One operand: the amax of each column, and squares of the matrix and of the difference of its planes."""

    amaxes: Tensor
    squares: Tensor
    has_both: bool


@dataclass(eq=False, repr=False)
class Journal(Tap):
    """A tap that also keeps the sums of each step, and counts magnitudes, over all modules of a role and plane."""

    step: int = 0
    """The sampled step that runs now."""
    last: int = 0
    """The step whose operands are kept for `products`."""
    _tables: dict[str, dict[Any, Tensor]] = field(default_factory=lambda: {name: {} for name in TABLES})
    _operands: dict[tuple[str, Side], list[Operand]] = field(default_factory=dict)
    _channels: dict[tuple[str, str], "Channels"] = field(default_factory=dict)

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes, slots: Slots) -> None:
        """Also add the channels of the matrix, and how far its planes differ."""
        super().take(role, x, planes, slots)
        if not x.shape[0]:
            return
        x, (row, col) = _finite(x.detach().float()), planes
        squares = torch.zeros(2, dtype=torch.float64, device=x.device)
        if row is not None and col is not None:
            difference = row.dequantize(torch.float32) - col.dequantize(torch.float32).t()
            squares = torch.stack([part.square().sum(dtype=torch.float64) for part in (x, _finite(difference))])
        channels = Channels(x.abs().amax(0), squares, row is not None and col is not None)
        key = role.name, role.tensor_type
        if (before := self._channels.get(key)) is not None:
            channels.amaxes = torch.maximum(before.amaxes, channels.amaxes)
            channels.squares = before.squares + squares
        self._channels[key] = channels

    def record(
        self, role: QuantizerRole, direction: str, x: Tensor, plane: Plane, slot: Slot | None = None
    ) -> tuple[Tensor, Tensor]:
        sums, extremes = super().record(role, direction, x, plane, slot)
        side = role.tensor_type, direction
        _add(self._tables["broken"], (self.step, role.name, *side), sums[-2:])
        _add(self._tables["steps"], (self.step, *side), sums)
        earlier = self._tables["extremes"].get((self.step, *side), extremes)
        self._tables["extremes"][self.step, *side] = torch.maximum(earlier, extremes)
        _add(self._tables["spreads"], side, count_magnitudes(x))
        if math.isfinite(plane.format.largest):
            limits = plane.format.ceiling(plane.parts)[:, : x.shape[1]]
            _add(self._tables["scales"], side, count_magnitudes(limits / plane.format.largest))
        if self.step == self.last:
            pair = Operand(_part(x.float(), side), _part(plane.dequantize(torch.float32), side))
            self._operands.setdefault((role.name, side), []).append(pair)
        return sums, extremes

    def state(self) -> dict[str, Tensor]:
        """Everything except the operands of the last step: tensors by the JSON of their order, table and key."""
        rows = [(name, key, x) for name, table in self._tables.items() for key, x in table.items()]
        for key, entry in self._entries.items():
            samples = entry.sums.new_tensor([entry.samples])
            rows.append(("entries", key, torch.cat([samples, entry.sums, entry.extremes])))
        for key, channels in self._channels.items():
            has_both = channels.squares.new_tensor([channels.has_both])
            rows.append(("channels", key, torch.cat([channels.amaxes, channels.squares, has_both])))
        return {json.dumps([at, name, *key]): x for at, (name, key, x) in enumerate(rows)}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Restore the tensors of `state`, on the device of later steps. Raises some error for any other tensors."""
        for name in sorted(state, key=lambda name: json.loads(name)[0]):
            (_, table, *key), x = json.loads(name), state[name]
            match table, key:
                case "entries", [module, role, plane, fmt]:
                    samples, sums, extremes = x.split([1, len(FIELDS), len(EXTREMES)])
                    self._entries[module, role, plane, fmt] = Entry(sums, extremes, int(samples))
                case "channels", [module, role]:
                    self._channels[module, role] = Channels(x[:-3].float(), x[-3:-1], bool(x[-1]))
                case _:
                    self._tables[table][tuple(key)] = x
        for table_of in (self.rows, self.drift, self.spreads, self.operands, self.origin):
            table_of()

    def products(self) -> list[ProductEntry]:
        """The error of each GEMM of the last step whose operands were encoded once, exact ones left out."""
        entries: list[ProductEntry] = []
        for module in dict.fromkeys(name for name, _ in self._operands):
            for gemm, sides in PLANES_OF_GEMM.items():
                pairs = [self._operands.get((module, side), []) for side in sides]
                if [len(pair) for pair in pairs] != [1, 1]:
                    continue
                a, b = (pair[0] for pair in pairs)
                if a.exact.shape[1] == b.exact.shape[1] and (expected := math.hypot(a.error, b.error)):
                    product = Operand(a.exact @ b.exact.T, a.decoded @ b.decoded.T)
                    entries.append({"module": module, "gemm": gemm, "error": product.error, "expected": expected})
        return entries

    def operands(self) -> list[OperandEntry]:
        """Channels that stand out, and how far the two planes of one operand differ, over all samples."""
        return [_operand(*key, channels) for key, channels in self._channels.items()]

    def drift(self) -> list[DriftEntry]:
        """Signal-to-noise in dB of all modules together, for each sampled step, role and plane; None if exact."""
        entries: list[DriftEntry] = []
        for (step, role, plane), sums in self._tables["steps"].items():
            totals = dict(zip(FIELDS, sums.tolist(), strict=True))
            most = dict(zip(EXTREMES, self._tables["extremes"][step, role, plane].tolist(), strict=True))
            snr = decibels(totals["signal"], totals["noise"])
            value = None if snr == -math.inf else snr
            entry: DriftEntry = {"step": step, "role": role, "plane": plane, "snr_db": value, "amax": most["coded"]}
            entry["limit"] = most["limit"] or None
            entry["clipped"] = totals["clipped"] / max(1.0, totals["elements"])
            entries.append(entry)
        return entries

    def origin(self) -> EventEntry | None:
        """The first operand with elements that are not finite; None without one."""
        for (step, module, role, plane), counts in self._tables["broken"].items():
            nan, inf = map(int, counts.tolist())
            if nan or inf:
                where = f"{role} {plane} of {module or 'a linear'}"
                return {
                    "step": step,
                    "text": f"the first operand that is not finite: {where}, {nan} NaN and {inf} infinite",
                }
        return None

    def spreads(self) -> list[SpreadEntry]:
        """For each role and plane how many nonzero elements have which power of two, from `lowest` on."""
        entries: list[SpreadEntry] = []
        for (role, plane), counts in self._tables["spreads"].items():
            entries.append({"role": role, "plane": plane, "lowest": LOWEST, "counts": counts.tolist()})
            if (role, plane) in self._tables["scales"]:
                entries[-1]["scales"] = self._tables["scales"][role, plane].tolist()
        return entries


T = TypeVar("T")


def _add(table: dict[T, Tensor], key: T, values: Tensor) -> None:
    table[key] = table[key] + values if key in table else values


def _finite(x: Tensor) -> Tensor:
    return torch.nan_to_num(x, 0.0, 0.0, 0.0)


def _operand(module: str, role: str, channels: Channels) -> OperandEntry:
    amaxes, (whole, difference) = channels.amaxes, channels.squares.tolist()
    median, largest = amaxes.median().item(), amaxes.max().item()
    return {
        "module": module,
        "role": role,
        "disagreement": (difference / whole) ** 0.5 if channels.has_both and whole else None,
        "channels": amaxes.numel(),
        "outliers": int((amaxes > OUTLIER * median).sum()) if median else 0,
        "largest_channel": int(amaxes.argmax()),
        "over_median": largest / median if median else None,
    }


def _part(x: Tensor, side: Side) -> Tensor:
    """The first rows of an operand, and the first columns if these are tokens: its contraction is then that part."""
    role, plane = side
    is_cut = role != "weight" and plane == "columnwise"
    return x[:PART, :PART].clone() if is_cut else x[:PART].clone()


def count_magnitudes(x: Tensor) -> Tensor:
    """The number of finite nonzero elements of `x` in [2^n, 2^(n+1)), int64, for n from LOWEST to HIGHEST."""
    values = x.detach().float()
    exponents = torch.frexp(values)[1] - 1
    usable = torch.isfinite(values) & (values != 0)
    places = torch.where(usable, exponents.clamp(LOWEST, HIGHEST) - LOWEST, HIGHEST - LOWEST + 1)
    return torch.bincount(places.flatten().long(), minlength=HIGHEST - LOWEST + 2)[:-1]

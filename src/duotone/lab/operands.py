"""Operands as matrices: channels that stand out, and how far the two planes of one operand differ."""

from dataclasses import dataclass, field

import torch
from torch import Tensor

from duotone.lab.schema import OperandEntry
from duotone.recipes import QuantizerRole
from duotone.tensor.plane import Planes

OUTLIER = 8.0
"""A channel stands out if its amax is so many times the median of all channels."""


@dataclass
class Operand:
    """Of one operand over all samples: the amax of each column, and squares of the matrix and of the difference."""

    amaxes: Tensor
    squares: Tensor
    has_both: bool


@dataclass
class Operands:
    """What sampled steps showed of each operand, by module and role."""

    _operands: dict[tuple[str, str], Operand] = field(default_factory=dict)

    def take(self, role: QuantizerRole, x: Tensor, planes: Planes) -> None:
        """Add one matrix (M, K), whose columns are channels, and its planes."""
        if not x.shape[0]:
            return
        x = torch.nan_to_num(x.detach().float(), 0.0, 0.0, 0.0)
        row, col = planes
        squares, has_both = torch.zeros(2, dtype=torch.float64, device=x.device), row is not None and col is not None
        if row is not None and col is not None:
            difference = row.dequantize(torch.float32) - col.dequantize(torch.float32).t()
            squares = torch.stack([_square(x), _square(torch.nan_to_num(difference, 0.0, 0.0, 0.0))])
        key, amaxes = (role.name, role.tensor_type), x.abs().amax(0)
        before = self._operands.get(key)
        if before is not None:
            amaxes, squares = torch.maximum(before.amaxes, amaxes), before.squares + squares
        self._operands[key] = Operand(amaxes, squares, has_both)

    def entries(self) -> list[OperandEntry]:
        return [_entry(*key, operand) for key, operand in self._operands.items()]


def _entry(module: str, role: str, operand: Operand) -> OperandEntry:
    amaxes, (whole, difference) = operand.amaxes, operand.squares.tolist()
    median, largest = amaxes.median().item(), amaxes.max().item()
    return {
        "module": module,
        "role": role,
        "disagreement": (difference / whole) ** 0.5 if operand.has_both and whole else None,
        "channels": amaxes.numel(),
        "outliers": int((amaxes > OUTLIER * median).sum()) if median else 0,
        "largest_channel": int(amaxes.argmax()),
        "over_median": largest / median if median else None,
    }


def _square(x: Tensor) -> Tensor:
    return x.square().sum(dtype=torch.float64)

"""Several linears over consecutive rows of one input: what each does alone, one after the other."""

from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.errors import UserError
from duotone.linear.core import LinearStage, as_matrix, with_lead
from duotone.linear.plan import LinearPlan
from duotone.pipeline.stage import Kept, Stage

PER_LINEAR = 3
"""Things that each linear keeps."""


@dataclass(frozen=True, eq=False)
class GroupedStage(Stage):
    """x (*lead, K), rows of each linear (n,), seed or None, n weights (N, K), n biases (N,) or None -> (*lead, N).

    No block, scale or Hadamard group crosses two linears, because each encodes its own rows.
    """

    linears: tuple[LinearStage, ...]

    @property
    def takes_device_splits(self) -> bool:
        """Whether the rows of each linear may stay on the device."""
        return False

    @property
    def arity(self) -> tuple[int, ...]:  # type: ignore[override]
        return (2 + 2 * len(self.linears),)

    @property
    def plan(self) -> LinearPlan:
        return self.linears[0].plan

    @property
    def rolls_forward_alone(self) -> bool:
        return self.plan.rolls_forward_alone

    @property
    def refusal(self) -> str:
        return next((linear.refusal for linear in self.linears if linear.refusal), "")

    @property
    def reads(self) -> tuple[bool, ...]:
        x, weight, bias, _ = self.linears[0].reads
        return x, False, False, *[weight] * len(self.linears), *[bias] * len(self.linears)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        splits, _, *parameters = operands
        count = len(self.linears)
        each = zip(as_matrix(x).split(splits), parameters[:count], parameters[count:], strict=True)
        return (with_lead(torch.cat([F.linear(*one) for one in each]), x),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        splits, seed, *parameters = operands
        count, flat = len(self.linears), as_matrix(x)
        outputs, kept = [], []
        for i, (linear, rows) in enumerate(zip(self.linears, flat.split(splits), strict=True)):
            own = None if seed is None else seed + i * self.plan.seeds
            y, kept_here = linear.forward(rows, parameters[i], parameters[count + i], own)
            outputs.append(y)
            kept += kept_here
        return with_lead(torch.cat(outputs), x), (*kept, (splits,))

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        *of_linears, (splits,) = kept
        count, flat = len(self.linears), as_matrix(dy)
        dx, dw, db = [], [], []
        for i, (linear, rows) in enumerate(zip(self.linears, flat.split(splits), strict=True)):
            asked = (needs[0], needs[3 + i], needs[3 + count + i], False)
            kept_here = tuple(of_linears[PER_LINEAR * i : PER_LINEAR * (i + 1)])
            found = linear.backward(rows, kept_here, asked)
            dx.append(found[0])
            dw.append(found[1])
            db.append(found[2])
        whole = None if dx[0] is None else with_lead(torch.cat(dx), dy)
        return whole, None, None, *dw, *db


class Rows:
    """How many rows each of `experts` linears has, `total` in all: `counts` int64 on the device, `splits` on the host,
    which waits."""

    experts: int
    total: int
    counts: Tensor
    splits: tuple[int, ...]


def host_splits(splits: Tensor | Sequence[int], count: int, rows: int | None) -> tuple[int, ...]:
    """The rows of each of `count` linears as integers; a tensor on a device is waited for.

    UserError unless they are as many as the linears, not negative, and sum to `rows`.
    """
    if isinstance(splits, Tensor):
        if splits.dtype not in (torch.int64, torch.int32) or splits.dim() != 1:
            got = f"{tuple(splits.shape)} in {splits.dtype}"
            raise UserError(f"m_splits is a list of integers or an int tensor of one dimension; got {got}")
        if splits.is_meta:
            raise UserError("m_splits is on meta, where it has no values; give a list of integers")
        splits = splits.tolist()
    if not isinstance(splits, Sequence) or isinstance(splits, str):
        raise UserError(f"m_splits is a list of integers or an int tensor; got {type(splits).__name__}")
    whole = all(isinstance(n, Integral) and not isinstance(n, bool) and int(n) >= 0 for n in splits)
    if len(splits) != count or not whole:
        raise UserError(f"m_splits needs {count} row counts, integers that are not negative; got {_short(splits)}")
    given = tuple(map(int, splits))
    if rows is not None and sum(given) != rows:
        raise UserError(f"m_splits {_short(given)} sum to {sum(given)}, and the input has {rows} rows; cover each once")
    return given


def device_splits(splits: Tensor, count: int) -> Tensor:
    """The rows of each of `count` linears as they are on the device, not waited for: their sum is not looked at.

    UserError unless they are as many as the linears.
    """
    if splits.dtype not in (torch.int64, torch.int32) or splits.shape != (count,):
        got = f"{tuple(splits.shape)} in {splits.dtype}"
        raise UserError(f"m_splits is {count} row counts, a list of integers or an int tensor; got {got}")
    return splits


def _short(given: Sequence[Any]) -> str:
    return str(list(given)) if len(given) <= 16 else f"{len(given)} values from {given[0]} to {given[-1]}"

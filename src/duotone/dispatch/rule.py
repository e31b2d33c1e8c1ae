"""What a GEMM rule is: one row of the table in `gemms.py`."""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from duotone.dispatch.products import put
from duotone.formats import Factors, Format, Parts


@dataclass(frozen=True)
class GemmProblem:
    """What a rule may look at: the two formats, where they live, the dtype of the result, and whether products whose
    hardware has fast, inexact accumulation may use it."""

    a: Format
    b: Format
    device: str
    dtype: torch.dtype
    fast: bool = False

    @property
    def extents(self) -> set[str]:
        return {self.a.outer_extent, self.b.outer_extent}


class Operand(Protocol):
    """An encoded matrix, contraction last (`duotone.tensor.Plane`)."""

    @property
    def format(self) -> Format: ...

    @property
    def parts(self) -> Parts: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    def factors(self) -> Factors: ...

    def dequantize(self, dtype: torch.dtype) -> Tensor: ...


class GemmRule:
    """One way to multiply. `native` rules multiply what is stored; `note` says what is unusual about one."""

    name: str
    native: bool = True
    note: str = ""

    def reject(self, problem: GemmProblem) -> str:
        """Why the rule cannot run the problem, or ""."""
        raise NotImplementedError

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        """(M, K) and (N, K) -> (M, N) in `out_dtype`; `bias` (N,) is added before the last rounding."""
        raise NotImplementedError

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        """The product in the dtype of `out` (M, N), written over it or, `adds`, added to it.

        Rules whose product adds by itself round the sum once; here the product is rounded to that dtype before.
        """
        put(self.run(a, b, out.dtype), out, adds)

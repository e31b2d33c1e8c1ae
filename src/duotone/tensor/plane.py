"""A plane: one encoded 2-D operand with its contraction last."""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.dispatch.stages import stages_for
from duotone.formats import IDENTITY, Factors, Format, Parts


@dataclass(eq=False, slots=True)
class Plane:
    """`parts` of a (rows, cols) matrix in `format`. Never changed after it is made (freezing costs host time)."""

    format: Format
    parts: Parts
    shape: tuple[int, int]

    @staticmethod
    def of(x: Tensor) -> "Plane":
        """The high-precision plane of a 2-D tensor: an alias."""
        return Plane(IDENTITY, {"codes": x}, (x.shape[0], x.shape[1]))

    @staticmethod
    def encode(fmt: Format, x: Tensor, *, seed: Tensor | None = None, plane: str = "row") -> "Plane":
        """Encode a 2-D tensor; its last dimension is the contraction."""
        parts = fmt.encode(x, seed=seed, plane=plane, stages=stages_for(x))
        return Plane(fmt, parts, (x.shape[0], x.shape[1]))

    def transposed(self) -> "Plane | None":
        """The plane of the transpose without loss, or None where it has to be encoded."""
        parts = self.format.derive(self.parts, self.shape[1])
        return None if parts is None else Plane(self.format, parts, (self.shape[1], self.shape[0]))

    def values(self, dtype: torch.dtype) -> Tensor:
        """What a GEMM multiplies: rotated for Hadamard formats, (rows, cols or its padded length)."""
        return self.format.decode(self.parts, dtype, stages_for(self.parts["codes"]))

    def factors(self) -> Factors:
        """`values` split into an operand that is exact in bf16 and a factor that follows the product."""
        return self.format.factors(self.parts, stages_for(self.parts["codes"]))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the plane stands for, (rows, cols), any rotation undone."""
        if not self.format.transform:
            return self.values(dtype)[:, : self.shape[1]]
        return self.format.unrotate(self.values(torch.float32), self.shape[1]).to(dtype)

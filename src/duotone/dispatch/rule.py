"""What a GEMM rule is: one row of the table in `gemms.py`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from duotone.dispatch.target import Target
from duotone.formats import Epilogue, Format, Parts

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Segments


@dataclass(frozen=True)
class GemmProblem:
    """Everything that a rule may use to decide: the formats of the operands, the target, and the dtype of the result.

    `fast` allows a fast, inexact accumulation, if the hardware has one.
    """

    a: Format
    b: Format
    target: Target
    dtype: torch.dtype
    fast: bool = False

    @property
    def elements(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """torch's dtypes of the codes, None if torch has none."""
        return self.a.code_dtype, self.b.code_dtype

    @property
    def epilogues(self) -> set[Epilogue]:
        """Which scales follow the product."""
        return {self.a.epilogue, self.b.epilogue}


class Operand(Protocol):
    """An encoded matrix, contraction last (`duotone.tensor.Plane`)."""

    @property
    def format(self) -> Format:
        """The format of the codes."""
        ...

    @property
    def parts(self) -> Parts:
        """The buffers by name, as `Format.parts` describes them."""
        ...

    @property
    def shape(self) -> tuple[int, int]:
        """The logical shape (M, K)."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The values that the product multiplies, (M, K)."""
        ...


class JoinedOperand(NamedTuple):
    """One plane of all segments, encoded by one cast: `codes` in the format's dtype and `scale`.

    Rowwise codes are (M, K); their scales are (E, 1), or those of rows one after the other. `Segments` describe the
    place of columnwise codes; their scales are (E, 1) or (E, K). `BlockSegmentCast` describes scales of blocks.
    """

    format: Format
    codes: Tensor
    scale: Tensor

    @property
    def has_lines(self) -> bool:
        """Whether each row has a scale, instead of each segment."""
        return self.format.block.rows == 1


class JoinedWeights(NamedTuple):
    """The weights of all segments: codes (E, N, K) and scales (E, 1), (E, N) or, of blocks, (E, ...); or sequences of E
    tensors."""

    format: Format
    codes: Tensor | Sequence[Tensor]
    scale: Tensor | Sequence[Tensor]

    def unbound(self) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Codes (K, N) and scales (1, 1) or (1, N) of each segment."""
        codes, scale = self.codes, self.scale
        if isinstance(codes, Tensor) and isinstance(scale, Tensor):
            return codes.transpose(1, 2).unbind(0), scale.unsqueeze(1).unbind(0)
        return [one.t() for one in codes], [one.unsqueeze(0) for one in scale]

    def stacked(self) -> tuple[Tensor, Tensor]:
        """Codes (E, N, K) and scales (E, ...)."""
        codes, scale = self.codes, self.scale
        if isinstance(codes, Tensor) and isinstance(scale, Tensor):
            return codes, scale
        return torch.stack(list(codes)), torch.stack(list(scale))


Place = tuple[Tensor, bool]
"""Where a product goes, and whether it is added to the values of that memory."""


class Product(Protocol):
    """A product (M, N) that is not computed yet. Operands kept in high precision are read in `operand_dtype`."""

    def compute(self, dtype: torch.dtype, operand_dtype: torch.dtype) -> Tensor:
        """The product in `dtype`."""
        ...

    def compute_into(self, out: Tensor, adds: bool, operand_dtype: torch.dtype) -> None:
        """Write the product over `out` or, `adds`, add it to `out`."""
        ...


class GemmRule:
    """One way to multiply. `native` rules multiply the stored codes. `note` describes what is unusual about a rule."""

    name: str
    native: bool = True
    note: str = ""
    separates_segments: bool = True
    """Whether a rule that takes `JoinedOperand`s multiplies them segment by segment too, not in one launch alone."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name!r})"

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

    def refuse_segments(self, problem: GemmProblem, shape: tuple[int, ...]) -> str:
        """Why the rule cannot multiply `JoinedOperand`s with weights (N, K) for each segment, or ""."""
        return "it multiplies each segment by itself"

    def groups_segments(self, problem: GemmProblem, count: int) -> bool:
        """Whether one launch multiplies `count` segments. Then only the device has to know their rows."""
        return False

    def run_segments(
        self,
        a: JoinedOperand,
        b: JoinedWeights,
        segments: "Segments",
        out_dtype: torch.dtype,
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        """Multiply the rows of each segment of (M, K) by its (N, K) and add its bias (N,) -> (M, N) in `out_dtype`.

        This method and those below need a problem that the rule does not refuse (`refuse_segments`).
        """
        raise NotImplementedError

    def segment_products(self, a: JoinedOperand, b: JoinedOperand, segments: "Segments") -> Sequence[Product]:
        """For each segment the product of columnwise (N, rows) and (K, rows), not yet computed."""
        raise NotImplementedError

    def contract_segments(
        self, a: JoinedOperand, b: JoinedOperand, segments: "Segments", dtype: torch.dtype
    ) -> Sequence[Tensor]:
        """All of `segment_products` in one launch, each (N, K) in `dtype`. Only if the rule `groups_segments`."""
        raise NotImplementedError

    def contract_segments_into(
        self, a: JoinedOperand, b: JoinedOperand, segments: "Segments", places: Sequence[Place | None]
    ) -> list[Tensor | None]:
        """`contract_segments`, with products that are written to places or added to them.

        None for a segment without a place, or whose product was written. Else the product (N, K), which the caller puts
        into the place: the kernel could not write there, or two segments share the place.
        """
        raise NotImplementedError


def put(y: Tensor, out: Tensor, adds: bool) -> None:
    """Write a computed product over `out` or, `adds`, add it to `out`."""
    if adds:
        out.add_(y)
    else:
        out.copy_(y)

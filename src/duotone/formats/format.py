"""The base of all formats: the interface for everything above `formats/`."""

import math
from typing import Self

import torch
from torch import Tensor

from duotone.errors import UserError, one_of
from duotone.formats import philox
from duotone.formats.elements import PLAIN, Stages
from duotone.formats.geometry import Block, Factors, Parts, PartSpec, crop
from duotone.formats.scale_rule import Epilogue, ErrorNorm, ScaleCodec


class Format:
    """How a matrix (M, K), contraction last, is stored as parts. The defaults are those of high precision."""

    name: str
    precision: int = 32
    """Bits of an element; dequantize prefers the plane with more."""
    largest: float = math.inf
    """The largest magnitude of an element."""
    code_dtype: torch.dtype | None = None
    """The torch dtype of the codes, if torch has one of this element."""
    block: Block
    """The elements that share a scale."""
    scale_codec: ScaleCodec = ScaleCodec.NONE
    scale_search: ErrorNorm | None = None
    """The error by which a block chooses between two scales. None: its amax decides."""
    epilogue: Epilogue = Epilogue.HIGH_PRECISION
    """Which scale a GEMM applies after the product."""
    family: str = "high precision"
    """What both operands of a tensor core must have in common: kind of scale, block width, transform."""
    transform: str = ""
    """Name of the transform along the contraction, "" for none. The operands of a GEMM must agree in it."""
    alignment: tuple[int, int] = (1, 1)
    """A matrix may be cut at multiples of these numbers of rows and columns without cutting a block."""
    is_stochastic: bool = False
    is_delayed: bool = False
    """Whether the scale follows from a history of amaxes instead of from the matrix."""
    scales_by_tensor: bool = False
    """Whether the one scale follows from the largest magnitude of the tensor, NaN ignored."""
    is_derivable: bool = True
    """Whether `derive` makes the parts of the transpose."""
    divisor: complex = 1 + 0j
    """By what the epilogue scale is divided. Complex, because a trace may take floats for inputs."""
    is_registered: bool = False
    """Whether `get(name)` is this format. `register` sets it."""
    node_name: str = ""
    """Its name in graphs, which torch may keep on disk: with a digest of what it does. "" if its code is not ours."""
    part_names: tuple[str, ...] = ("codes",)
    """The names of the buffers, in order."""
    stored: tuple[object, ...]
    """What decides how parts are read. Two formats that share it differ only in how a write computes its scales."""

    def __repr__(self) -> str:
        return f"duotone.formats.get({self.name!r})"

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def with_epsilon(self, epsilon: float, name: str) -> "Format":
        """The format under `name` in which an amax counts as at least `epsilon`. UserError without fp32 scales."""
        raise UserError(f"{self.name} has no amax floor; choose a format with fp32 scales")

    def tiled(self, rows: int, cols: int) -> "Format":
        """The format with a scale for each tile, for a tensor that exists only tile by tile."""
        return self

    def scale_limits(self, dtype: torch.dtype) -> tuple[float, float, float]:
        """Three numbers from which kernels compute scales, for an input dtype.

        The first is the largest element: under E8M0 its reciprocal, under two levels times the largest block scale.
        The others are the scale that replaces one that overflows, and the amax floor.
        """
        return math.inf, 1.0, 0.0

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]:
        """Name -> buffer of the encoding of a (rows, cols) matrix."""
        raise NotImplementedError

    def encode(
        self,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        seed: Tensor | int | None = None,
        plane: str = "row",
        stages: Stages | None = None,
        propagate: bool = False,
    ) -> Parts:
        """(M, K) bf16, fp16 or fp32 -> parts. UserError for other inputs.

        - `scale`: an encode scale from outside (fp32 scales only).
        - `amax`: an amax from outside (formats whose scale covers the tensor or its rows).
        - `seed`: int64 for stochastic rounding; `plane`, "row" or "col", selects its random stream.
        - `stages`: the backend. With one, the caller is responsible for the values of `scale` and `amax`. Without one,
          NaN and negative values and a scale of 0 are refused.
        - `propagate`: every product that reads a non-finite element becomes non-finite: the code is NaN, or the scale
          of the block is. Without it, infinities saturate and NaN becomes the element's `nan_code`.
        """
        raise NotImplementedError

    def spans(self, dim: int) -> bool:
        """Whether a scale that an encode decides covers all of `dim`: 0 rows, 1 columns."""
        return not self.is_delayed and any(spec.entries[dim] is None for spec in self.parts(1, 1).values())

    def shared_amax(self, x: Tensor, dim: int, stages: Stages = PLAIN, propagate: bool = False) -> Tensor | None:
        """The amax on which shards along `dim` have to agree before they encode, fp32. None if no scale spans them.

        `x` is this rank's shard. Each rank passes the maximum over the shards to `encode` as `amax`.
        """
        return None

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages | None = None) -> Tensor:
        """The values that a GEMM multiplies, (M, K). Hadamard formats: rotated, with the padded length.

        UserError for parts that do not fit together; with `stages` the caller is responsible for their sizes.
        """
        raise NotImplementedError

    def rotate(self, x: Tensor) -> Tensor:
        """The matrix that the codes represent: x itself, or its Hadamard transform."""
        return x

    def unrotate(self, values: Tensor, cols: int) -> Tensor:
        """Decoded values -> those of the original (M, cols), in the same dtype."""
        return crop(values, values.shape[0], cols)

    def ceiling(self, parts: Parts) -> Tensor:
        """fp32 (M, K): the largest magnitude that each element can hold under its scale."""
        raise NotImplementedError

    def factors(self, parts: Parts, stages: Stages = PLAIN, values: Tensor | None = None) -> Factors:
        """`decode` split into an operand that is exact in bf16 and the scale that follows the product.

        `values` replaces the operand, so that nothing is decoded.
        """
        raise NotImplementedError

    def derive(self, parts: Parts, cols: int | None = None) -> Parts | None:
        """The parts of the transpose, without loss. None if the transpose has other scales.

        `cols` is the number of columns of the matrix: packed codes round it up to even.
        """
        raise NotImplementedError

    def describe(self) -> dict[str, object]:
        """JSON-ready; the same keys for every format."""
        raise NotImplementedError


def require_parts(fmt: Format, parts: Parts) -> None:
    """UserError if a buffer of an encoded plane is missing."""
    for part in fmt.part_names:
        if part not in parts:
            raise UserError(f"parts of {fmt.name} without {part!r}; pass all that encode gave")


def require_dense(name: str, x: Tensor) -> None:
    """UserError if `x` is nested, sparse or in a layout of a library. Traced code cannot see the layout."""
    if torch.compiler.is_dynamo_compiling():
        return
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise UserError(f"{name} takes dense tensors; got a {kind} one: make it dense first")


def check_matrix(name: str, x: Tensor, plane: str) -> None:
    """UserError unless `x` is a dense matrix and `plane` the name of a plane."""
    if not isinstance(x, Tensor):
        raise UserError(f"{name} encodes a 2-D tensor; got {type(x).__name__}: make it one")
    require_dense(name, x)
    if x.dim() != 2:
        raise UserError(f"{name} encodes a 2-D tensor; got {x.dim()}-D: flatten it first")
    one_of("plane", plane, philox.PLANES)

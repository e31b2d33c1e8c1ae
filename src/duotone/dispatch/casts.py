"""Which formats one kernel encodes to both planes in one read of the matrix, and which ones a kernel decodes.

Parts and values have the bits of the plain stages. The columnwise plane is a tensor, not a view of the rowwise one.
"""

import functools
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from duotone.dispatch.target import Target, runs_kernels
from duotone.formats import ROW, TENSOR, Block, Epilogue, Format, Parts, ScaleCodec, hadamard
from duotone.formats.elements import FP8_DTYPES

if TYPE_CHECKING:
    from duotone.kernels.cast import Cast, PlaneSpec
    from duotone.kernels.nvfp4 import Cast as TwoLevelCast
    from duotone.kernels.nvfp4 import PlaneSpec as TwoLevelSpec
    from duotone.kernels.segment_blocks import BlockSegmentCast
    from duotone.kernels.segment_cast import SegmentCast


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""What kernels encode, and decode to."""
WIDEST = 128
"""Rows and columns of a kernel's tile, which holds whole blocks."""
_TWO_LEVEL_BLOCKS = (Block(1, 16), Block(16, 16))

Pair = tuple[Format | None, Format | None]
"""The rowwise and the columnwise format; None for a plane that is not wanted."""

_CASTS: "dict[tuple[int, int, torch.dtype, bool], tuple[Pair, Cast | TwoLevelCast | None]]" = {}
_DECODERS: "dict[tuple[int, torch.dtype], tuple[Format, PlaneSpec | float | None]]" = {}
"""Kernels by the ids of formats, whose hashes are slow. Values hold their formats, so that no id is used again."""


def one_read(row: Format | None, col: Format | None, x: Tensor, propagate: bool) -> "Cast | TwoLevelCast | None":
    """The kernel that makes these planes of a CUDA matrix like `x`, or None. Not for traces.

    `propagate` as of `Format.encode`.
    """
    entry = _CASTS.get((id(row), id(col), x.dtype, propagate))
    cast = cast_of(row, col, x.dtype, propagate) if entry is None else entry[1]
    real = type(x) in PLAIN_TYPES and x.numel() and runs_kernels(x.get_device())
    return cast if real else None


def cast_of(
    row: Format | None, col: Format | None, dtype: torch.dtype, propagate: bool = True
) -> "Cast | TwoLevelCast | None":
    """Like `one_read`, but it does not ask whether kernels run."""
    key = (id(row), id(col), dtype, propagate)
    entry = _CASTS.get(key)
    if entry is None:
        entry = _CASTS[key] = ((row, col), _new_cast(row, col, dtype, propagate))
    return entry[1]


def segment_cast(
    row: Format | None, col: Format | None, x: Tensor, propagate: bool
) -> "SegmentCast | BlockSegmentCast | None":
    """`one_read` for the cast that gives each row segment separate scales."""
    cast = one_read(row, col, x, propagate)
    return None if cast is None else _segment_cast(cast)


@functools.cache
def _segment_cast(cast: "Cast | TwoLevelCast") -> "SegmentCast | BlockSegmentCast | None":
    from duotone.kernels.cast import Cast
    from duotone.kernels.segment_blocks import BlockSegmentCast
    from duotone.kernels.segment_cast import SegmentCast

    return (SegmentCast.of(cast) or BlockSegmentCast.of(cast)) if isinstance(cast, Cast) else None


def can_read_once(row: Format | None, col: Format | None, dtype: torch.dtype, where: Target) -> bool:
    """Like `has_casts`, for planes that consist only of codes and scales."""
    return not is_two_level(row, col) and has_casts(row, col, dtype, where)


def is_two_level(*formats: Format | None) -> bool:
    """Whether a plane has a third part, its amax, beside codes and scales."""
    return any(fmt is not None and fmt.scale_codec is ScaleCodec.TWO_LEVEL for fmt in formats)


def has_casts(row: Format | None, col: Format | None, dtype: torch.dtype, where: Target) -> bool:
    """Whether a kernel on that target makes both planes of a matrix in `dtype`, or either of them."""
    return where.runs_kernels and all(
        cast_of(*pair, dtype) is not None for pair in ((row, col), (row, None), (None, col))
    )


def decoded(fmt: Format, parts: Parts, dtype: torch.dtype, scaled: bool) -> Tensor | None:
    """(M, K) values of a plane, or of its codes without the scales. None if no kernel decodes it."""
    if torch.compiler.is_dynamo_compiling():
        return None
    key = (id(fmt), dtype)
    entry = _DECODERS.get(key)
    if entry is None:
        entry = _DECODERS[key] = (fmt, _decoder(fmt, dtype))
    spec, codes = entry[1], parts["codes"]
    codes = codes.view(torch.uint8) if codes.dtype in FP8_DTYPES else codes
    if spec is None or not runs_kernels(codes.get_device()):
        return None
    if not _is_real(codes):
        rows, width = codes.shape
        shape = rows, width if isinstance(spec, tuple) else 2 * width
        return codes.new_empty(shape, dtype=dtype) if is_predicted(codes) else None
    if not isinstance(spec, tuple):
        from duotone.kernels.decode_nvfp4 import decode as decode_two_level

        amax = parts["amax"] if scaled else None
        return decode_two_level(contiguous_rows(codes), parts["scale"], amax, spec, dtype)
    from duotone.kernels.decode import decode

    scale = parts["scale"] if scaled else None
    if not codes.is_contiguous() and codes.t().is_contiguous():
        spec = spec._replace(rows=spec.cols, cols=spec.rows)
        return decode(spec, codes.t(), scale if scale is None or scale.dim() == 1 else scale.t(), dtype).t()
    return decode(spec, contiguous_rows(codes), scale, dtype)


def _decoder(fmt: Format, dtype: torch.dtype) -> "PlaneSpec | float | None":
    """The arguments of the kernel that decodes a format. None if there is no such kernel."""
    if dtype not in DTYPES:
        return None
    if fmt.scale_codec is ScaleCodec.TWO_LEVEL:
        return fmt.scale_limits(dtype)[0] if _is_two_level(fmt) else None
    return _spec(fmt, dtype) if _is_simple(fmt) and fmt.code_dtype is not None else None


def contiguous(x: Tensor) -> Tensor:
    """A copy of a matrix (M, K): of 8 bytes at once if rows allow it, since torch copies element by element."""
    several = 8 // x.itemsize
    down, across = x.stride()
    if across != 1 or x.shape[1] % several or down % several or x.storage_offset() % several:
        return x.contiguous()
    return x.detach().view(torch.int64).contiguous().view(x.dtype)


def contiguous_rows(codes: Tensor) -> Tensor:
    """Codes (M, K), uint8, with contiguous rows: themselves, or a copy."""
    if codes.is_contiguous() or not _is_real(codes) or not runs_kernels(codes.get_device()):
        return codes.contiguous()
    from duotone.kernels.rows import contiguous_rows as copied

    return copied(codes)


def has_kernels(x: Tensor) -> bool:
    """Whether kernels take this tensor: it is on a CUDA device that converts to FP8, in a dtype that is encoded."""
    return x.is_cuda and _is_real(x) and x.dtype in DTYPES and runs_kernels(x.get_device())


def _is_real(x: Tensor) -> bool:
    """Whether kernels can be launched on the addresses of a CUDA tensor."""
    return type(x) in PLAIN_TYPES and x.numel() > 0 and not torch.compiler.is_dynamo_compiling()


def is_predicted(x: Tensor) -> bool:
    """Whether a prediction of memory calls, outside of compilers: kernels allocate results and are not launched."""
    is_traced = torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()
    return isinstance(x, FakeTensor) and not is_traced


PLAIN_TYPES = (Tensor, torch.nn.Parameter)
"""Types of tensors with an address. Fake tensors have none."""


def _new_cast(
    row: Format | None, col: Format | None, dtype: torch.dtype, propagate: bool
) -> "Cast | TwoLevelCast | None":
    if dtype not in DTYPES:
        return None
    shared = row is not None and col is not None and row == col and row.is_derivable
    if is_two_level(row, col):
        return _two_level_cast(row, col, shared, propagate)
    if any(fmt is not None and not _is_simple(fmt) for fmt in (row, col)):
        return None
    if row is not None and col is not None and row.is_delayed and col.is_delayed and not shared:
        return None  # two slots record, and a kernel writes one amax
    from duotone.kernels.cast import Cast

    return Cast(_spec(row, dtype), _spec(col, dtype), shared, propagate)


def _two_level_cast(
    row: Format | None, col: Format | None, shared: bool, propagate: bool = True
) -> "TwoLevelCast | None":
    if any(fmt is not None and not _is_two_level(fmt) for fmt in (row, col)):
        return None
    if col is not None and col.is_derivable and not shared and (col.is_stochastic or col.scale_search):
        return None  # its codes depend on which matrix is encoded, and which one is transposed
    from duotone.kernels.nvfp4 import Cast

    return Cast(_two_level_spec(row), _two_level_spec(col), shared, propagate)


def _two_level_spec(fmt: Format | None) -> "TwoLevelSpec | None":
    if fmt is None:
        return None
    from duotone.kernels.nvfp4 import PlaneSpec

    square, per_line, top = fmt.block.rows > 1, fmt.epilogue is Epilogue.ROW, fmt.scale_limits(torch.float32)[0]
    return PlaneSpec(square, bool(fmt.transform), fmt.is_stochastic, fmt.scale_search, per_line, top)


def _is_two_level(fmt: Format) -> bool:
    """Whether a format is E2M1 in blocks of 16 under an amax of the matrix or of its rows."""
    block = fmt.block
    if fmt.scale_codec is not ScaleCodec.TWO_LEVEL or block not in _TWO_LEVEL_BLOCKS:
        return False
    if (fmt.precision, fmt.largest) != (4, 6.0):
        return False
    if fmt.transform:
        return fmt.transform == hadamard.NAME and fmt.epilogue is Epilogue.TENSOR and not fmt.scale_search
    return fmt.epilogue is Epilogue.TENSOR or block.rows == 1


SMALL = {(4, 6.0): "e2m1", (6, 7.5): "e2m3", (6, 28.0): "e3m2"}
"""Elements that kernels know and for which torch has no dtype, by bits and largest value."""


def _is_simple(fmt: Format) -> bool:
    """Whether codes depend only on one tile and on amaxes computed before."""
    if _element(fmt) is None or fmt.is_stochastic or fmt.transform or fmt.scale_codec is ScaleCodec.NONE:
        return False
    block = fmt.block
    if block in (TENSOR, ROW):
        return fmt.code_dtype is not None
    return all(0 < n <= WIDEST and n & (n - 1) == 0 for n in (block.rows, block.cols))


def _element(fmt: Format) -> torch.dtype | str | None:
    """The key of `duotone.kernels.elements.ELEMENTS`; None if kernels do not know the element."""
    if fmt.code_dtype is None:
        return SMALL.get((fmt.precision, fmt.largest))
    return fmt.code_dtype if fmt.code_dtype in FP8_DTYPES else None


def _spec(fmt: Format | None, dtype: torch.dtype) -> "PlaneSpec | None":
    if fmt is None:
        return None
    from duotone.kernels.cast import PlaneSpec

    element, block = _element(fmt), fmt.block
    assert element is not None
    return PlaneSpec(
        element, block.rows, block.cols, fmt.scale_codec, *fmt.scale_limits(dtype), is_delayed=fmt.is_delayed
    )

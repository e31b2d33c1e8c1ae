"""A plane: one encoded 2-D operand with its contraction last.

Planes travel in their wire form: contiguous uint8 or fp32 parts with the sharded logical dimension first. A gather
concatenates them. Parts that cover the whole sharded dimension do not travel, because every shard holds the same one.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.multiprocessing.reductions import StorageWeakRef

from duotone.comm import all_gather
from duotone.dispatch.casts import FP8_DTYPES, cast_of, contiguous, decoded, is_predicted, one_read
from duotone.dispatch.empty_planes import empty_planes, named_parts
from duotone.dispatch.stages import stages_for
from duotone.dispatch.target import runs_kernels
from duotone.errors import MissingPlaneError
from duotone.formats import IDENTITY, Format, Parts
from duotone.formats.geometry import crop
from duotone.tensor.context import QuantizeContext

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer


class Usage(NamedTuple):
    """Which planes are wanted."""

    rowwise: bool = True
    columnwise: bool = True


BOTH = Usage()


@dataclass(eq=False, slots=True)
class Plane:
    """`parts` of a (rows, cols) matrix in `format`. Nobody changes its fields; freezing would cost host time."""

    format: Format
    parts: Parts
    shape: tuple[int, int]

    @staticmethod
    def of(x: Tensor) -> "Plane":
        """The high-precision plane of a 2-D tensor: an alias."""
        return Plane(IDENTITY, {"codes": x}, x.shape)  # type: ignore[arg-type]  # torch.Size is a tuple

    @staticmethod
    def empty(
        fmt: Format,
        shape: tuple[int, int],
        new: Callable[..., Tensor],
        dtype: torch.dtype,
        plane: str = "row",
    ) -> "Plane":
        """A plane over buffers from `new(shape, dtype=dtype)`, in the memory order of `encode`.

        A delayed scale is 1, because a write without a slot keeps it.
        """
        parts: dict[str, Tensor] = {}
        for name, spec in fmt.parts(*shape).items():
            turned = plane == "col" and len(spec.shape) == 2
            part = new(spec.shape[::-1] if turned else spec.shape, dtype=spec.dtype or dtype)
            parts[name] = part.t() if turned else part
        if fmt.is_delayed:
            parts["scale"].fill_(1)
        return Plane(fmt, parts, shape)

    def materialize(self) -> "Plane":
        """Returns self. Saved operands are a `Plane` or a `DeferredPlane`; both answer `materialize()`."""
        return self

    def transposed(self) -> "Plane | None":
        """The plane of the transpose, derived without loss. None if the format does not allow it."""
        parts = self.format.derive(self.parts, self.shape[1])
        if parts is None:
            return None
        if parts["codes"].shape != self.parts["codes"].shape[::-1]:
            # The codes are a packed copy. If other parts were shared, a write of one plane would damage the other.
            parts = {name: part.clone() if part is self.parts[name] else part for name, part in parts.items()}
        return Plane(self.format, parts, (self.shape[1], self.shape[0]))

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values that a GEMM multiplies, (rows, cols or its padded length): rotated for Hadamard formats."""
        codes = self.parts["codes"]
        values = decoded(self.format, self.parts, dtype, scaled=True) if codes.is_cuda else None
        if values is not None:
            return values
        return self.format.decode(self.parts, dtype, stages_for(codes))

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The matrix that the plane stands for, (rows, cols), without any rotation."""
        if not self.format.transform:
            return crop(self.values(dtype), *self.shape)
        return self.format.unrotate(self.values(torch.float32), self.shape[1]).to(dtype)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Plane":
        """The plane over other buffers with the same meaning: moved, cloned, detached."""
        return Plane(self.format, {name: change(part) for name, part in self.parts.items()}, self.shape)

    def narrow(self, dim: int, start: int, stop: int) -> "Plane | None":
        """Rows (dim 0) or columns (dim 1) start..stop as views. None if that would cut a block."""
        extent, step = self.shape[dim], self.format.alignment[dim]
        if start % step or (stop % step and stop != extent):
            return None
        return self._cut(dim, start, stop)

    def first(self, dim: int, extent: int) -> "Plane":
        """The first rows (dim 0) or columns (dim 1) as views. What follows them, in their last block too, is zeros."""
        return self._cut(dim, 0, extent)

    def _cut(self, dim: int, start: int, stop: int) -> "Plane":
        shape = (stop - start, self.shape[1]) if dim == 0 else (self.shape[0], stop - start)
        parts: dict[str, Tensor] = {}
        for name, spec in self.format.parts(*shape).items():
            covered, part = spec.entries[dim], self.parts[name]
            parts[name] = part if covered is None else part.narrow(dim, start // covered, spec.shape[dim])
        return Plane(self.format, parts, shape)

    def spans(self, dim: int) -> bool:
        """Whether a buffer covers the whole of `dim`, so that pieces along it share that buffer."""
        return any(spec.entries[dim] is None for spec in self.format.parts(*self.shape).values())

    def copy_(self, other: "Plane", keep: Tensor | None = None, written: Collection[Tensor] = ()) -> None:
        """Copy the bytes of a plane with the same parts and shape, but those of parts that are `written`.

        If `keep` is true on the device, nothing changes.
        """
        for name, part in self.parts.items():
            if any(part is other_part for other_part in written):
                continue
            new = other.parts[name]
            if new.dtype is torch.uint8 is not part.dtype:  # this plane's codes have the dtype of their element
                part = part.view(torch.uint8)  # otherwise no view: a graph could not write it
            part.copy_(new if keep is None else torch.where(keep, part, new))


class Planes(NamedTuple):
    """The plane of x and the plane of x transposed, each None if it is not held."""

    rowwise: Plane | None
    columnwise: Plane | None

    @staticmethod
    def of(row: Format | None, col: Format | None, parts: Sequence[Tensor], shape: Sequence[int]) -> "Planes":
        """The planes of a matrix (M, K) in these formats over the parts of both, rowwise first."""
        of_row, of_col = named_parts(row, col, parts)
        rows, cols = shape
        return Planes(row and Plane(row, of_row, (rows, cols)), col and Plane(col, of_col, (cols, rows)))

    @property
    def formats(self) -> tuple[Format | None, Format | None]:
        """(rowwise, columnwise) formats; None for an absent plane."""
        return self.rowwise and self.rowwise.format, self.columnwise and self.columnwise.format

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Buffers that a backward may have saved. A write to their addresses must raise their versions."""
        return tuple([part for plane in self if plane is not None for part in plane.parts.values()])

    @property
    def aliased(self) -> bool:
        """Whether the columnwise plane is a view of the rowwise one's memory."""
        row, col = self
        if row is None or col is None or row.format != col.format:
            return False
        return same_memory(row.parts["codes"], col.parts["codes"])

    def copy_(self, other: "Planes", keep: Tensor | None = None) -> None:
        """Copy the planes that both hold, as `Plane.copy_` does. A scale of both is written once: graphs need that."""
        (row, col), (new_row, new_col) = self, other
        written: Collection[Tensor] = ()
        if row is not None and new_row is not None:
            row.copy_(new_row, keep)
            written = row.parts.values()
        if col is not None and new_col is not None and not (written and self.aliased):
            col.copy_(new_col, keep, written)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Planes":
        """Both planes over other buffers. A columnwise plane that views the rowwise one still does."""
        row, col = self
        if row is not None and self.aliased:
            changed = row.map(change)
            return Planes(changed, changed.transposed())
        return Planes(row and row.map(change), col and col.map(change))


NO_SCALES = None, None


def encode_once(
    row: Format | None,
    col: Format | None,
    x: Tensor,
    ctx: QuantizeContext,
    producer: "FusedProducer | None" = None,
) -> Planes | None:
    """The planes of a CUDA matrix in these formats from one read of it. None if stages have to encode it.

    With `producer`, the matrix is what that computes from `x`, and the cast kernel computes it too.
    """
    row_delayed = row is not None and row.is_delayed
    slot = None
    if row_delayed or (col is not None and col.is_delayed):
        slot = ctx.slots[0] if row_delayed else ctx.slots[1] or ctx.slots[0]
        if slot is None:
            return None
    if torch.compiler.is_dynamo_compiling():
        return None  # no kernel runs in a trace
    if producer is not None and ctx.shard is not None:
        return None
    cast = one_read(row, col, x, ctx.propagate)
    if cast is None:
        return _without_values(row, col, x, ctx) if producer is None and is_predicted(x) else None
    seed = _seed(row, col, x, ctx) if cast.is_random else ()
    if seed is None:
        return None
    scales, live = NO_SCALES, None
    if slot is not None:
        if producer is not None and slot.is_new:  # its first scale follows from the amax of the matrix itself
            return None
        scale, live = slot.place(x)
        scales = (scale, None) if row_delayed else (None, scale)
    if producer is None:
        rows, cols = x.shape
        x = x if x.is_contiguous() else contiguous(x)
        amaxes = ctx.amaxes if ctx.shard is None else ctx.agreed(partial(cast.measure, x))
        parts = cast(x, scales, live, amaxes, *seed, typed=ctx.typed)
    else:
        rows, cols = producer.shape
        parts = cast.produced(producer, scales, live, *seed, typed=ctx.typed)
    return Planes(
        None if row is None or parts[0] is None else Plane(row, parts[0], (rows, cols)),
        None if col is None or parts[1] is None else Plane(col, parts[1], (cols, rows)),
    )


def encode_over(planes: Planes, x: Tensor, ctx: QuantizeContext, noop: Tensor) -> bool:
    """Encode a CUDA matrix over its planes, unless `noop`, int32 (1,) on it, is not 0. False if no kernel can."""
    row, col = planes
    if torch.compiler.is_dynamo_compiling() or planes.aliased or not x.is_cuda or ctx.shard is not None:
        return False
    cast = one_read(row and row.format, col and col.format, x, ctx.propagate)
    if cast is None or cast.over is None:
        return False
    delayed = [plane is not None and plane.format.is_delayed for plane in planes]
    slot = ctx.slots[0] if delayed[0] else ctx.slots[1] or ctx.slots[0]
    scale, live = slot.place(x) if any(delayed) and slot is not None else (None, None)
    scales = (scale, None) if delayed[0] else (None, scale)
    is_written = cast.over(x.contiguous(), (row and row.parts, col and col.parts), noop, scales, live)
    if is_written:
        increment_version(planes.buffers)
    return is_written


def _seed(row: Format | None, col: Format | None, x: Tensor, ctx: QuantizeContext) -> tuple[Tensor, ...] | None:
    """The last argument of a cast, if a plane rounds stochastically. None if kernels cannot read the seed."""
    if not ((row is not None and row.is_stochastic) or (col is not None and col.is_stochastic)):
        return ()
    return None if ctx.seed is None or ctx.seed.device != x.device else (ctx.seed,)


def _without_values(row: Format | None, col: Format | None, x: Tensor, ctx: QuantizeContext) -> Planes | None:
    """The planes that `encode_once` allocates for a fake matrix. None if no kernel makes them."""
    has_kernel = runs_kernels(x.get_device()) and cast_of(row, col, x.dtype, ctx.propagate) is not None
    if not has_kernel or ctx.shard is not None or _seed(row, col, x, ctx) is None:
        return None
    planes = Planes.of(row, col, empty_planes(x, row, col), x.shape)
    for plane in planes if ctx.typed else ():
        if plane is not None and plane.format.code_dtype in FP8_DTYPES:
            plane.parts["codes"] = plane.parts["codes"].view(plane.format.code_dtype)
    return planes


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two buffers are views of one storage. It may have no address: meta, fake or empty."""
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


def location_of(x: Tensor) -> tuple[object, ...]:
    """The storage, offset and strides of a tensor. The weak reference prevents that the address is used again."""
    return StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.stride()


def memory_of(x: Tensor) -> tuple[int, int, int]:
    """The storage of a strided tensor with elements, its first byte there, and the byte after its last one."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    first = int(x.storage_offset()) * x.itemsize
    return x.untyped_storage()._cdata, first, first + (last + 1) * x.itemsize


def overlap(a: Tensor, b: Tensor) -> bool:
    """Whether the memory from the first to the last element of a tensor meets that of another."""
    (storage, first, end), (other, start, stop) = memory_of(a), memory_of(b)
    return storage == other and first < stop and start < end and 0 not in (a.numel(), b.numel())


def derived(row: Plane) -> Plane:
    """The plane of the transpose, in a format that derives it without loss."""
    col = row.transposed()
    assert col is not None
    return col


def require_whole_blocks(plane: Plane, dim: int) -> None:
    """MissingPlaneError unless the shard ends on a block boundary along `dim`."""
    step = plane.format.alignment[dim]
    if plane.shape[dim] % step:
        raise MissingPlaneError(
            f"a shard of {plane.shape[dim]} along the {'rows' if dim == 0 else 'columns'} of a plane of "
            f"{plane.format.name} cuts its blocks of {step}; make shards multiples of {step}"
        )


def sharded_parts(plane: Plane, dim: int) -> list[str]:
    """The names of the parts that shard along `dim`, in the order of the format."""
    return [name for name, spec in plane.format.parts(*plane.shape).items() if spec.entries[dim] is not None]


def to_wire(plane: Plane, dim: int) -> list[Tensor]:
    """The parts that shard along `dim`."""
    require_whole_blocks(plane, dim)
    parts = [plane.parts[name] for name in sharded_parts(plane, dim)]
    return [(part.t() if dim == 1 else part).contiguous() for part in parts]


def from_wire(shard: Plane, dim: int, wire: Sequence[Tensor], count: int) -> Plane:
    """The plane of `count` shards from its gathered parts. Parts that do not travel are those of `shard`."""
    gathered = zip(sharded_parts(shard, dim), wire, strict=True)
    parts = {**shard.parts, **{name: part.t() if dim == 1 else part for name, part in gathered}}
    rows, cols = shard.shape
    return Plane(shard.format, parts, (rows * count, cols) if dim == 0 else (rows, cols * count))


def gather(plane: Plane, dim: int, group: str, count: int) -> Plane:
    """The whole plane from the shards along `dim` that the ranks of `group` hold."""
    return from_wire(plane, dim, [all_gather(part, group) for part in to_wire(plane, dim)], count)


@dataclass(eq=False, slots=True)
class DeferredPlane:
    """A plane that backward computes from saved tensors: `make(seed, *tensors)`."""

    make: Callable[..., Plane]
    tensors: tuple[Tensor | None, ...]
    seed: Tensor | None = None
    """Not a saved tensor: a recomputed forward must not replace that of the first one."""

    def materialize(self) -> Plane:
        """Compute the plane."""
        return self.make(self.seed, *self.tensors)

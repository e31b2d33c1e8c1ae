"""Every way of rewriting a quantized tensor. All checks come before the first byte, amax or collective."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from duotone.comm import ShardContext
from duotone.dispatch.stages import amax_of
from duotone.errors import MissingPlaneError, UserError
from duotone.formats import IDENTITY, Format
from duotone.formats.checks import require_dense
from duotone.tensor.context import LOCAL, QuantizeContext, Slot
from duotone.tensor.plane import BOTH, Plane, Planes, Usage, same_memory

if TYPE_CHECKING:
    from duotone.tensor.quantizer import Quantizer

HIGH_PRECISION_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Writes(Tensor):
    """Mixed into QuantizedTensor."""

    planes: Planes
    matrix_shape: tuple[int, int]
    quantizer: "Quantizer"
    context: QuantizeContext
    is_piece: bool
    values: Callable[[torch.dtype], Tensor]  # type: ignore[assignment]

    def quantize_(
        self,
        source: Tensor,
        *,
        noop_flag: Tensor | None = None,
        quantizer: "Quantizer | None" = None,
        usage: Usage = BOTH,
        ctx: QuantizeContext = LOCAL,
    ) -> Any:
        """Rewrite the held planes that `usage` names from a tensor of the same shape; buffers keep their address.

        A `noop_flag` (one element, on the device) that is not 0 leaves every byte and amax as it was. `quantizer` and
        what `ctx` leaves open are the tensor's own; the quantizer must make the formats that are held.
        """
        written = quantizer or self.quantizer
        self.require_writable()
        self._require_formats((written.rowwise, written.columnwise), usage)
        _check(source, noop_flag)
        if source.shape != self.shape:
            raise UserError(f"cannot write shape {tuple(source.shape)} into {tuple(self.shape)}; reshape it first")
        row, col = self.planes
        held = Usage(usage.rowwise and row is not None, usage.columnwise and col is not None)
        values = source.values(torch.float32) if isinstance(source, Writes) else source.detach()
        dtype = torch.promote_types(values.dtype, self.dtype)  # codes are rounded once
        matrix = values.to(device=self.device, dtype=dtype).reshape(self.matrix_shape)
        if any(p is not None and same_memory(matrix, p.parts["codes"]) for p in self.planes):
            matrix = matrix.clone()  # of an Identity plane: bytes are not copied onto themselves
        keep = None if noop_flag is None else noop_flag.reshape(()) != 0
        if keep is not None:
            matrix = torch.where(keep, torch.zeros_like(matrix), matrix)  # records no amax where nothing is written
        fresh = written.encode(matrix, held, self._write_context(ctx))
        self._require_formats(tuple(p and p.format for p in fresh), usage)
        for mine, new in zip(self.planes, fresh, strict=True):
            if mine is not None and new is not None:
                mine.copy_(new if keep is None else _unless(keep, mine, new))
        self._rename(fresh)
        if not self.is_inference():
            torch.autograd.graph.increment_version(self)
        return self

    def _rename(self, fresh: Planes) -> None:
        """Name the formats that were written, which may find scales in another way than those before."""
        row, col = (
            mine
            if new is None or mine is None or mine.format == new.format
            else Plane(new.format, mine.parts, mine.shape)
            for mine, new in zip(self.planes, fresh, strict=True)
        )
        self._rowwise, self._columnwise = row, col

    @property
    def shares_scale(self) -> bool:
        """Whether this is a piece under a scale that the rest of its tensor needs too."""
        return self.is_piece and any(p is not None and (p.spans(0) or p.spans(1)) for p in self.planes)

    def require_writable(self) -> None:
        if self.planes == (None, None):
            raise MissingPlaneError(
                f"{self!r} holds no plane, so a write would be lost; make a new one with its quantizer"
            )
        if self.shares_scale:
            raise MissingPlaneError("a piece of a tensor shares its scale with the rest; write the whole tensor")

    def _require_formats(self, offered: tuple[Format | None, ...], usage: Usage) -> None:
        for mine, theirs, wanted in zip(self.planes, offered, usage, strict=True):
            if wanted and mine is not None and theirs is not None and mine.format.stored != theirs.stored:
                raise UserError(
                    f"the quantizer makes {theirs.name} where the tensor holds {mine.format.name}; "
                    "convert it with duotone.convert_parameters"
                )

    def _write_context(self, given: QuantizeContext = LOCAL) -> QuantizeContext:
        """`given`, completed by the tensor's own; delayed planes without a slot keep the scale they have."""
        own = self.context
        slots = own.slots if given.slots == (None, None) else given.slots
        if slots == (None, None) and any(p is not None and p.format.is_delayed for p in self.planes):
            row, col = (_KeptScale(p.parts["scale"]) if p and p.format.is_delayed else None for p in self.planes)
            slots = (row or col, col)
        shard = given.shard or own.shard
        if shard is not None:  # one scale for all shards: each records the largest amax of them
            row, col = slots
            slots = (row and _AgreedSlot(row, shard), col and _AgreedSlot(col, shard))
        seed = own.seed if given.seed is None else given.seed
        propagate = given.propagate and own.propagate
        return QuantizeContext(shard, slots, seed, propagate=propagate, nominal=given.nominal or self.dtype)

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        """Adopt the planes of a quantized tensor of the same formats; quantize any other one into new buffers.

        Shape, nominal dtype and device follow, as those of any tensor do.
        """
        self._adopt(new if isinstance(new, Writes) and same_formats(self, new) else self._quantized(new))

    def _quantized(self, new: Tensor) -> Any:
        _check(new)
        if self.planes == (None, None):
            self.require_writable()
        shape = self.matrix_shape if new.shape == self.shape else matrix_shape(new.shape)
        matrix = plain(new.detach()).reshape(shape)
        usage = Usage(*(plane is not None for plane in self.planes))
        planes = self.quantizer.encode(matrix, usage, self._write_context(QuantizeContext(nominal=new.dtype)))
        return self.with_memory(planes, new.shape, dtype=new.dtype, device=new.device)  # type: ignore[attr-defined]

    def _adopt(self, made: Any) -> None:
        torch.Tensor.data.__set__(self, made)  # type: ignore[attr-defined]
        self._rowwise, self._columnwise = made.planes
        self.quantizer, self.is_piece = made.quantizer, made.is_piece

    def update_quantizer(self, quantizer: Any) -> None:
        """Describe later writes by another quantizer of the same formats, a value or a handle; the data stays as it is.

        A handle that is bound to delayed-scaling slots gives them to the tensor too.
        """
        slots = getattr(quantizer, "slots", (None, None))
        quantizer = quantizer if hasattr(quantizer, "encode") else getattr(quantizer, "value", quantizer)
        if not hasattr(quantizer, "encode"):
            raise UserError(f"update_quantizer takes a quantizer; got {type(quantizer).__name__}: make one")
        offered = (quantizer.rowwise, quantizer.columnwise)
        for mine, theirs in zip(self.planes, offered, strict=True):
            if mine is not None and theirs is None:
                raise UserError(f"the quantizer makes nothing where the tensor holds {mine.format.name}; drop it first")
        self._require_formats(offered, BOTH)
        self.quantizer = quantizer
        if slots != (None, None):
            self.context = replace(self.context, slots=slots)

    def __setitem__(self, index: Any, value: Any) -> None:
        """As of any tensor, also where what `index` names is read as a plain copy."""
        with torch.no_grad():
            piece = self[index]
        if isinstance(piece, Writes) and not piece.shares_scale:
            super().__setitem__(index, value)  # pyright: ignore[reportCallIssue]
            return
        values = self.dequantize(torch.float32).clone()
        values[index] = plain(value)
        self.copy_(values)


class _AgreedSlot(Slot):
    """The slot of a shard: it meets the largest amax of all shards."""

    def __init__(self, slot: Slot, shard: ShardContext) -> None:
        self.slot, self.shard = slot, shard

    def scale_for(self, x: Tensor) -> Tensor:
        return self.slot.scale_for(self.shard.max(amax_of(x)).reshape(1, 1))


class _KeptScale(Slot):
    """The slot of a delayed plane that has none: the encode scale that its stored inverse tells."""

    def __init__(self, inverse: Tensor) -> None:
        self.inverse = inverse

    def scale_for(self, x: Tensor) -> Tensor:
        return torch.ones_like(self.inverse) / self.inverse


def _check(source: Any, noop_flag: Tensor | None = None) -> None:
    check_source(source)
    if noop_flag is not None and noop_flag.numel() != 1:
        raise UserError(f"a noop_flag has one element; got shape {tuple(noop_flag.shape)}")


def check_source(x: Any) -> None:
    """UserError unless `x` is a dense tensor in a dtype that formats encode."""
    if not isinstance(x, Tensor):
        raise UserError(f"only a tensor can be quantized; got {type(x).__name__}: make it one")
    require_dense("a quantizer", x)
    if x.dtype not in HIGH_PRECISION_DTYPES:
        raise UserError(f"a quantizer takes bf16, fp16 and fp32; got {x.dtype}: cast it first")


def matrix_shape(shape: torch.Size) -> tuple[int, int]:
    """(*lead, K) -> (M, K)."""
    if not shape:
        return 1, 1
    rows = 1
    for extent in shape[:-1]:
        rows *= extent
    return rows, shape[-1]


def plain(value: Any) -> Any:
    """A quantized tensor's values; anything else as it is."""
    return value.values(value.dtype) if isinstance(value, Writes) else value


def values_as(t: Any, dtype: torch.dtype) -> Tensor:
    """A quantized tensor's values in any dtype, rounded once; of memory of their own or that of a plane."""
    return t.values(dtype if dtype in HIGH_PRECISION_DTYPES else torch.float32).to(dtype)


def unshared(value: Any) -> Any:
    """`plain`, but never the memory of one plane of two: writing that would set the planes apart."""
    values = plain(value)
    if isinstance(value, Writes) and None not in value.planes and not value.planes.aliased:
        return values.clone() if any(p and same_memory(values, p.parts["codes"]) for p in value.planes) else values
    return values


def same_formats(a: Any, b: Any) -> bool:
    """Whether the two hold the same planes in the same formats."""
    return [p and p.format for p in a.planes] == [p and p.format for p in b.planes]


def _unless(keep: Tensor, old: Plane, new: Plane) -> Plane:
    return Plane(new.format, {n: torch.where(keep, old.parts[n], part) for n, part in new.parts.items()}, new.shape)


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """The arguments that the schema says are written, matched by name, lists flattened."""
    found: list[Any] = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[i] if i < len(args) else kwargs.get(argument.name)
            found.extend(given if isinstance(given, list | tuple) else [given])
    return found


NARROW = (torch.bfloat16, torch.float16)


def _computes_in_fp32(target: Any) -> bool:
    """Whether what an operation writes is encoded, and not kept in high precision."""
    return isinstance(target, Writes) and all(p is None or p.format != IDENTITY for p in target.planes)


def run_in_place(func: Any, args: Any, kwargs: Any) -> Any:
    """Run a writing operation on dequantized values and requantize every argument that it wrote.

    Values and operands are fp32, so that what is encoded was rounded once. Random numbers are drawn in the nominal
    dtype, and Identity planes compute in it.
    """
    targets = written_arguments(func, args, kwargs)
    for target in targets:
        if isinstance(target, Writes):
            target.require_writable()
    widens = torch.Tag.nondeterministic_seeded not in func.tags and all(map(_computes_in_fp32, targets))

    def operand(value: Any) -> Any:
        if widens and isinstance(value, Tensor) and value.dtype in NARROW:
            return values_as(value, torch.float32) if isinstance(value, Writes) else value.to(torch.float32)
        return unshared(value)

    plain_args, plain_kwargs = tree_map(operand, (args, kwargs))
    result = func(*plain_args, **plain_kwargs)
    returned: dict[int, Any] = {}
    for target, value in zip(targets, written_arguments(func, plain_args, plain_kwargs), strict=True):
        if isinstance(target, Writes):
            returned[id(value)] = target.quantize_(value)
    return tree_map(lambda r: returned.get(id(r), r), result)

"""Every way of rewriting a quantized tensor. All checks come before the first byte, amax or collective."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.comm import ShardContext, agree
from duotone.dispatch.stages import amax_of, amaxes_of
from duotone.errors import MissingPlaneError, UserError
from duotone.formats import Format
from duotone.formats.elements import divide
from duotone.tensor.context import LOCAL, NO_AMAXES, Amaxes, QuantizeContext, Slot
from duotone.tensor.graph_casts import encoded
from duotone.tensor.history import clips
from duotone.tensor.plane import BOTH, Plane, Planes, Usage, encode_over, same_memory
from duotone.tensor.plane_encoder import PlaneEncoder, encodes_alone
from duotone.tensor.plane_tensor import Decodable, PlaneTensor, check_source, matrix_shape, plain


class Writes(PlaneTensor):
    """Mixed into QuantizedTensor."""

    def quantize_(
        self,
        source: Tensor,
        *,
        noop_flag: Tensor | None = None,
        quantizer: PlaneEncoder | None = None,
        usage: Usage = BOTH,
        ctx: QuantizeContext = LOCAL,
    ) -> Self:
        """Rewrite the held planes that `usage` names from a tensor of the same shape. Buffers keep their address.

        If `noop_flag` (one element, on the device) is not 0, no byte and no amax changes. The quantizer and the context
        of the tensor complete missing arguments. The quantizer must have the formats of the tensor.
        """
        self._pending(source, noop_flag, quantizer or self.quantizer, usage).write(ctx)
        return self

    def _pending(
        self,
        source: Tensor,
        noop_flag: Tensor | None,
        written: PlaneEncoder,
        usage: Usage,
        by_training: bool = False,
    ) -> "Pending":
        """Check a write, which then follows. `by_training`: see `_write_context`."""
        self.require_writable()
        self._require_formats((written.rowwise, written.columnwise), usage)
        check_source(source)
        if noop_flag is not None and noop_flag.numel() != 1:
            raise UserError(f"a noop_flag has one element; got shape {tuple(noop_flag.shape)}")
        if source.shape != self.shape:
            raise UserError(f"cannot write shape {tuple(source.shape)} into {tuple(self.shape)}; reshape it first")
        row, col = self.planes
        planes_written = Usage(usage.rowwise and row is not None, usage.columnwise and col is not None)
        if self.planes.aliased and written.derives_columnwise:  # one write is both
            planes_written = Usage(any(planes_written), False)
        values = source.values(torch.float32) if isinstance(source, PlaneTensor) else source.detach()
        dtype = torch.promote_types(values.dtype, self.dtype)  # codes are rounded once
        matrix = values.to(device=self.device, dtype=dtype).reshape(self.matrix_shape)
        if any(p is not None and same_memory(matrix, p.parts["codes"]) for p in self.planes):
            matrix = matrix.clone()  # an Identity plane: bytes are not copied onto themselves
        keep = None if noop_flag is None else noop_flag.reshape(()) != 0

        def write(ctx: QuantizeContext) -> None:
            ctx = self._write_context(ctx, by_training=by_training)
            if keep is None or not self._encode_over(matrix, planes_written, written, ctx, keep):
                # Zeros record no amax.
                values = matrix if keep is None else torch.where(keep, torch.zeros_like(matrix), matrix)
                fresh = encoded(written, values, planes_written, ctx)
                self._require_formats(fresh.formats, usage)
                self._take(fresh, keep)
            self.count_write()

        return Pending(write, lambda: self._shared_amaxes(matrix, written, planes_written))

    def _shared_amaxes(self, matrix: Tensor, written: PlaneEncoder, usage: Usage) -> Amaxes:
        """What shards agree on before they write a matrix: amaxes of scales that span them, and of delayed scales."""
        if not encodes_alone(written):
            return NO_AMAXES
        shared = written.shared_amaxes(matrix, usage, self._write_context())
        delayed = [fmt is not None and fmt.is_delayed and wants for fmt, wants in zip(self.formats, usage, strict=True)]
        amax = amax_of(matrix) if any(delayed) else None
        row, col = (amax if is_delayed else other for is_delayed, other in zip(delayed, shared, strict=True))
        return row, col

    def count_write(self) -> None:
        """Raise the versions of the tensor and of its buffers, because torch does not for writes below a dispatch.

        A backward may have saved them, and an optimizer with masters asks whether other code wrote.
        """
        self.is_blank = False
        parts = [part for part in self.planes.buffers if type(part) is Tensor]
        torch.autograd.graph.increment_version([each for each in (self, *parts) if not each.is_inference()])

    def fit_slots(self) -> None:
        """Start the own slots anew whose scale clips the values. Whoever adopts codes that no slot wrote calls this.

        An optimizer with masters writes under the scale of the history, which is of earlier values. All ranks with a
        shard call this.
        """
        slots = [slot for slot in self.context.slots if slot is not None]
        is_real = all(type(part) is Tensor for part in self.parts) and not (self.is_meta or is_capturing())
        if not slots or not is_real or self.planes == (None, None):
            return
        amax = amax_of(self.values(self.dtype).reshape(self.matrix_shape))
        amax = amax if self.context.shard is None else self.context.shard.max(amax)
        for slot in slots:
            slot.fit(amax)

    def _encode_over(
        self, matrix: Tensor, usage: Usage, written: PlaneEncoder, ctx: QuantizeContext, keep: Tensor
    ) -> bool:
        """Write the planes of `usage` by a kernel that reads `keep` itself. False if there is no such kernel."""
        if not written.is_repeatable or written.columnwise_source != "original":
            return False
        row, col = (plane if wants else None for plane, wants in zip(self.planes, usage, strict=True))
        formats = row and written.rowwise, col and written.columnwise
        same = formats == (row and row.format, col and col.format)
        return same and encode_over(Planes(row, col), matrix, ctx, keep.to(torch.int32).reshape(1))

    def _take(self, fresh: Planes, keep: Tensor | None) -> None:
        """Copy planes over those of the tensor. If `keep` is true on the device, no byte changes."""
        self.planes.copy_(fresh, keep)
        planes = [*self.planes]
        for at, (plane, new) in enumerate(zip(self.planes, fresh, strict=True)):
            if plane is not None and new is not None and plane.format != new.format:
                # stored alike, with scales that are computed in another way
                planes[at] = Plane(new.format, plane.parts, plane.shape)
        row, col = planes
        if row is not None and col is not None and row is not self._rowwise and self.planes.aliased:
            col = Plane(row.format, col.parts, col.shape)
        self._rowwise, self._columnwise = row, col

    @property
    def shares_scale(self) -> bool:
        """Whether this is a piece of a tensor, and other pieces use its scale too."""
        return self.is_piece and any(p is not None and (p.spans(0) or p.spans(1)) for p in self.planes)

    @property
    def scales_by_tensor(self) -> bool:
        """Whether a write encodes one plane, under a scale that follows from the largest magnitude."""
        fmt = self.formats[0] or self.formats[1]
        return fmt is not None and fmt.scales_by_tensor and self.quantizer.derives_columnwise

    def require_writable(self) -> None:
        """MissingPlaneError if a write would be lost, or would change the scale of other pieces."""
        if self.planes == (None, None):
            raise MissingPlaneError(
                f"{self!r} holds no plane, so a write would be lost; make a new one with its quantizer"
            )
        if self.shares_scale:
            raise MissingPlaneError("a piece of a tensor shares its scale with the rest; write the whole tensor")

    def _require_formats(self, offered: Sequence[Format | None], usage: Usage) -> None:
        for plane, fmt, is_named in zip(self.planes, offered, usage, strict=True):
            if is_named and plane is not None and fmt is not None and plane.format.stored != fmt.stored:
                raise UserError(
                    f"the quantizer makes {fmt.name} where the tensor holds {plane.format.name}; "
                    "convert it with duotone.convert_parameters"
                )

    def hold_high_precision(self) -> None:
        """Let a blank tensor hold values that are not encoded, such as the mask of a dropout, which torch writes."""
        self.quantizer, self.is_blank = self.quantizer.in_high_precision, False
        row = Plane.of(torch.empty(self.matrix_shape, dtype=self.dtype, device=self.device))
        self._rowwise, self._columnwise = row, row.transposed()

    def _write_context(self, ctx: QuantizeContext = LOCAL, *, by_training: bool = False) -> QuantizeContext:
        """`ctx`, completed by the tensor's context. Delayed scales fit what is written.

        The tensor's own slots follow their history for a write of an optimizer with masters (`by_training`), as casts
        in training do. Delayed planes without a slot keep their scale while it fits.
        """
        slots = ctx.slots
        if slots == (None, None):
            row, col = self.context.slots
            slots = row and row.for_writes(by_training), col and col.for_writes(by_training)
        if slots == (None, None) and any(p is not None and p.format.is_delayed for p in self.planes):
            row, col = (_KeptScale(p) if p is not None and p.format.is_delayed else None for p in self.planes)
            slots = (row or col, col)
        shard = ctx.shard or self.context.shard
        if shard is not None:  # one scale for all shards: each records the largest amax of them
            row, col = slots
            of_row, of_col = ctx.amaxes
            slots = (row and _AgreedSlot(row, shard, of_row), col and _AgreedSlot(col, shard, of_col))
        seed = self.context.seed if ctx.seed is None else ctx.seed
        propagate = ctx.propagate and self.context.propagate
        nominal = ctx.nominal or self.dtype
        return QuantizeContext(shard, slots, seed, propagate=propagate, nominal=nominal, amaxes=ctx.amaxes)

    @property
    def data(self) -> Tensor:
        """The tensor without its graph, as torch's `data`."""
        return self.detach()

    @data.setter
    def data(self, new: Tensor) -> None:
        """Adopt the planes of a quantized tensor of the same formats. Any other tensor is quantized into new buffers.

        Shape, nominal dtype and device change with it, as for any tensor.
        """
        adopted = new if isinstance(new, PlaneTensor) and new.formats == self.formats else self._quantized(new)
        torch.Tensor.data.__set__(self, adopted)  # type: ignore[attr-defined]
        self.clear_high_precision_init_val()
        self._rowwise, self._columnwise = adopted.planes
        self.quantizer, self.is_piece = adopted.quantizer, adopted.is_piece
        if adopted is new:
            self.fit_slots()

    def _quantized(self, new: Tensor) -> Self:
        check_source(new)
        if self.planes == (None, None):
            self.require_writable()
        shape = self.matrix_shape if new.shape == self.shape else matrix_shape(new.shape)
        matrix = plain(new.detach()).reshape(shape)
        usage = Usage(*(plane is not None for plane in self.planes))
        planes = self.quantizer.encode(matrix, usage, self._write_context(QuantizeContext(nominal=new.dtype)))
        return self.with_planes(planes, new.shape, dtype=new.dtype, device=new.device, is_piece=False)

    def update_quantizer(self, quantizer: Any) -> None:
        """Let later writes follow another quantizer of the same formats, a value or a handle. The data stays.

        A handle that is bound to delayed-scaling slots hands them to the tensor too.
        """
        slots = getattr(quantizer, "slots", (None, None))
        quantizer = quantizer if hasattr(quantizer, "encode") else getattr(quantizer, "value", quantizer)
        if not hasattr(quantizer, "encode"):
            raise UserError(f"update_quantizer takes a quantizer; got {type(quantizer).__name__}: make one")
        offered = (quantizer.rowwise, quantizer.columnwise)
        for plane, fmt in zip(self.planes, offered, strict=True):
            if plane is not None and fmt is None:
                raise UserError(
                    f"the quantizer makes nothing where the tensor holds {plane.format.name}; drop it first"
                )
        self._require_formats(offered, BOTH)
        self.quantizer = quantizer
        if slots != (None, None):
            self.context = replace(self.context, slots=slots)

    def __setitem__(self, index: Any, value: Any) -> None:
        """Write like any tensor, also if reading `index` gives a plain copy."""
        with torch.no_grad():
            piece = self[index]
        if isinstance(piece, Writes) and not piece.shares_scale:
            super().__setitem__(index, value)  # pyright: ignore[reportCallIssue]
            return
        values = self.dequantize(torch.float32).clone()
        values[index] = plain(value).float() if isinstance(value, Tensor) else value
        self.copy_(values)


class _AgreedSlot(Slot):
    """The slot of a shard, which records the largest amax of all shards. It may be known."""

    def __init__(self, slot: Slot, shard: ShardContext, amax: Tensor | None) -> None:
        self.slot, self.shard, self.amax = slot, shard, amax

    def scale_for(self, x: Tensor) -> Tensor:
        amax = self.shard.max(amax_of(x)) if self.amax is None else self.amax
        return self.slot.scale_for(amax.reshape(1, 1))


class _KeptScale(Slot):
    """Stands for the missing slot of a delayed plane: the scale that it has, or one of new values that this clips.

    No history would bring it back. The inverse of an inverse may be one rounding larger than it was.
    """

    is_new = True

    def __init__(self, plane: Plane) -> None:
        inverse = plane.parts["scale"]
        self.largest, self.scale = plane.format.largest, torch.ones_like(inverse) / inverse

    def scale_for(self, x: Tensor) -> Tensor:
        amax = amax_of(x).reshape(1)
        return torch.where(clips(amax, self.scale, self.largest), divide(self.largest, amax), self.scale)


class Pending(NamedTuple):
    """A write whose arguments are checked. It encodes under a context; `amaxes` measures what shards agree on."""

    write: Callable[[QuantizeContext], None]
    amaxes: Callable[[], Amaxes]


def write_all(writes: Sequence[tuple[Decodable, Tensor]], *, by_training: bool = False) -> None:
    """`quantize_` each tensor, or write each view, from its values. All shards of a group agree in one collective.

    `by_training`: an optimizer with masters writes, so delayed scales follow from their history, as in a forward.
    """
    shared: list[tuple[Pending, ShardContext, Amaxes]] = []
    direct: list[tuple[Pending, ShardContext, Tensor]] = []
    for target, value in writes:
        if not isinstance(target, Writes):
            target.write(value)
            continue
        shard, pending = target.context.shard, target._pending(value, None, target.quantizer, BOTH, by_training)
        if shard is None or len(writes) == 1:
            pending.write(LOCAL)
        elif target.scales_by_tensor and not isinstance(value, PlaneTensor):
            direct.append((pending, shard, value.detach()))
        else:
            shared.append((pending, shard, pending.amaxes()))
    if direct:
        amaxes = amaxes_of([value for *_, value in direct])
        shared += [(pending, shard, (amax, amax)) for (pending, shard, _), amax in zip(direct, amaxes, strict=True)]
    groups = [shard.group for _, shard, amaxes in shared for amax in amaxes if amax is not None]
    agreed = iter(agree(groups, [amax for *_, amaxes in shared for amax in amaxes if amax is not None]))
    for pending, _, amaxes in shared:
        row, col = (None if amax is None else next(agreed).view(amax.shape) for amax in amaxes)
        pending.write(QuantizeContext(amaxes=(row, col)))

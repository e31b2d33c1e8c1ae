"""QuantizedTensor: the one tensor subclass of the library.

An operation without an entry in the op table (`ops.py`) runs on the dequantized values and gives a plain tensor.
In-place operations write the result back, quantized.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map

from duotone.errors import MissingPlaneError, UserError
from duotone.formats import Format
from duotone.numbered import never_compiled
from duotone.tensor.context import LOCAL
from duotone.tensor.decoded_view import views_of
from duotone.tensor.fsdp import ShardHooks
from duotone.tensor.in_place import run_in_place, writes_arguments
from duotone.tensor.plane import Plane, Planes, Usage
from duotone.tensor.plane_tensor import INIT_VALUE, SIDES, plain, shared_values
from duotone.tensor.writes import Writes

Shell = tuple[Format, tuple[str, ...], tuple[int, int]]
"""What is left of a plane without its buffers: its format, the names of its parts, its shape."""

OPS: dict[OpOverload, Callable[..., object]] = {}
"""aten op -> its implementation on quantized tensors."""

aten = torch.ops.aten
WHOLE_VIEWS = {getattr(aten, name).default for name in ("detach", "alias", "view", "_unsafe_view", "reshape")}
"""Operations whose result shares all planes of their argument. Other views may be copies."""


class QuantizedTensor(ShardHooks, Writes):  # pyright: ignore[reportIncompatibleVariableOverride]
    """A tensor held as up to two planes. See `PlaneTensor` for its shape and fields."""

    def materialize_usage(
        self, rowwise: bool = False, columnwise: bool = False, *, allow_requantize: bool = False
    ) -> None:
        """Make absent planes without loss or, with `allow_requantize`, by encoding the dequantized values anew."""
        missing = Usage(rowwise and self._rowwise is None, columnwise and self._columnwise is None)
        try:
            self.update_usage(rowwise or None, columnwise or None)
        except MissingPlaneError:
            if not allow_requantize:
                raise
            fresh = self.quantizer.encode(self.values(self.dtype).reshape(self.matrix_shape), missing, self.context)
            self._rowwise = self._rowwise or fresh.rowwise
            self._columnwise = self._columnwise or fresh.columnwise

    @property
    def traced_words(self) -> str:
        """`Quantizer.words` of a tensor that a graph creates: a trace reads strings, but no objects. "" otherwise."""
        if not any(isinstance(part, FakeTensor) for part in self.parts):
            return ""
        row, col = self.formats
        quantizer = self.quantizer
        return replace(quantizer, rowwise=row or quantizer.rowwise, columnwise=col or quantizer.columnwise).words

    def __deepcopy__(self, memo: dict[int, object]) -> "QuantizedTensor":
        other = self.with_planes(self.planes.map(torch.clone), is_piece=False)
        other.requires_grad_(self.requires_grad)
        if not isinstance(self, torch.nn.Parameter):
            other.grad = copy.deepcopy(self.grad, memo)  # torch's parameters leave theirs behind
        else:
            other = torch.nn.Parameter(other, self.requires_grad)
            assert isinstance(other, QuantizedTensor)
        other.context, other.gathers = LOCAL, None
        memo[id(self)] = other
        # The copy has no writes, so it must not take the initial value of a written tensor.
        stale: set[str] = {INIT_VALUE} if self.is_inference() or self._version else set()
        for name in vars(self).keys() - vars(other).keys() - stale:
            setattr(other, name, copy.deepcopy(vars(self)[name], memo))
        return other

    def __tensor_flatten__(self) -> tuple[list[str], tuple[object, ...]]:
        planes = self.planes
        aliased = planes.aliased
        kinds = tuple([None if p is None else (p.format, tuple(p.parts), p.shape) for p in planes])
        flat = [
            f"{side}_{part}"
            for side, kind in zip(SIDES, kinds, strict=True)
            if kind is not None and not (side == "columnwise" and aliased)
            for part in kind[1]
        ]
        for name in flat:
            _show(name)
        quantizer = self.quantizer
        return flat, (kinds, aliased, self.dtype, self.is_piece, quantizer.content, quantizer, self.context)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: tuple[Any, ...], size: tuple[int, ...], stride: tuple[int, ...]
    ) -> "QuantizedTensor":
        del stride
        kinds, aliased, dtype, is_piece, _, quantizer, write_context = context
        planes: list[Plane | None] = []
        for side, kind in zip(SIDES, kinds, strict=True):
            if kind is None:
                planes.append(None)
            elif side == "columnwise" and aliased:
                assert planes[0] is not None
                derived = planes[0].transposed()
                # A view holds its base outside of Python, so that torch would never free what it traced.
                planes.append(derived and derived.map(lambda part: part.data if isinstance(part, FakeTensor) else part))
            else:
                fmt, parts, shape = kind
                planes.append(Plane(fmt, {part: inner[f"{side}_{part}"] for part in parts}, shape))
        tensor = QuantizedTensor(Planes(*planes), quantizer, torch.Size(size), dtype)
        tensor.context, tensor.is_piece = write_context, is_piece
        return tensor

    @classmethod
    def __metadata_guard__(cls, traced: tuple[Any, ...], metadata: tuple[Any, ...]) -> bool:
        """Whether a graph that was traced with one result of `__tensor_flatten__` serves another. Guards call it."""
        *before, _, context = traced
        *now, _, current = metadata
        if before != now:
            return False
        if context is current and context.slots == (None, None):
            return True
        slots = zip(context.slots, current.slots, strict=True)
        return replace(context, slots=current.slots) == current and all(
            other is None if slot is None else slot.serves(other) for slot, other in slots
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls,
        func: OpOverload,
        types: tuple[type, ...],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func not in OPS:
            decomposed = func.decompose(*args, **kwargs)  # only inference mode brings composite operations here
            if decomposed is not NotImplemented:
                return decomposed
        if torch.is_inference_mode_enabled() and func.is_view and not args[0].is_inference():
            # A view of a tensor with a version needs one too, and inference tensors have none.
            with torch.inference_mode(False), torch._C._AutoDispatchBelowAutograd():
                return _run(func, args, kwargs)
        return _run(func, args, kwargs)


def _run(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, object]) -> object:
    if func.is_view and func not in WHOLE_VIEWS and getattr(args[0], "is_blank", False):
        args[0].hold_high_precision()  # torch writes its parts; some are copies, and some share a scale
    if func in OPS:
        return OPS[func](*args, **kwargs)
    if writes_arguments(func):
        return run_in_place(func, args, kwargs)
    if func.is_view and isinstance(args[0], QuantizedTensor):
        return view_of(args[0], func, *args[1:], **kwargs)
    plain_args, plain_kwargs = tree_map(plain, (args, kwargs))
    return func(*plain_args, **plain_kwargs)


def view_of(t: QuantizedTensor, func: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """What a view operation gives of a tensor whose planes cannot express it."""
    values = shared_values(t)
    return views_of(t, (), func, args, kwargs) if values is None else func(values, *args, **kwargs)


def _show(name: str) -> None:
    """Make a buffer an attribute by the name that `__tensor_flatten__` lists, such as "rowwise_codes".

    A property and no `__getattr__`: Dynamo reads no attribute of a tensor whose class has one.
    """

    if hasattr(QuantizedTensor, name):
        return

    @never_compiled  # the callback of a copied torch.compile(fullgraph=True) would compile it, and call it for that
    def buffer(self: QuantizedTensor) -> Tensor:
        plane = self._rowwise if side == "rowwise" else self._columnwise
        if plane is None or part not in plane.parts:
            raise AttributeError(f"QuantizedTensor has no attribute {name!r}")
        return plane.parts[part]

    side, _, part = name.partition("_")
    setattr(QuantizedTensor, name, property(buffer))


for _side in SIDES:
    for _part in ("codes", "scale", "amax"):  # those of the formats here; others are shown when they are listed
        _show(f"{_side}_{_part}")


def prepare_for_saving(t: QuantizedTensor) -> list[Tensor]:
    """Take the buffers out of `t`, rowwise first. `t` only knows their shapes until `restore_from_saved`."""
    if "_shells" in vars(t):
        raise MissingPlaneError(f"the buffers of {t!r} are taken out already; call restore_from_saved first")
    tensors = t.parts
    t._shells = [plane and (plane.format, tuple(plane.parts), plane.shape) for plane in t.planes]  # type: ignore[attr-defined]
    t._rowwise = t._columnwise = None
    return tensors


def restore_from_saved(t: QuantizedTensor, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Put the buffers back and return those that belong to others."""
    if "_shells" not in vars(t):
        raise MissingPlaneError(f"nothing was taken out of {t!r}; call prepare_for_saving first")
    shells: list[Shell | None] = vars(t)["_shells"]
    count = sum(len(shell[1]) for shell in shells if shell is not None)
    if len(tensors) < count:
        raise UserError(f"{t!r} needs its {count} buffers back; got {len(tensors)}: pass all that were saved")
    buffers = iter(tensors)
    t._rowwise, t._columnwise = (
        shell and Plane(shell[0], {name: next(buffers) for name in shell[1]}, shell[2]) for shell in shells
    )
    delattr(t, "_shells")
    return list(buffers)


def clear(t: QuantizedTensor) -> None:
    """Free the memory of every buffer at once, even if others hold a reference. The shape stays."""
    for part in t.parts:
        part.data = part.new_empty(0)
    t._rowwise = t._columnwise = None

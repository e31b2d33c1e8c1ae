"""DecodedView: a view of a quantized tensor that no plane expresses, such as its transpose.

A read decodes the tensor as it is then, and a write reaches it, as for any view in torch.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Self

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from duotone.errors import MissingPlaneError
from duotone.tensor.in_place import run_in_place, writes_arguments
from duotone.tensor.plane_tensor import Decodable, plain
from duotone.tensor.writes import Writes

aten = torch.ops.aten


class Step(NamedTuple):
    """One view operation: its other arguments and, if it returns a list of views, which of them."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    output: int | None

    def __call__(self, x: Tensor) -> Tensor:
        result = self.func(x, *self.args, **dict(self.kwargs))
        return result if self.output is None else result[self.output]


class DecodedView(Decodable):
    """A view of `source`, a quantized tensor, by `steps`. It holds no memory. Every read gives a plain tensor.

    A write decodes the source, writes the view, and encodes the source again, as `source[index] = values` does.
    """

    source: Writes
    steps: tuple[Step, ...]

    def __new__(cls, source: Writes, steps: tuple[Step, ...]) -> Self:
        like = _follow(torch.empty(source.shape, dtype=source.dtype, device="meta"), steps)
        self = torch.Tensor._make_wrapper_subclass(
            cls,
            like.shape,
            strides=like.stride(),
            storage_offset=like.storage_offset(),
            dtype=like.dtype,
            device=source.device,
        )
        self.source, self.steps = source, steps
        return self

    @property
    def whole(self) -> Writes:
        return self.source

    def values(self, dtype: torch.dtype) -> Tensor:  # type: ignore[override]
        """The values now, in `dtype`; bytes of the nominal dtype if a step views them in another one."""
        return _follow(self.source.values(self.source.dtype if self.is_reinterpreted else dtype), self.steps)

    @property
    def is_reinterpreted(self) -> bool:
        """Whether the view reads the bytes of the values in another dtype."""
        return any(step.func is aten.view.dtype for step in self.steps)

    def require_writable(self) -> None:
        """MissingPlaneError if a write would be lost."""
        self.source.require_writable()
        if self.is_reinterpreted:
            raise MissingPlaneError(f"a view of {self.source!r} as {self.dtype} takes no writes; write its values")

    def write(self, values: Tensor) -> None:
        whole = self.source.values(torch.float32).clone()
        _follow(whole, self.steps).copy_(values)
        self.source.copy_(whole)

    def __tensor_flatten__(self) -> tuple[list[str], tuple[Step, ...]]:
        return ["source"], self.steps

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Any], steps: tuple[Step, ...], size: object, stride: object) -> Tensor:
        del size, stride
        return DecodedView(inner["source"], steps)

    def __deepcopy__(self, memo: dict[int, object]) -> Tensor:
        return plain(self).clone()

    def _refuse(self, *_: object, **_options: object) -> NoReturn:
        """MissingPlaneError: the values have no memory."""
        raise MissingPlaneError("a view of a quantized tensor is decoded at each read and has no address; clone() it")

    @property
    def data(self) -> Tensor:
        """The view without its graph, as torch's `data`."""
        return self.detach()

    @data.setter
    def data(self, _: Tensor) -> None:
        self._refuse()

    __dlpack__ = share_memory_ = is_shared = apply_ = map_ = _refuse  # type: ignore[assignment]

    def numpy(self, *, force: bool = False) -> Any:
        """The values as an array that cannot be written, because writes to it would not reach the source."""
        array = self.clone().numpy(force=force)
        array.flags.writeable = False
        return array

    def data_ptr(self) -> int:
        """The address of a copy of the values, for code that saves. MissingPlaneError for a view of a parameter."""
        return self._values_now().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory at `data_ptr()`."""
        return self._values_now().untyped_storage()

    def _values_now(self) -> Tensor:
        """The copy, which lives as long as the view, with the values that the source has now."""
        if isinstance(self.source, nn.Parameter):  # writes of other code to the copy would be lost
            self._refuse()
        values = plain(self)
        copy: Tensor = vars(self).setdefault("_copy", torch.empty_like(values))
        return copy.copy_(values)

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
        if func.is_view and isinstance(args[0], DecodedView):
            return views_of(args[0].source, args[0].steps, func, args[1:], kwargs)
        if writes_arguments(func):
            return run_in_place(func, args, kwargs)
        plain_args, plain_kwargs = tree_map(plain, (args, kwargs))
        return func(*plain_args, **plain_kwargs)


def _of_values(name: str) -> Callable[..., Any]:
    def call(self: DecodedView, *args: Any, **options: Any) -> Any:
        return getattr(self.clone(), name)(*args, **options)

    return call


for _name in ("__repr__", "__format__", "__reduce_ex__", "tolist"):
    setattr(DecodedView, _name, _of_values(_name))


def _follow(x: Tensor, steps: Sequence[Step]) -> Tensor:
    for step in steps:
        x = step(x)
    return x


def views_of(
    source: Writes, steps: tuple[Step, ...], func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Tensor | list[Tensor]:
    """The view or the views that `func` gives of a view of `source`. Raises what torch raises for these arguments."""
    step = Step(func, tuple(args), tuple(kwargs.items()), None)
    if len(func._schema.returns) == 1 and func._schema.returns[0].type.kind() == "TensorType":
        return DecodedView(source, (*steps, step))
    like = torch.empty(source.shape, dtype=source.dtype, device="meta")
    count = len(step(_follow(like, steps)))
    return [DecodedView(source, (*steps, step._replace(output=at))) for at in range(count)]

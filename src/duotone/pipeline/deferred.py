"""DeferredOutput: the output of an op that runs later: in the pipeline of its reader, or when other code reads it."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.utils._pytree import tree_map_only

from duotone.errors import UserError
from duotone.pipeline.autograd import Outputs
from duotone.pipeline.stage import Gradients


class Reader(Protocol):
    """Knows the op behind a deferred output, and its readers."""

    def read(
        self,
        ops: Sequence[Any],
        x: "DeferredOutput",
        extra: Sequence[object],
        first: bool | Tensor | None,
        owner: object,
    ) -> Outputs:
        """The output of a pipeline of `ops` whose input is `x`."""
        ...

    def compute(self, source: Tensor) -> Tensor:
        """The values of the output, without a graph."""
        ...

    def differentiate(self, dy: Tensor, inputs: Sequence[Tensor | None], needs: Sequence[bool]) -> Gradients:
        """The gradients of the inputs of `Defer`, the source first."""
        ...


class Unchanged:
    """Tensors for a later reader. UserError if one was written to in place since, or got other memory."""

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        self._tensors = tensors
        self._versions = self._current()

    @property
    def tensors(self) -> Sequence[Tensor | None]:
        """The tensors. UserError if one was written to."""
        if self._current() != self._versions:
            raise UserError(
                "the input or a weight of a fused norm was changed in place before its output was read; write "
                "x = x + y instead of x += y, read the output before weights change, or call duotone.revert(model)"
            )
        return self._tensors

    def _current(self) -> list[tuple[int, int]]:
        real = [x for x in self._tensors if x is not None]
        return [(0 if x.is_inference() else x._version, x.untyped_storage()._cdata) for x in real]


class DeferredOutput(Tensor):
    """A tensor like `source`, the output of an op over it. `reader` runs the op, in a larger pipeline if it can.

    Autograd sees an ordinary tensor. Operations of torch get its values, which are computed once.
    """

    inputs: Unchanged
    tracks: bool
    """Whether gradients were enabled where the op was called."""
    reader: Reader
    computed: Tensor | None
    is_passed_by = False
    """Whether a pipeline ran from the source, so that no gradient of its readers comes through this tensor."""

    outputs: dict[tuple[object, ...], Tensor]
    """Outputs that one pipeline computed together, by who will ask for them."""

    @staticmethod
    def __new__(cls, inputs: Unchanged, reader: Reader, tracks: bool) -> "DeferredOutput":
        source = inputs.tensors[0]
        assert source is not None
        options = {"dtype": source.dtype, "device": source.device, "strides": source.stride()}
        self = Tensor._make_wrapper_subclass(cls, source.shape, **options)
        self.inputs, self.reader, self.outputs, self.computed = inputs, reader, {}, None
        self.tracks = tracks
        return self

    @property
    def source(self) -> Tensor:
        """The input of the op. UserError if it was written to after the op was called."""
        source = self.inputs.tensors[0]
        assert source is not None
        return source

    @property
    def is_watched(self) -> bool:
        """Whether a gradient has to stop at this tensor, or to pass through it, or other code has its values.

        That code may write to them. A reentrant checkpoint reads without gradients what is tracked, and gives its
        recompute a plain tensor.
        """
        if self.computed is not None or torch.is_grad_enabled() != self.tracks:
            return True
        return bool(self._backward_hooks) or (self.requires_grad and (self.is_leaf or self.retains_grad))

    def materialize(self) -> Tensor:
        """The output as a plain tensor without a graph."""
        if self.computed is None:
            with torch.no_grad():
                self.computed = self.reader.compute(self.source)
        return self.computed

    @classmethod
    def __torch_dispatch__(
        cls,
        function: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> object:
        plain, options = tree_map_only(DeferredOutput, DeferredOutput.materialize, (args, kwargs or {}))
        return function(*plain, **options)

    @property
    def data(self) -> Tensor:
        """The values without a graph. Later readers get those that are set. UserError if these have another form."""
        return self.materialize().data

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype, value.device) != (self.shape, self.dtype, self.device):
            raise UserError("the output of a fused norm keeps its shape, dtype and device; write h = value, not h.data")
        self.computed = value.data

    def data_ptr(self) -> int:
        """The address of the values, which are computed now if they were not before."""
        return self.materialize().data_ptr()

    def register_hook(self, hook: Callable[..., object]) -> Any:
        """As of a tensor. UserError after a pipeline ran, whose gradients the hook would not see."""
        self._require_gradients()
        return super().register_hook(hook)

    def retain_grad(self) -> None:
        """As of a tensor. UserError as of `register_hook`."""
        self._require_gradients()
        super().retain_grad()

    def _require_gradients(self) -> None:
        if self.is_passed_by:
            raise UserError(
                "the output of a fused norm was read by a pipeline, whose gradients do not come through it; register "
                "the hook before the output is read, or call duotone.revert(model)"
            )

    def untyped_storage(self) -> torch.UntypedStorage:
        """The memory of the values."""
        return self.materialize().untyped_storage()

    def share_memory_(self) -> Tensor:  # type: ignore[override]
        """The values in shared memory, as a plain tensor."""
        return self.materialize().share_memory_()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.materialize()!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]


class DeferContext(FunctionCtx):
    """What `Defer` leaves to its backward."""

    reader: Reader
    inputs: Unchanged
    needs_input_grad: tuple[bool, ...]


class Defer(torch.autograd.Function):
    """(reader, grad mode, source, *parameters) -> a deferred output, whose gradient goes through the op alone."""

    @staticmethod
    def forward(ctx: DeferContext, reader: Reader, tracks: bool, *inputs: Tensor | None) -> DeferredOutput:
        # Not as saved tensors: hooks, such as offloading, would copy them, and a backward through here is rare.
        ctx.reader, ctx.inputs = reader, Unchanged(inputs)
        return DeferredOutput(ctx.inputs, reader, tracks)

    @staticmethod
    @once_differentiable
    def backward(ctx: DeferContext, dy: Tensor) -> Gradients:
        return None, None, *ctx.reader.differentiate(dy, ctx.inputs.tensors, ctx.needs_input_grad[2:])

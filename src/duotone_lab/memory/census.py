"""A census of one step: which module called what in which order, and which storages autograd kept for it.

What a pipeline allocates besides this follows from its stages and shapes alone. They run on fake tensors, which have
shapes and no data. So decoded operands, casts and results count as the kernels of the plans allocate them, for every
format and GEMM rule, and nothing is computed.
"""

import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.weak import WeakTensorKeyDictionary

from duotone.pipeline.autograd import RUNNER, Outputs, PipelineFunction, Stages
from duotone.pipeline.op import Op
from duotone.tensor import QuantizedTensor
from duotone_lab.memory.storages import LiveStorages, sizes, storages, tensors_in

Shell = Callable[[], object]
"""Creates an operand with buffers of the same shapes and no data, inside a fake mode."""


@dataclass
class PipelineCall:
    """The stages of a call, and the shells of x and of the operands. Calls with the same `key` allocate the same."""

    forward: Stages
    backward: Stages
    shells: list[Shell]
    key: Hashable

    @staticmethod
    def of(forward: Stages, backward: Stages, x: Tensor, operands: Sequence[object]) -> "PipelineCall":
        """The call of a pipeline, without the data of its tensors."""
        tracked = torch.is_grad_enabled()
        shells, keys = zip(*(_shell(value, tracked) for value in (x, *operands)), strict=True)
        stages = tuple((type(basic), getattr(basic, "plan", basic)) for stage in forward for basic in stage.basics)
        return PipelineCall(forward, backward, list(shells), (stages, *keys))

    def workspace(self) -> tuple[int, int]:
        """Peak bytes above the operands in forward, and above operands and saved tensors in backward.

        The first includes the output. The second includes its gradient, and all gradients that the call computes.
        """
        with FakeTensorMode():
            operands = [shell() for shell in self.shells]
            with LiveStorages([t for t in operands if isinstance(t, Tensor)]) as live:
                base = live.live
                y: Outputs = PipelineFunction.apply(self.forward, self.backward, *operands)
                forward = live.peak - base
                outputs = [t for t in (y if isinstance(y, tuple) else (y,)) if t.requires_grad]
                if not outputs:
                    return forward, 0
                edges = [torch.autograd.graph.get_gradient_edge(t) for t in outputs]
                results = [(t.shape, t.dtype, t.device) for t in outputs]
                del y, outputs
                base = live.peak = live.live
                gradients = [torch.empty(shape, dtype=dtype, device=at) for shape, dtype, at in results]
                torch.autograd.backward(edges, gradients)
            return forward, live.peak - base


def _shell(value: object, tracked: bool) -> tuple[Shell, Hashable]:
    """The shell of a value, and a key of all that the shell depends on."""
    if not isinstance(value, Tensor):
        return lambda: value, value
    needs = tracked and value.requires_grad
    if isinstance(value, QuantizedTensor):
        parts = value.planes.map(lambda part: part.detach())
        detached: Any = value.detach()
        fmts = tuple(plane and plane.format for plane in parts)

        def planes() -> Tensor:
            return detached.with_planes(parts.map(_like)).requires_grad_(needs)

        return planes, (fmts, value.shape, value.dtype, needs)
    shape, stride, dtype, device = layout = value.shape, value.stride(), value.dtype, value.device

    def empty() -> Tensor:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).requires_grad_(needs)

    return empty, (layout, needs)


def _like(t: Tensor) -> Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)


OUTSIDE = "(outside)"
"""The owner of tensors that are saved outside of any call of a module, such as by the loss."""


@dataclass
class Call:
    """One call of a module without children, or of a pipeline. Sizes are by storage.

    `begin` and `end` count the storages that were saved before it and after it. `inputs` are the inputs that nobody had
    saved. `input_gradients` are the bytes of the gradients that it gives its inputs.
    """

    name: str
    trained: list[nn.Parameter]
    inputs: dict[int, int]
    input_gradients: int
    begin: int
    outputs: dict[int, int] = field(default_factory=dict)
    end: int = 0
    differentiable: bool = False
    pipeline: PipelineCall | None = None


@dataclass
class Census:
    """What one forward did. `saved` maps each storage that autograd keeps to its owner and size, in order.

    `static` are the storages that live throughout the step, such as parameters.
    """

    static: set[int]
    calls: list[Call] = field(default_factory=list)
    saved: dict[int, tuple[str, int]] = field(default_factory=dict)
    output: dict[int, int] = field(default_factory=dict)
    _open: list[tuple[str, Call | None]] = field(default_factory=list)
    _leaves: list[weakref.ref] = field(default_factory=list)
    _gradients: WeakTensorKeyDictionary = field(default_factory=WeakTensorKeyDictionary)
    """The earlier gradient of each input of the step."""

    def run(self, model: nn.Module, step: Callable[[], Tensor]) -> Tensor:
        """Call `step` and watch every module of `model`. Removes the gradients of inputs; see `restore_gradients`."""
        with ExitStack() as stack:
            for name, module in model.named_modules():
                self._watch(stack, name, module)
            stack.enter_context(RUNNER.watched(self._run_pipeline))
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor))
            output = step()
        if isinstance(output, Tensor):
            self.output = sizes([output])
        return output

    def inputs(self) -> list[Tensor]:
        """The bytes of each storage that is still alive, was an argument of a module and came from no operation."""
        alive = (storage() for storage in self._leaves)
        return [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s in alive if s is not None]

    def clear_gradients(self) -> None:
        """Drop the gradients of the tensors whose earlier gradients `restore_gradients` puts back."""
        for tensor in self._gradients:
            tensor.grad = None

    def restore_gradients(self) -> None:
        """Give the inputs of the step their earlier gradients."""
        for tensor, gradient in self._gradients.items():
            tensor.grad = gradient

    def _watch(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        counts = not isinstance(module, Op) and next(module.children(), None) is None

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            tensors = tensors_in((args, kwargs))
            self._note_leaves(tensors)
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            self._open.append((name, self._begin(name, tensors, trained) if counts else None))

        def after(module: nn.Module, args: object, kwargs: object, result: object) -> None:
            call = self._open.pop()[1]
            if call is not None:
                self._finish(call, result)

        before.watches = after.watches = True  # counting changes nothing in the call
        stack.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        stack.enter_context(module.register_forward_hook(after, with_kwargs=True))

    def _run_pipeline(
        self, apply: Callable[..., Outputs], forward: Stages, backward: Stages, x: Tensor, *operands: object
    ) -> Outputs:
        """Count a pipeline as a call of the module that runs it."""
        owner = self._open[-1][0] if self._open else OUTSIDE
        tensors = [t for t in operands if isinstance(t, Tensor)]
        call = self._begin(owner, [x], [p for t in tensors if (p := _parameter(t)) is not None])
        call.pipeline = PipelineCall.of(forward, backward, x, operands)
        result = apply(forward, backward, x, *operands)
        self._finish(call, result)
        return result

    def _begin(self, name: str, tensors: list[Tensor], trained: list[nn.Parameter]) -> Call:
        counted = self.static.union(self.saved)
        inputs = {key: size for key, size in sizes(tensors).items() if key not in counted}
        gradients = sum(sizes(t for t in tensors if t.requires_grad).values())
        call = Call(name, trained, inputs, gradients, len(self.saved))
        self.calls.append(call)
        return call

    def _finish(self, call: Call, result: object) -> None:
        tensors = tensors_in(result)
        call.outputs, call.end = sizes(tensors), len(self.saved)
        call.differentiable = any(t.requires_grad for t in tensors)

    def _note_leaves(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.grad_fn is None:
                new = [s for s in storages(tensor) if s._cdata not in self.static]
                self._leaves.extend(weakref.ref(s) for s in new)
                if new and tensor.requires_grad and tensor not in self._gradients:
                    self._gradients[tensor] = tensor.grad
                    tensor.grad = None  # backward would add to it in place

    def _pack(self, tensor: Tensor) -> Tensor:
        owner = self._open[-1][0] if self._open else OUTSIDE
        for key, size in sizes([tensor]).items():
            if key not in self.static:
                self.saved.setdefault(key, (owner, size))
        return tensor


def _parameter(tensor: Tensor) -> nn.Parameter | None:
    """The trained parameter that an operand is, or is a view of."""
    owner = tensor if tensor.is_leaf else tensor._base
    return owner if isinstance(owner, nn.Parameter) and owner.requires_grad else None

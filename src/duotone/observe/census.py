"""A census of one step: which module called what in which order, and which storages autograd kept for it."""

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from duotone.observe.storages import sizes, storages
from duotone.observe.workspace import PipelineCall
from duotone.pipeline.autograd import RUNNER
from duotone.pipeline.op import Op

OUTSIDE = "(outside)"
"""The owner of what is saved outside of any call of a module, such as by the loss."""


@dataclass
class Call:
    """One call of a module without children, or of a pipeline. Sizes are by storage.

    `begin` and `end` count the storages that were saved before and after it. `inputs` are those that nobody had saved,
    `owed` the bytes of those that need a gradient.
    """

    name: str
    trained: list[nn.Parameter]
    inputs: dict[int, int]
    owed: int
    begin: int
    outputs: dict[int, int] = field(default_factory=dict)
    end: int = 0
    differentiable: bool = False
    pipeline: PipelineCall | None = None


@dataclass
class Census:
    """What one forward did. `saved` maps each storage that autograd kept to its owner and size, in order."""

    known: set[int]
    calls: list[Call] = field(default_factory=list)
    saved: dict[int, tuple[str, int]] = field(default_factory=dict)
    output: dict[int, int] = field(default_factory=dict)
    _open: list[tuple[str, Call | None]] = field(default_factory=list)
    _leaves: list[weakref.ref] = field(default_factory=list)
    _gradients: list[tuple[weakref.ref, Tensor | None]] = field(default_factory=list)

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
        for reference, _ in self._gradients:
            tensor = reference()
            if tensor is not None:
                tensor.grad = None

    def restore_gradients(self) -> None:
        """Give the inputs of the step their earlier gradients."""
        for reference, gradient in self._gradients:
            tensor = reference()
            if tensor is not None:
                tensor.grad = gradient

    def _watch(self, stack: ExitStack, name: str, module: nn.Module) -> None:
        counts = not isinstance(module, Op) and next(module.children(), None) is None

        def before(module: nn.Module, args: object, kwargs: object) -> None:
            tensors = _tensors((args, kwargs))
            self._note_leaves(tensors)
            trained = [p for p in module.parameters(recurse=False) if p.requires_grad]
            self._open.append((name, self._begin(name, tensors, trained) if counts else None))

        def after(module: nn.Module, args: object, kwargs: object, result: object) -> None:
            call = self._open.pop()[1]
            if call is not None:
                self._finish(call, result)

        before.watches = after.watches = True  # type: ignore[attr-defined]  # what is counted runs as it would uncounted
        hooks = (
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True),
        )
        for hook in hooks:
            stack.callback(hook.remove)

    def _run_pipeline(self, apply: Any, forward: Any, backward: Any, x: Tensor, *operands: Any) -> Any:
        """Count a pipeline as a call of the module that runs it."""
        owner = self._open[-1][0] if self._open else OUTSIDE
        tensors = [t for t in operands if isinstance(t, Tensor)]
        call = self._begin(owner, [x], [p for t in tensors if (p := _parameter(t)) is not None])
        call.pipeline = PipelineCall.of(forward, backward, x, operands)
        result = apply(forward, backward, x, *operands)
        self._finish(call, result)
        return result

    def _begin(self, name: str, tensors: list[Tensor], trained: list[nn.Parameter]) -> Call:
        counted = self.known.union(self.saved)
        inputs = {key: size for key, size in sizes(tensors).items() if key not in counted}
        owed = sum(sizes(t for t in tensors if t.requires_grad).values())
        call = Call(name, trained, inputs, owed, len(self.saved))
        self.calls.append(call)
        return call

    def _finish(self, call: Call, result: object) -> None:
        tensors = _tensors(result)
        call.outputs, call.end = sizes(tensors), len(self.saved)
        call.differentiable = any(t.requires_grad for t in tensors)

    def _note_leaves(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if tensor.grad_fn is None:
                new = [s for s in storages(tensor) if s._cdata not in self.known]
                self._leaves.extend(weakref.ref(s) for s in new)
                if new and tensor.requires_grad and all(reference() is not tensor for reference, _ in self._gradients):
                    self._gradients.append((weakref.ref(tensor), tensor.grad))
                    tensor.grad = None  # backward would add to it in place

    def _pack(self, tensor: Tensor) -> Tensor:
        owner = self._open[-1][0] if self._open else OUTSIDE
        for key, size in sizes([tensor]).items():
            if key not in self.known:
                self.saved.setdefault(key, (owner, size))
        return tensor


def _tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _parameter(tensor: Tensor) -> nn.Parameter | None:
    """The trained parameter that an operand is, or is a view of."""
    owner = tensor if tensor.is_leaf else tensor._base
    return owner if isinstance(owner, nn.Parameter) and owner.requires_grad else None

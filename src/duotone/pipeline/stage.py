"""A stage: one step of a layer as a forward and a backward over tensors, without parameters or state.

What a forward saves reaches backward as a flat list of tensors and their shells.
Modules and fusible ops are tuples of stages; `pipeline/autograd.py` runs them in one autograd function.
"""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any, ClassVar

from torch import Tensor
from torch.autograd.function import FunctionCtx

from duotone.tensor.context import Slot
from duotone.tensor.plane import DeferredPlane, Plane

Saved = tuple[Any, ...]
"""What backward needs: planes and tensors, which autograd holds, or a 1-tuple of a value that it must not replace.

Its types, and those of operands, are in the signatures of each stage.
"""

Needs = tuple[bool, ...]
"""Which gradients autograd asks for: of the input first, then of the operands."""

Gradients = tuple[Tensor | None, ...]
"""Gradients of the input, then of the operands."""

Shells = list[list[Any]]
"""A saved value without its buffers: (format, shape, part names) of a plane, TENSOR of a tensor,
(DEFERRED, make, number of tensors, seed) of a deferred plane. None and tuples of one element stand for themselves."""

TENSOR, DEFERRED = "tensor", "deferred"


AUTOGRAD, ELSEWHERE, ELSEWHERE_WITH_ZEROS = 1, 2, 3
"""Where a gradient goes. Autograd gets zeros for the last kind, so that its hooks fire."""


class Stage:
    """One step. `arity` counts the operands (parameters, seeds, further inputs) of each basic stage that it stands for.

    A fused stage stands for several basic stages, its `basics`. It overrides `run` and `run_backward`, and saves for
    each basic stage what that stage would save. So a backward without the fusion can follow.
    """

    arity: ClassVar[tuple[int, ...]] = (0,)
    extra_outputs: ClassVar[int] = 0
    refusal: str = "a stage has no replay"
    """Why second derivatives cannot go through this stage; "" if `replay` gives them."""
    reads: tuple[bool, ...] = ()
    """Whether a gradient depends on the value of the input, and of each operand; () where it depends on all."""

    @property
    def basics(self) -> tuple["Stage", ...]:
        """The basic stages that this stage stands for, in their order."""
        return (self,)

    is_bindable = False
    """Whether the plan and shapes decide all calls of torch and of kernels, so that `bound.py` may record them."""
    slots: tuple[Slot, ...] = ()
    """The delayed slots that each forward opens, if the stage is bindable."""
    gradient_slots: tuple[Slot, ...] = ()
    """Those that each backward opens."""

    waits = False
    """Whether backward leaves a product to a later call."""
    stores = False
    """Whether backward puts gradients elsewhere than into autograd."""

    def opened(self, slots: Mapping[Slot, Slot]) -> "Stage":
        """The stage of one call, which has opened slots."""
        return self

    row_part: str = ""
    """In a trace: how rows name the stage, a `RowPart` as a string. "" for one that is no part of rows."""
    has_owner = False
    """In a trace: whether the ops of the stage use what only its module has, such as delayed scales."""

    @property
    def rolls_forward_alone(self) -> bool:
        """Whether delayed scales of forward roll at the end of the backward because nothing else asks for it."""
        return False

    def replay(self, x: Tensor, operands: Sequence[Any], saved: Saved | None) -> tuple[Tensor, ...]:
        """(y, *extra outputs) in operations that autograd differentiates any number of times.

        `saved` is what `forward` saved, None if it did not run.
        """
        raise NotImplementedError

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        """(y, saved, *extra outputs) of the input and the operands."""
        raise NotImplementedError

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, *extra: Tensor) -> Gradients:
        """(dx, gradients of the operands...). `needs` says which of those autograd asks for, dx first."""
        raise NotImplementedError

    def run(self, x: Tensor, operands: Sequence[Any]) -> tuple[Tensor, Sequence[Saved], Sequence[Tensor]]:
        """Forward over the operands of all basic stages: y, the saved values of each stage, the extra outputs."""
        y, saved, *extra = self.forward(x, *operands)
        return y, (saved,), extra

    def run_backward(
        self, dy: Tensor, saved: Sequence[Saved], needs: Needs, extra: Sequence[Tensor]
    ) -> tuple[Tensor | None, Sequence[Tensor | None]]:
        """Backward over what each basic stage saved: dx and the gradients of all operands."""
        dx, *gradients = self.backward(dy, saved[0], (True, *needs), *extra)
        return dx, gradients


Stages = tuple[Stage, ...]


class SavedContext(FunctionCtx):
    """What a forward saves for its backward."""

    shells: Shells  # of what each basic stage saved, then of what a backward under `create_graph` needs
    needs_input_grad: tuple[bool, ...]
    saved_tensors: tuple[Tensor, ...]


def pack(saved: Sequence[Saved]) -> tuple[Shells, list[Tensor | None]]:
    """The saved values of each basic stage, as shells and a flat list of buffers."""
    shells: Shells = []
    tensors: list[Tensor | None] = []
    for each in saved:
        entry: list[object] = []
        shells.append(entry)
        for one in each:
            if isinstance(one, Plane):
                entry.append((one.format, one.shape, tuple(one.parts)))
                tensors.extend(one.parts.values())
            elif isinstance(one, Tensor):
                entry.append(TENSOR)
                tensors.append(one)
            elif isinstance(one, DeferredPlane):
                entry.append((DEFERRED, one.make, len(one.tensors), one.seed))
                tensors.extend(one.tensors)
            else:
                entry.append(one)
    return shells, tensors


def unpack(shells: Shells, tensors: Sequence[Any]) -> list[Saved]:
    """The inverse of `pack`. A second backward may call it again."""
    remaining = iter(tensors)
    saved: list[Saved] = []
    for each in shells:
        values: list[object] = []
        for shell in each:
            if shell is None or len(shell) == 1:
                values.append(shell)
            elif shell is TENSOR:
                values.append(next(remaining))
            elif shell[0] is DEFERRED:
                _, make, count, seed = shell
                values.append(DeferredPlane(make, tuple(islice(remaining, count)), seed))
            else:
                fmt, shape, names = shell
                values.append(Plane(fmt, dict(zip(names, remaining, strict=False)), shape))
        saved.append(tuple(values))
    return saved

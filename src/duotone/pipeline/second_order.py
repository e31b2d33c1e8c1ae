"""Second derivatives of a pipeline in high precision, torch.func and forward-mode AD."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from duotone.pipeline.stage import Gradients, Saved, SavedContext, Stage, Stages, unpack
from duotone.tensor import QuantizedTensor


class Exact:
    """Stages in high precision. A backward under `create_graph` replays them in operations of torch, which autograd
    differentiates any number of times. An ordinary backward only keeps the inputs of the replay, which are mostly saved
    anyway."""

    marks = False
    """Whether the last output is not one of the stages, but is added here."""

    def __init__(self, stages: Stages) -> None:
        self.stages = stages
        self.reads = _read_values(stages)
        """Which of x and the operands decide gradients by their values. Only the shapes of the others are saved."""

    def save(self, x: Tensor, operands: tuple[object, ...], outputs: list[Tensor]) -> Saved:
        """The tensors that a second backward needs besides those of the stages. Some are added to the outputs."""
        saved: list[object] = []
        for value, reads in zip((x, *operands), self.reads, strict=True):
            if isinstance(value, Tensor):
                saved.append(value if reads else (value.shape,))
            else:
                saved.append((value,))
        return tuple(saved)

    def differentiate(self, ctx: SavedContext, gradients: tuple[Tensor, ...]) -> Gradients:
        """The gradients of `PipelineFunction.backward`, with a graph."""
        *saved, packed = unpack(ctx.shells, ctx.saved_tensors)
        needs = ctx.needs_input_grad[2:]
        pairs = zip(packed, needs, strict=True)
        x, *operands = inputs = [_input(value, need, gradients[0]) for value, need in pairs]
        outputs = self.run(x, operands, saved)
        chosen = [(y, dy) for y, dy in zip(outputs, gradients, strict=True) if y.requires_grad]
        differentiated = [value for value, need in zip(inputs, needs, strict=True) if need]
        of_outputs, with_gradients = zip(*chosen, strict=True)
        options = {"create_graph": True, "allow_unused": True}
        of_inputs = iter(torch.autograd.grad(of_outputs, differentiated, with_gradients, **options))
        return None, None, *[next(of_inputs) if need else None for need in needs]

    def run(self, x: Tensor, operands: Sequence[object], saved: Sequence[Saved | None]) -> list[Tensor]:
        """y and the extra outputs, from the operands of all stages and what each saved, None if none did."""
        extras: list[Tensor] = []
        at = 0
        for stage, saved_here in zip(self.stages, saved, strict=True):
            (count,) = stage.arity
            x, *more = stage.replay(x, operands[at : at + count], saved_here)
            extras += more
            at += count
        return [x, *extras]

    def check(self) -> None:
        """Raises nothing: torch.func and forward-mode AD go through."""

    def transformed(self, forward: Stages, backward: object, x: Tensor, *operands: object) -> Tensor | tuple[Any, ...]:
        """The outputs of the pipeline under such a transform. Takes the arguments of `PipelineFunction.apply`."""
        plain = [t.dequantize(x.dtype) if isinstance(t, QuantizedTensor) else t for t in operands]
        y, *extra = self.run(x, plain, [None] * len(self.stages))
        return (y, *extra) if extra else y


def _read_values(stages: tuple[Stage, ...]) -> tuple[bool, ...]:
    """For x and each operand, whether a gradient depends on its value, in its stage or in a later one."""
    values: list[bool] = []
    later = False
    for stage in reversed(stages):
        x, *operands = stage.reads or (True,) * (1 + sum(stage.arity))
        values = [*[reads or later for reads in operands], *values]
        later = later or x
    return later, *values


def _input(value: Any, need: bool, like: Tensor) -> Any:
    """A saved input as a separate tensor, even if another one stands for the same, so that gradients stay separate."""
    if isinstance(value, Tensor):
        plain = value.dequantize(like.dtype) if isinstance(value, QuantizedTensor) else value
        return plain.view_as(plain) if need else plain
    (value,) = value
    return like.new_zeros(value).requires_grad_(need) if isinstance(value, torch.Size) else value

"""Ops with further inputs or outputs: AddExtraInput and MakeExtraOutput."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.modules.basic import BasicOp, PlainStage
from duotone.pipeline.op import TensorInfo
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage


class AddStage(PlainStage):
    """x, other of the same shape -> x + other."""

    arity, reads = (1,), (False, False)

    def value(self, x: Tensor, other: Tensor) -> Tensor:
        return x + other.reshape(x.shape)

    def forward(self, x: Tensor, other: Tensor) -> tuple[Tensor, Saved]:
        return self.value(x, other), ((other.shape,),)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return dy, dy.view(saved[0][0]) if needs[1] else None


class ExtraOutputStage(Stage):
    """x -> x, and x as a further output."""

    extra_outputs: ClassVar[int] = 1
    refusal, reads = "", (False,)

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return x, x.view_as(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved, Tensor]:
        return x, (), x.view_as(x)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs, of_extra: Tensor) -> Gradients:
        return (dy + of_extra,)


class AddExtraInput(BasicOp):
    """Adds a further input of the call."""

    extra_inputs = 1
    stage = AddStage()

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        return self.stage, info._replace(requires_grad=torch.is_grad_enabled(), quantizer=None)

    def accept(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        (other,) = extra
        if not isinstance(other, Tensor) or other.dim() == 0:
            raise UserError(f"AddExtraInput adds a tensor of the same shape; got {type(other).__name__}")
        rows, width = other.shape[:-1].numel(), other.shape[-1]
        if info.width not in (None, width) or info.rows not in (None, rows):
            got = f"{rows} rows of {width} for {info.rows} of {info.width}"
            raise UserError(f"AddExtraInput adds tensors of one shape; got {got}")
        return extra


class MakeExtraOutput(BasicOp):
    """Gives its input as a further output of the call too."""

    extra_outputs = 1
    stage = ExtraOutputStage()

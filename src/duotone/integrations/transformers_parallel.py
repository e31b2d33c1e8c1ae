"""Tensor parallel plans of transformers: their linears call the forward of their class, which `convert` changes."""

import functools
import inspect
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

SPLITS: dict[str, Placement] = {"ColwiseParallel": Replicate(), "RowwiseParallel": Shard(-1)}
"""How the input of a linear lies, by the style of its plan."""


class Style(Protocol):
    """Attributes of the styles above that describe inputs and outputs."""

    input_layouts: Placement
    output_layouts: Placement
    use_local_output: bool


def follow_plans(model: nn.Module) -> None:
    """Let the linears of a plan that cuts them into columns or rows follow a change of their class.

    transformers replaces `forward` by a closure. The function that the closure calls moves to `_old_forward`, as under
    the hooks of accelerate.
    """
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(module, nn.Linear) and inspect.isfunction(forward):
            names = inspect.getclosurevars(forward).nonlocals
            style, mesh = names.get("self"), names.get("mesh")
            if type(style).__name__ in SPLITS and isinstance(mesh, DeviceMesh):
                module.__dict__["_old_forward"] = names["original_forward"]
                module.__dict__["forward"] = functools.partial(_forward, module, cast(Style, style), mesh)


def _forward(module: nn.Linear, style: Style, mesh: DeviceMesh, x: Tensor) -> Tensor:
    """A linear over the ranks of a mesh. Without gradients too its operands are DTensors, whose scales span ranks."""
    if not isinstance(x, DTensor):
        shape = x.shape if style.input_layouts == Replicate() else torch.Size((*x.shape[:-1], module.in_features))
        stride = torch.empty(shape, device="meta").stride()
        x = DTensor.from_local(x, mesh, [style.input_layouts], run_check=False, shape=shape, stride=stride)
    y = module.__dict__["_old_forward"](x.redistribute(placements=[SPLITS[type(style).__name__]]))
    y = y.redistribute(placements=[style.output_layouts])
    return y.to_local() if style.use_local_output else y

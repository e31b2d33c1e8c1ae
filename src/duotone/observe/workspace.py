"""Workspace: what one call of a linear takes on top of what lives anyway, found from its plan and shapes alone.

The plan runs on tensors that have shapes and no data (fake tensors), so operands decoded for an emulated product, casts
and results count as the plan's own kernels make them, for every format and GEMM rule, and nothing is computed.
"""

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from duotone.linear import LinearStage
from duotone.linear.plan import LinearPlan
from duotone.observe.storages import LiveStorages
from duotone.ops.pipeline import PipelineFunction
from duotone.tensor import QuantizedTensor

Operand = tuple[torch.Size, torch.dtype, torch.device]


def linear_workspace(plan: LinearPlan, x: Operand, weight: Tensor, bias: Tensor | None) -> tuple[int, int]:
    """Peak bytes above the operands in forward, and above operands and saved tensors in backward.

    The first includes the output, the second its gradient and all gradients that the call makes.
    """
    shape, dtype, device = x
    stages = (LinearStage.of(plan),)
    with FakeTensorMode():
        fake_x = torch.empty(shape, dtype=dtype, device=device, requires_grad=plan.input_grad)
        fake_w = _shell(weight, dtype).requires_grad_(plan.weight_grad)
        fake_b = None if bias is None else _shell(bias, dtype).requires_grad_(bias.requires_grad)
        seed = torch.zeros(1, dtype=torch.int64, device=device) if plan.seeds else None
        held = [t for t in (fake_x, fake_w, fake_b, seed) if t is not None]
        with LiveStorages(held) as live:
            base = live.live
            y = PipelineFunction.apply(stages, stages, fake_x, fake_w, fake_b, seed)
            forward = live.peak - base
            if not y.requires_grad:
                return forward, 0
            edge, result = torch.autograd.graph.get_gradient_edge(y), (y.shape, y.dtype)
            del y
            base = live.peak = live.live
            gradient = torch.empty(result[0], dtype=result[1], device=device)
            torch.autograd.backward(edge, gradient)
        return forward, live.peak - base


def _shell(held: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor of the same buffers without their data; inside of a fake mode."""

    def empty(t: Tensor, kind: torch.dtype) -> Tensor:
        return torch.empty_strided(t.shape, t.stride(), dtype=kind, device=t.device)

    if isinstance(held, QuantizedTensor):
        return nn.Parameter(held.with_planes(held.planes.map(lambda part: empty(part, part.dtype))), False)
    return empty(held, dtype)

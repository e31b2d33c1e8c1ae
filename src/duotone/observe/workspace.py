"""Workspace: what one pipeline takes on top of what lives anyway, found from its stages and shapes alone.

The stages run on tensors that have shapes and no data (fake tensors), so operands decoded for an emulated product,
casts and results count as the plans' own kernels make them, for every format and GEMM rule, and nothing is computed.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from duotone.observe.storages import LiveStorages
from duotone.pipeline.autograd import PipelineFunction, Stages
from duotone.tensor import QuantizedTensor

Shell = Callable[[], object]
"""Creates an operand of the same buffers without their data, inside a fake mode."""


@dataclass
class PipelineCall:
    """The stages of a call and the shells of x and of the operands. Calls of one `key` take the same."""

    forward: Stages
    backward: Stages
    shells: list[Shell]
    key: Hashable

    @staticmethod
    def of(forward: Stages, backward: Stages, x: Tensor, operands: Sequence[object]) -> "PipelineCall":
        tracked = torch.is_grad_enabled()
        shells, keys = zip(*(_shell(value, tracked) for value in (x, *operands)), strict=True)
        stages = tuple((type(basic), getattr(basic, "plan", basic)) for stage in forward for basic in stage.basics)
        return PipelineCall(forward, backward, list(shells), (stages, *keys))

    def workspace(self) -> tuple[int, int]:
        """Peak bytes above the operands in forward, and above operands and saved tensors in backward.

        The first includes the output, the second its gradient and all gradients that the call makes.
        """
        with FakeTensorMode():
            operands = [shell() for shell in self.shells]
            with LiveStorages([t for t in operands if isinstance(t, Tensor)]) as live:
                base = live.live
                y: Any = PipelineFunction.apply(self.forward, self.backward, *operands)
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
    """What makes the shell of a value, and what it depends on."""
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

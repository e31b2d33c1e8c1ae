"""Norms over the last dimension, as stages, as ops and as modules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from duotone.comm import SummedOver
from duotone.dispatch.norms import NORMS, L2Kernel, LayerNormKernel, RMSNormKernel, widened
from duotone.errors import UserError, one_of
from duotone.modules.basic import ProducerStage
from duotone.modules.split_parameters import tensors_of
from duotone.modules.weights import materialise
from duotone.pipeline.op import Op, TensorInfo
from duotone.pipeline.rows import in_parts
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.pipeline.titles import title

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from duotone.kernels.activations import FusedProducer
    from duotone.sharding.activation_layout import ActivationLayout


Parameters = tuple[Tensor | None, Tensor | None]
"""gamma and beta."""


@dataclass(frozen=True, eq=False)
class NormStage(ProducerStage):
    """x (*lead, K), gamma (K,) or None, beta (K,) or None -> (*lead, K) in x's dtype.

    With `zero_centered` gamma stands for 1 + gamma, which is computed in fp32. `keeps` says whether a backward follows.
    """

    kernel: LayerNormKernel | RMSNormKernel | L2Kernel
    eps: float
    zero_centered: bool
    keeps: bool
    row_part: str = ""
    arity = (2,)
    refusal = ""
    reads = (True, True, False)
    is_bindable = True

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (self.kernel.replay(*self._inputs(x, *operands), self.eps).to(x.dtype),)

    def forward(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, Saved]:
        if not self.zero_centered:
            y, *measured = self.kernel.forward(x, gamma, beta, self.eps)
            return y, self.keep(x, gamma, beta, *measured)
        y, *measured = self.kernel.forward(*self._inputs(x, gamma, beta), self.eps)
        return y.to(x.dtype), self.keep(x, gamma, beta, *measured)

    def fused_producer(
        self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, *measured: Tensor
    ) -> "FusedProducer | None":
        if self.zero_centered:
            return None
        return self.kernel.produced(x, gamma, beta, self.eps, *measured)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        x, gamma, beta, *measured = saved
        if not self.zero_centered:
            return self.kernel.backward(dy, x, gamma, beta, measured, needs)
        wide, scale, shift = self._inputs(x, gamma, beta)
        dx, dgamma, dbeta = self.kernel.backward(dy.to(wide.dtype), wide, scale, shift, measured, needs)
        return (
            None if dx is None else dx.to(x.dtype),
            None if dgamma is None or not needs[1] else dgamma.to(gamma.dtype),
            None if dbeta is None or not needs[2] else dbeta.to(beta.dtype),
        )

    def backward_of_produced(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        """`backward`, by kernels where they take it."""
        if self.zero_centered:
            return self.backward(dy, saved, needs)
        x, gamma, beta, *measured = saved
        return self.kernel.backward_of_produced(dy, x, gamma, beta, measured, needs)

    def _inputs(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None) -> tuple[Tensor, *Parameters]:
        if not self.zero_centered or gamma is None:
            return x, gamma, beta
        return widened(x), 1 + widened(gamma), None if beta is None else widened(beta)


class NormOp(Op):
    """The norm whose parameters are `<prefix>weight` and `<prefix>bias` of a module."""

    gradients: SummedOver | None = None
    """The sum of the gradients of the parameters, if other ranks have other rows."""

    def __init__(self, owner: nn.Module, kind: str, eps: float, zero_centered: bool, prefix: str = "") -> None:
        one_of("normalization", kind, NORMS)
        self.owner, self.names = owner, (f"{prefix}weight", f"{prefix}bias")
        self.kind, self.eps, self.zero_centered = kind, eps, zero_centered
        self.stages = {keeps: self._stage(keeps) for keeps in (False, True)}

    def _stage(self, keeps: bool) -> NormStage:
        stage = NormStage(NORMS[self.kind], self.eps, self.zero_centered, keeps)
        # The gamma of a zero-centered norm may have another dtype than its gradient in a row.
        name, alone = f"{self.kind} {self.eps} {keeps}{' zero-centered' * self.zero_centered}", self.zero_centered
        return in_parts(stage, name, (keeps, keeps, keeps), keeps, is_home=alone)

    def parameters(self) -> Parameters:
        """(gamma, beta), None for one that the module does not have."""
        weight, bias = self.names
        tensors = tensors_of(self.owner, weight)  # past nn.Module's slow look-up
        return tensors.get(weight), tensors.get(bias)

    def make_parameters(self, width: int, dtype: torch.dtype | None, device: torch.device | str | None) -> None:
        """Register gamma, and beta for LayerNorm, on the owner, with their neutral values."""
        if self.kind == "L2Normalization":
            return
        weight, bias = self.names
        self.owner.register_parameter(weight, nn.Parameter(torch.empty(width, dtype=dtype, device=device)))
        beta = nn.Parameter(torch.empty(width, dtype=dtype, device=device)) if self.kind == "LayerNorm" else None
        self.owner.register_parameter(bias, beta)
        self.reset()

    def reset(self) -> None:
        """Set gamma and beta to the values that change nothing."""
        gamma, beta = self.parameters()
        if gamma is not None:
            nn.init.constant_(gamma, 0.0 if self.zero_centered else 1.0)
        if beta is not None:
            nn.init.zeros_(beta)

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup") -> None:
        """Sum gradients over another group, if this norm sums them."""
        if self.gradients is not None:
            self.gradients = SummedOver.ranks(tp_group)

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        gamma, beta = self.parameters()
        if gamma is not None and info.width not in (None, gamma.shape[0]):
            sizes = f"takes (..., {gamma.shape[0]}); got (..., {info.width})"
            raise UserError(f"{title(self.owner)} {sizes}: reshape the input")
        keeps = info.requires_grad
        if not keeps and torch.is_grad_enabled():
            keeps = (gamma is not None and gamma.requires_grad) or (beta is not None and beta.requires_grad)
        return self.stages[keeps], TensorInfo(*info[:4], keeps, index=info.index)

    def output_layout(self, x: "ActivationLayout") -> "ActivationLayout":
        if x.cuts_last:
            raise UserError(f"{title(self.owner)} takes whole rows; got a DTensor of {x.placement!r}")
        return x

    def operands(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        gamma, beta = self.parameters()
        if info.layout is not None:
            from duotone.sharding.activation_layout import replicated  # loads DTensor

            gamma, beta = (replicated(t, info.layout, f"a parameter of {self.kind}") for t in (gamma, beta))
        elif self.gradients is not None and gamma is not None:
            gamma, beta = self.gradients(gamma, beta) if beta is not None else (*self.gradients(gamma), None)
        dtype = info.dtype
        if gamma is None or gamma.dtype is dtype or self.zero_centered:
            return gamma, beta
        return gamma.to(dtype), None if beta is None else beta.to(dtype)


class Norm(Op, nn.Module):
    """A norm as a module. Arguments after the width are keyword-only.

    The ranks of `tp_group` have other rows of one batch: gradients of the parameters are summed over them.
    """

    kind: str

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        tp_group: "ProcessGroup | None" = None,
    ) -> None:
        super().__init__()
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        if len(shape) != 1:
            raise UserError(f"{type(self).__name__} normalises the last dimension; got {tuple(shape)}: flatten it")
        self.normalized_shape = tuple(shape)
        self._norm = NormOp(self, self.kind, eps, zero_centered_gamma)
        self._norm.make_parameters(shape[0], params_dtype or dtype, device)
        self._norm.gradients = SummedOver.ranks(tp_group)

    @property
    def eps(self) -> float:
        """The number that is added to the variance."""
        return self._norm.eps

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether the weight stands for 1 + weight."""
        return self._norm.zero_centered

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup") -> None:
        """Sum gradients over another group, if the norm has one."""
        self._norm.set_tensor_parallel_group(tp_group)

    def reset_parameters(self) -> None:
        """Neutral values; parameters on meta come to the default device first."""
        materialise(self)
        self._norm.reset()

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        return self._norm.link(info, is_first_microbatch)

    def output_layout(self, x: "ActivationLayout") -> "ActivationLayout":
        return self._norm.output_layout(x)

    def operands(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        return self._norm.operands(stage, info, extra)

    def extra_repr(self) -> str:
        return f"{self.normalized_shape[0]}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


class LayerNorm(Norm):
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dimension."""

    kind = "LayerNorm"


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension."""

    kind = "RMSNorm"


class L2Normalization(Norm):
    """x / sqrt(sum(x^2) + eps) over the last dimension, without parameters."""

    kind = "L2Normalization"

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__(1, eps=eps)

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

"""LayerNormLinear: a norm and a linear as one pipeline."""

from typing import Any

from torch import Tensor

from duotone.errors import UserError
from duotone.ops.extra_tensors import MakeExtraOutput
from duotone.ops.norm import NormOp
from duotone.pipeline.op import Op, run
from duotone.planned import boundary
from duotone.planned.linear import Linear


class LayerNormLinear(Linear):
    """Linear over a normalised input. Parameters of the norm are `layer_norm_weight` and `layer_norm_bias`.

    `normalization` is "LayerNorm" or "RMSNorm"; `zero_centered_gamma` lets gamma stand for 1 + gamma. With
    `return_layernorm_output` the normalised input follows the output. All else is Linear's.
    """

    _norm: NormOp | None = None
    distributes = ()  # type: ignore[assignment]  # styles would cut the norm with the linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        **linear: Any,
    ) -> None:
        if linear.get("parallel_mode") == "row":
            raise UserError("LayerNormLinear normalises whole rows; use parallel_mode 'column', or a norm and a Linear")
        super().__init__(in_features, out_features, **linear)
        self.return_layernorm_output = return_layernorm_output
        self._norm = norm = NormOp(self, normalization, eps, zero_centered_gamma, "layer_norm_")
        norm.make_parameters(self.in_features, linear.get("params_dtype"), linear.get("device"))
        self._ops: tuple[Op, ...] = (norm, MakeExtraOutput(), self) if return_layernorm_output else (norm, self)

    def forward(
        self,
        x: Tensor,
        *,
        is_first_microbatch: bool | None = None,
        fp8_output: bool = False,
        fp8_grad: bool = False,
    ) -> Any:
        """(*lead, in_features) -> (*lead, out_features), then the bias and the normalised input if asked for.

        `fp8_output` and `fp8_grad` are those of Linear; the gradient is that of the norm's input.
        """
        if fp8_output or fp8_grad:
            outputs = boundary.run_with_boundary(self._ops, x, is_first_microbatch, self, fp8_output, fp8_grad)
        else:
            outputs = run(self._ops, x, (), is_first_microbatch, self)
        y, *normalised = outputs if isinstance(outputs, tuple) else (outputs,)
        bias = [self.bias] if self.return_bias else []
        return (y, *bias, *normalised) if bias or normalised else y

    @property
    def pipeline(self) -> tuple[Op, ...] | None:
        more = self.return_bias or self.return_layernorm_output
        return None if more or type(self).forward is not LayerNormLinear.forward else self._ops

    def reset_parameters(self) -> None:
        super().reset_parameters()
        if self._norm is not None:  # the constructor of Linear comes here first
            self._norm.reset()

"""LayerNormLinear: a norm and a linear as one pipeline."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.ops.basic import MakeExtraOutput
from duotone.ops.linear import Linear
from duotone.ops.norm import NormOp
from duotone.ops.op import Op, run
from duotone.ops.splitting import Splits
from duotone.recipes.recipe import Recipe


class LayerNormLinear(Linear):
    """Linear over a normalised input. Parameters of the norm are `layer_norm_weight` and `layer_norm_bias`.

    `normalization` is "LayerNorm" or "RMSNorm"; `zero_centered_gamma` lets gamma stand for 1 + gamma. With
    `return_layernorm_output` the normalised input follows the output. All else is Linear's.
    """

    def __init__(  # noqa: PLR0913 (Transformer Engine's vocabulary)
        self,
        in_features: int,
        out_features: int,
        *,
        eps: float = 1e-5,
        bias: bool = True,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        return_layernorm_output: bool = False,
        return_bias: bool = False,
        parameters_split: Splits = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], Any] | None = None,
        name: str = "",
        recipe: Recipe | None = None,
        parallel_mode: str | None = None,
        tp_group: Any = None,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        save_original_input: bool = False,
    ) -> None:
        if parallel_mode == "row":
            raise UserError("LayerNormLinear normalises whole rows; use parallel_mode 'column', or a norm and a Linear")
        self.__dict__["_norm"] = norm = NormOp(self, normalization, eps, zero_centered_gamma, "layer_norm_")
        super().__init__(
            in_features,
            out_features,
            bias=bias,
            return_bias=return_bias,
            parameters_split=parameters_split,
            params_dtype=params_dtype,
            device=device,
            init_method=init_method,
            name=name,
            recipe=recipe,
            parallel_mode=parallel_mode,
            tp_group=tp_group,
            sequence_parallel=sequence_parallel,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            save_original_input=save_original_input,
        )
        self.return_layernorm_output = return_layernorm_output
        norm.make_parameters(self.in_features, params_dtype, device)
        self._ops: tuple[Op, ...] = (norm, MakeExtraOutput(), self) if return_layernorm_output else (norm, self)

    def forward(self, x: Tensor, *, is_first_microbatch: bool | None = None) -> Any:  # type: ignore[override]
        """(*lead, in_features) -> (*lead, out_features), then the bias and the normalised input if asked for."""
        made = run(self._ops, x, (), is_first_microbatch, self.__dict__)
        y, *normalised = made if isinstance(made, tuple) else (made,)
        bias = [self.bias] if self.return_bias else []
        return (y, *bias, *normalised) if bias or normalised else y

    @property
    def pipeline(self) -> tuple[Op, ...] | None:
        more = self.return_bias or self.return_layernorm_output
        return None if more or type(self).forward is not LayerNormLinear.forward else self._ops

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self._norm.reset()

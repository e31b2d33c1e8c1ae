"""MoE: a mixture of experts whose linears are two GroupedLinears."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.modules.fused_module import ModuleGroup
from duotone.modules.routing import Routing
from duotone.ops.activation import ActivationOp
from duotone.ops.sequential import run_modules
from duotone.planned.grouped_linear import GroupedLinear
from duotone.planned.initialisation import materialise
from duotone.planned.planned import below
from duotone.recipes.recipe import RecipeLike


class Router(nn.Module):
    """The k best experts of each token by the softmax of a linear, which stays in high precision."""

    stays_in_high_precision = "the router decides where tokens go, in high precision"

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, dtype=dtype, device=device))
        self._fill()

    def reset_parameters(self) -> None:
        """Normal values with a variance of 1/hidden_size; a parameter on meta comes to the default device first."""
        materialise(self)
        self._fill()

    def _fill(self) -> None:
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(T, hidden_size) -> weights fp32 (T, k), which sum to 1, and experts int64 (T, k), ascending."""
        scores = F.linear(x, self.weight.to(x.dtype)).float().softmax(-1)
        best, index = scores.topk(self.top_k, dim=-1)
        index, by_expert = index.sort(dim=-1)
        best = best.gather(-1, by_expert)
        return best / best.sum(-1, keepdim=True), index


class MoE(ModuleGroup):
    """x (*lead, hidden_size) -> the same shape: each token through its `top_k` of `num_experts` MLPs.

    An expert is fc2(activation(fc1(x))); gated activations make fc1 twice as wide. No token is dropped and no caller
    pads. `fc1` and `fc2` are GroupedLinear modules.
    """

    def __init__(  # noqa: PLR0913 (the field's vocabulary)
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        top_k: int = 2,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        init_method: Callable[[Tensor], object] | None = None,
        name: str = "",
        recipe: RecipeLike | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k is {top_k}; give one from 1 to the {num_experts} experts")
        self.num_experts = num_experts
        self.activation = ActivationOp(activation, activation_params)
        self.router = Router(hidden_size, num_experts, top_k, dtype=params_dtype, device=device)
        options: dict[str, Any] = {
            "bias": bias,
            "params_dtype": params_dtype,
            "device": device,
            "init_method": init_method,
            "recipe": recipe,
        }
        wide = ffn_hidden_size * (2 if self.activation.gated else 1)
        names = below(name, ("fc1", "fc2"))
        self.fc1 = GroupedLinear(num_experts, hidden_size, wide, name=names[0], **options)
        self.fc2 = GroupedLinear(num_experts, ffn_hidden_size, hidden_size, name=names[1], **options)

    def forward(self, x: Tensor, *, is_first_microbatch: bool | None = None) -> Tensor:
        width = self.router.weight.shape[1]
        if x.shape[-1:] != (width,):
            raise UserError(f"MoE takes (..., {width}); got {tuple(x.shape)}: reshape the input")
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat)
        routing = Routing.of(index, self.num_experts)
        known = type(self.router) is Router  # another one's choices are looked at by the host, which refuses strangers
        rows = routing if known else routing.splits
        ops = (self.fc1, self.activation, self.fc2)
        y, _ = run_modules(ops, routing.rows(flat), (rows, rows), is_first_microbatch, self)
        return routing.combine(y, weights).view(x.shape)

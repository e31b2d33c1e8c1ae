"""MoE: a mixture of experts whose linears are two GroupedLinears.

Routing takes tokens to the rows of their experts and back. It gathers both ways, so that sums have one order.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone import formats
from duotone.errors import UserError
from duotone.formats import Format
from duotone.linear.row_counts import Rows
from duotone.modules.activation import ActivationOp
from duotone.modules.expert_exchange import Exchange, by_owner, check_dispatch, experts_of, move
from duotone.modules.fused_module import ModuleGroup
from duotone.modules.grouped_linear import GroupedLinear
from duotone.modules.planned import below
from duotone.modules.sequential import run_modules
from duotone.modules.weights import materialise
from duotone.pipeline.titles import title
from duotone.recipes.recipe import RecipeLike
from duotone.state.autocast_context import active_recipe
from duotone.tensor import Quantizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@dataclass(frozen=True, eq=False)
class Routing(Rows):
    """The rows of (T, k) choices of experts: sorted by expert, and for each choice the number of its row."""

    chosen: Tensor
    order: Tensor
    inverse: Tensor
    choices: int
    experts: int

    @staticmethod
    def of(index: Tensor, experts: int) -> "Routing":
        """From the chosen experts, int64 (T, k)."""
        flat = index.reshape(-1)
        return Routing(flat, *by_owner(flat), index.shape[-1], experts)

    @property
    def total(self) -> int:
        """The number of choices: tokens times k."""
        return self.chosen.numel()

    def count(self) -> Tensor:
        ends = torch.arange(self.experts, device=self.chosen.device)
        before = torch.searchsorted(self.chosen[self.order], ends, right=True)
        return torch.diff(before, prepend=before.new_zeros(1))

    @cached_property
    def counts(self) -> Tensor:
        """The rows of each expert, int64 (E,)."""
        return self.count()

    @property
    def checked(self) -> Tensor | tuple[int, ...]:
        """The rows of each expert, for code on the host that refuses choices of unknown experts."""
        if not torch.compiler.is_dynamo_compiling() and not torch.compiler._is_exporting_flag:
            return self.splits
        strange = (self.chosen < 0) | (self.chosen >= self.experts)
        return self.count().masked_fill(strange.any(), -1).cpu()

    @cached_property
    def splits(self) -> tuple[int, ...]:
        """UserError if a choice is not among the experts."""
        if not self.chosen.numel():
            return (0,) * self.experts
        if self.chosen.is_meta:
            raise UserError("tokens on meta are routed nowhere; move the module and its input to a device")
        counts = tuple(torch.bincount(self.chosen, minlength=self.experts).tolist())
        if len(counts) != self.experts:
            raise UserError(f"a token was routed to expert {len(counts) - 1}; there are {self.experts}, counted from 0")
        return counts

    def rows(self, x: Tensor) -> Tensor:
        """(T, H) -> (T k, H): each token once for each of its experts. The gradient of a token sums over these."""
        return move(
            x,
            lambda tokens: tokens[self.order // self.choices],
            lambda rows: rows[self.inverse].view(-1, self.choices, rows.shape[-1]).sum(1),
        )

    def combine(self, y: Tensor, weights: Tensor) -> Tensor:
        """(T k, H) of the experts and the weights (T, k) of the choices -> (T, H), summed in the order of `weights`."""
        chosen = move(y, lambda rows: rows[self.inverse], lambda choices: choices[self.order])
        parts = (chosen.view(-1, self.choices, y.shape[-1]) * weights.unsqueeze(-1)).to(y.dtype)
        if self.choices == 1:
            return parts.squeeze(1)  # `unbind` gives a view that nobody may write in place
        total, *rest = parts.unbind(1)
        for part in rest:
            total = total + part
        return total


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

    With `ep_group` the ranks share the experts evenly, and each has its own tokens. Tokens go to the ranks of their
    experts as codes and scales of `dispatch_format`. The default is the rowwise format that the recipe gives the input
    of `fc1`. Results return in x's dtype. Checkpoints number the experts of all ranks. No pickle holds the group.

    With `ep_capacity` a rank sends so many rows to each rank: its tokens, then zeros. The host waits for no count.
    Further rows are dropped, and their experts add nothing to the token. A capacity of `top_k` times the most tokens of
    a rank drops nothing.
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
        ep_group: "ProcessGroup | None" = None,
        dispatch_format: str | Format | None = None,
        ep_capacity: int | None = None,
        name: str = "",
        recipe: RecipeLike | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise UserError(f"top_k is {top_k}; give one from 1 to the {num_experts} experts")
        if ep_capacity is not None and ep_capacity < 1:
            raise UserError(f"ep_capacity is {ep_capacity}; give the rows that a rank sends to each rank, one or more")
        self.num_experts = num_experts
        self.activation = ActivationOp(activation, activation_params)
        self.router = Router(hidden_size, num_experts, top_k, dtype=params_dtype, device=device)
        wide = ffn_hidden_size * (2 if self.activation.gated else 1)
        names = below(name, ("fc1", "fc2"))
        self.ep_group = "" if ep_group is None else ep_group.group_name
        self.ep_capacity = ep_capacity
        self.dispatch_format = formats.get(dispatch_format) if isinstance(dispatch_format, str) else dispatch_format
        local = experts_of(ep_group.rank(), ep_group.size(), num_experts) if ep_group else range(num_experts)
        linears = partial(
            GroupedLinear,
            len(local),
            bias=bias,
            params_dtype=params_dtype,
            device=device,
            init_method=init_method,
            recipe=recipe,
        )
        self.fc1 = linears(hidden_size, wide, name=names[0])
        self.fc2 = linears(ffn_hidden_size, hidden_size, name=names[1])
        if ep_group is not None:
            for linear in (self.fc1, self.fc2):
                linear.first_gemm, linear.all_gemms = local.start, num_experts

    def set_expert_parallel_group(self, ep_group: "ProcessGroup") -> None:
        """Communicate in another group of the same size from the next forward on."""
        if experts_of(ep_group.rank(), ep_group.size(), self.num_experts).start != self.fc1.first_gemm:
            raise UserError("ep_group gives this rank other experts than it has; build the module anew")
        self.ep_group = ep_group.group_name

    def forward(self, x: Tensor, *, is_first_microbatch: bool | Tensor | None = None) -> Tensor:
        """x (*lead, hidden_size) -> the same shape and dtype. UserError for another width."""
        width = self.router.weight.shape[1]
        if x.shape[-1:] != (width,):
            raise UserError(f"{title(self)} takes (..., {width}); got {tuple(x.shape)}: reshape the input")
        flat = x.reshape(-1, x.shape[-1])
        weights, index = self.router(flat)
        routing = Routing.of(index, self.num_experts)
        is_ours = type(self.router) is Router  # the host checks the choices of other routers
        rows = routing if is_ours else routing.checked
        tokens, ops = routing.rows(flat), (self.fc1, self.activation, self.fc2)
        if not self.fc1.all_gemms:
            y, _ = run_modules(ops, tokens, (rows, rows), is_first_microbatch, self)
            return routing.combine(y, weights).view(x.shape)
        counts = routing.count() if is_ours else torch.tensor(routing.splits, device=x.device)
        if self.ep_capacity is None:
            exchange = Exchange.of(counts, self.ep_group)
        else:
            ranks = self.num_experts // self.fc1.num_gemms
            exchange = Exchange.within(self.ep_capacity, counts, routing.total, self.ep_group, ranks)
        quantizer = self.token_quantizer()
        self.fc1.plans.require_same_formats((quantizer,), tokens.device.type, self.ep_group)
        sent = exchange.dispatch(tokens, quantizer)
        y, _ = run_modules(ops, sent, (exchange, exchange), is_first_microbatch, self)
        return routing.combine(exchange.combine(y), weights).view(x.shape)

    def token_quantizer(self) -> Quantizer:
        """The quantizer for tokens that are sent to their experts. UserError if it cannot encode them."""
        if self.dispatch_format is not None:
            return check_dispatch(Quantizer(self.dispatch_format), self.fc1)
        plan = self.fc1.plans.plan(active_recipe() or self.fc1.recipe)
        return check_dispatch(plan.input.quantizer, self.fc1)

    def __getstate__(self) -> dict[str, object]:
        return {**super().__getstate__(), "ep_group": ""}

    def __deepcopy__(self, memo: dict[int, object]) -> "MoE":
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

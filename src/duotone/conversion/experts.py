"""Experts of other libraries, held as 3-D parameters, as grouped linears under plans.

Transformers' classes agree on a contract: `gate_up_proj` (E, 2I, H) or `up_proj` (E, I, H), and `down_proj` (E, H, I).
Flags say whether they are transposed and have a `<name>_bias`. There is `_apply_gate(h)` or `act_fn`, and
`forward(hidden_states, top_k_index, top_k_weights)`. Torchtitan has gate, up and down projections as `w1_EFD`
(E, F, D), `w3_EFD` and `w2_EDF` (E, D, F). A converted module keeps its parameters and its state_dict.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from duotone.conversion import forwards
from duotone.errors import UserError
from duotone.modules.delayed_states import start_anew
from duotone.modules.moe import Routing
from duotone.modules.planned_group import PlannedGroup
from duotone.modules.weights import mark_entries
from duotone.pipeline.titles import title
from duotone.recipes.roles import Site
from duotone.sharding.dtensors import is_distributed
from duotone.tensor import QuantizedTensor

PREFIX = "planned_"
GROUPED = ("w1_EFD", "w3_EFD", "w2_EDF")
"""The parameters of torchtitan's experts: gate, up, down."""


class ExpertsLinear(PlannedGroup, nn.Module):
    """The linears of all experts over one 3-D parameter of the module that owns it."""

    def __init__(self, owner: nn.Module, parameter: str) -> None:
        super().__init__()
        self.__dict__["_owner"] = owner
        self.parameter, self.transposed = parameter, bool(getattr(owner, "is_transposed", False))
        self.num_gemms = self.whole.shape[0]

    def take_name(self, name: str, site: Site) -> None:
        super().take_name(name.replace(PREFIX, ""), site)

    @property
    def whole(self) -> nn.Parameter:
        """The parameter, (E, out, in), or (E, in, out) where `transposed`."""
        return getattr(self._owner, self.parameter)

    @property
    def weight(self) -> nn.Parameter:
        """The parameter of all experts, as torch's linears name it."""
        return self.whole

    @property
    def weight_parameters(self) -> tuple[nn.Parameter, ...]:
        return (self.whole,)

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        whole = self.whole
        if torch.compiler.is_dynamo_compiling():  # torch 2.11 traces no requires_grad_
            return tuple(self._members(whole))  # type: ignore[return-value]
        members = tuple(self._members(whole.detach()))
        return tuple(w.requires_grad_(whole.requires_grad) for w in members)  # type: ignore[return-value]

    def whole_weights(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        return self._members(self.whole)

    @property
    def biases(self) -> tuple[Tensor | None, ...]:
        if not getattr(self._owner, "has_bias", False):
            return (None,) * self.num_gemms
        return tuple(getattr(self._owner, f"{self.parameter}_bias").unbind(0))

    def refuse_held(self, weight: nn.Parameter) -> None:
        if isinstance(weight, QuantizedTensor) and self.transposed:
            raise UserError(f"{title(self)}: a transposed parameter of experts cannot be held quantized; keep it")
        super().refuse_held(weight)

    def _members(self, whole: Tensor) -> Sequence[Tensor]:
        return (whole.transpose(1, 2) if self.transposed else whole).unbind(0)


class PlannedExperts:
    """A mixin before a class of experts. The linears follow plans. Everything else is the work of the class."""

    def forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """(T, H), experts (T, k) and their weights (T, k) -> (T, H)."""
        index, by_expert = top_k_index.sort(dim=-1)  # sums go by expert, as in a loop over the experts
        routing = Routing.of(index, self.num_experts)
        up, down = (getattr(self, f"{PREFIX}{name}") for name in linear_names(self))
        h = up(routing.rows(hidden_states), routing.checked)
        h = self._apply_gate(h) if self.has_gate else self.act_fn(h)
        y = down(h, routing.checked)
        return routing.combine(y, top_k_weights.gather(-1, by_expert)).to(hidden_states.dtype)

    def _load_from_state_dict(self: Any, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        for name in linear_names(self):  # torch shows the linears no keys of this module
            linear = getattr(self, f"{PREFIX}{name}")
            start_anew(linear, state_dict, f"{prefix}{PREFIX}{name}.", {prefix + name: linear.whole})
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def _save_to_state_dict(self: Any, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)  # type: ignore[misc]
        mark_entries(destination, prefix, linear_names(self))


class PlannedGroupedExperts(PlannedExperts):
    """For the grouped experts of torchtitan, whose rows come sorted by expert."""

    def forward(self: Any, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        """(R, D) and the rows of each expert, int (E,) -> (R, D). Products are in bf16, as in the original."""
        if is_distributed(self.w1_EFD):
            raise UserError("experts of torchtitan that are spread over ranks cannot follow a recipe; exclude them")
        gate, up, down = (getattr(self, f"{PREFIX}{name}") for name in GROUPED)
        splits = num_tokens_per_expert_E
        with torch.autocast(x_RD.device.type, torch.bfloat16):
            h = F.silu(gate(x_RD, splits)) * up(x_RD, splits)
            return down(h, splits).type_as(x_RD)


def linear_names(module: nn.Module) -> tuple[str, ...]:
    """The names of the parameters of an experts module that hold its linears."""
    if GROUPED[0] in module._parameters:
        return GROUPED
    return ("gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"), "down_proj"


def holds_experts(module: nn.Module) -> bool:
    """Whether a module holds the weights of several linears in 3-D parameters."""
    parameters = module.named_parameters(recurse=False)
    return any(
        ("proj" in name or name in GROUPED) and not is_lazy(weight) and weight.dim() == 3 for name, weight in parameters
    )


def reason_skipped(module: nn.Module) -> str:
    """Why experts stay as they are, or "" if they can be converted."""
    names = linear_names(module)
    if names == GROUPED:
        kind = type(module)
        return "" if kind.forward.__qualname__ == "GroupedExperts.forward" else f"{kind.__name__} has another forward"
    flags = ("has_gate", "has_bias", "is_transposed", "num_experts")
    if not all(hasattr(module, flag) for flag in flags) or not all(name in module._parameters for name in names):
        return "its 3-D parameters are laid out in a way of its own"
    if getattr(module, "has_post_expert_norm", False):
        return "each expert ends with a norm of its own"
    if getattr(module, "_is_expert_parallel", False):
        return "its experts are spread over ranks"
    if not hasattr(module, "_apply_gate" if module.has_gate else "act_fn"):
        return "its activation cannot be called by itself"
    return ""


def adopt_experts(module: nn.Module) -> dict[str, ExpertsLinear]:
    """Change the class of an experts module. Returns its linears, which have no recipe yet, by their parameter."""
    modules = module._modules
    if not issubclass(type(module), PlannedExperts):
        mixin = PlannedGroupedExperts if linear_names(module) == GROUPED else PlannedExperts
        forwards.change_class(module, forwards.planned_class(mixin, type(module)))
    linears = {
        name: modules.setdefault(f"{PREFIX}{name}", ExpertsLinear(module, name)) for name in linear_names(module)
    }
    return linears  # type: ignore[return-value]


def release_experts(module: nn.Module) -> None:
    """Undo `adopt_experts`."""
    for name in linear_names(module):
        module._modules.pop(f"{PREFIX}{name}", None)
    forwards.change_class(module, type(module).__bases__[1])

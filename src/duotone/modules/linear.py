"""Linear: nn.Linear whose three GEMMs follow a plan."""

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear import LinearPlan, Setting, build_plan, linear
from duotone.recipes.recipe import Recipe
from duotone.recipes.rules import Rule
from duotone.state import seeds
from duotone.state.autocast import HIGH_PRECISION, active_recipe


class PlannedLinear:
    """What makes an nn.Linear follow plans. Mixed in before nn.Linear or a subclass without a forward of its own.

    Parameters, their names and the state_dict stay nn.Linear's. `recipe` applies where no autocast encloses the call;
    `rules` go before any recipe.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    recipe: Recipe
    rules: tuple[Rule, ...]
    module_name: str
    _plans: dict[tuple[object, ...], LinearPlan]
    _last: tuple[tuple[object, ...], LinearPlan] | None

    def adopt(self, recipe: Recipe, rules: tuple[Rule, ...], name: str) -> None:
        """Take a recipe, rules and a full name; keeps the seed where there is one already."""
        self.recipe, self.rules, self.module_name = recipe, rules, name
        self._plans, self._last = {}, None
        if seeds.BUFFER not in self._buffers:  # type: ignore[attr-defined]
            with torch.inference_mode(False):  # an inference tensor could not advance in training
                seed = seeds.initial_seed(name).to(self.weight.device)
            self.register_buffer(seeds.BUFFER, seed, persistent=False)  # type: ignore[attr-defined]

    def setting(
        self, recipe: Recipe, device: str, dtype: torch.dtype, grads: tuple[bool, bool] = (True, True)
    ) -> Setting:
        """What decides this module's plan under a recipe."""
        return Setting(recipe, self.rules, self.module_name, "linear", device, dtype, *grads)

    def plan_for(self, x: Tensor, weight: Tensor) -> LinearPlan:
        """The plan of a call; built once per recipe, dtype, device and pattern of gradients."""
        recipe = active_recipe() or self.recipe
        tracked = torch.is_grad_enabled()
        grads = (tracked and x.requires_grad, tracked and weight.requires_grad)
        last = self._last
        if last is not None:
            key = last[0]
            if key[0] is recipe and key[1] == grads and key[2] is x.dtype and key[3] == x.device.type:
                return last[1]
        key = (recipe, grads, x.dtype, x.device.type)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = build_plan(self.setting(recipe, x.device.type, x.dtype, grads))
        self._last = (key, plan)
        return plan

    def forward(self, x: Tensor) -> Tensor:
        """(*lead, in_features) -> (*lead, out_features)."""
        weight, bias = self.weight, self.bias
        if torch.is_autocast_enabled(x.device.type):
            dtype = torch.get_autocast_dtype(x.device.type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype is not weight.dtype or x.dim() == 0 or x.shape[-1] != weight.shape[1]:
            raise UserError(
                f"{self.module_name or 'Linear'} takes (..., {weight.shape[1]}) in {weight.dtype}; "
                f"got {tuple(x.shape)} in {x.dtype}: cast or reshape the input"
            )
        plan = self.plan_for(x, weight)
        seed = seeds.take(getattr(self, seeds.BUFFER), plan.seeds) if plan.seeds else None
        return linear(plan, x, weight, bias, seed)


class Linear(PlannedLinear, nn.Linear):
    """nn.Linear with a recipe. Arguments after the sizes are keyword-only; without a recipe, autocast alone quantizes.

    `params_dtype` is torch's default dtype where None, `device` its default device.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        name: str = "",
        recipe: Recipe | None = None,
    ) -> None:
        nn.Linear.__init__(self, in_features, out_features, bias=bias, device=device, dtype=params_dtype)
        self.adopt(recipe or HIGH_PRECISION, (), name)

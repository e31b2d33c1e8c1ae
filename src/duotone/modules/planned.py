"""Planned: what every module that follows plans has in common, mixed in before an nn.Module."""

import copy
import warnings
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from duotone.formats import IDENTITY
from duotone.linear.layout import WHOLE, Layout
from duotone.linear.operand import DEQUANTIZED, HELD
from duotone.linear.plan import LinearPlan, Setting, ask_recipe, build_plan
from duotone.modules import states, traced
from duotone.modules.parameters import demand, follow, moved
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site
from duotone.recipes.rules import Rule
from duotone.state import seeds
from duotone.state.autocast import Region, active_region
from duotone.state.delayed import DEFER, RECORD, USE, in_backward, mode_now
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import QuantizeContext

UNNAMED = Site(named=False)
LIVE = ("_plans", "_last", "_given", "_region")
OWN = ("recipe", "rules", "module_name", "site", "layout", "_roles", "_number", "_saved", "_warned", *LIVE)
"""Attributes that `adopt` gives and `release` takes away."""


class Planned:
    """`recipe` applies where no autocast encloses the call; `rules` go before any recipe.

    `module_name` is the full name in the model, `Layer_<n>` where nobody gave one; `site` is where rules find the
    module. Delayed-scaling states are submodules, there only while a recipe needs them.
    """

    module_type: ClassVar[str]
    weight: nn.Parameter
    training: bool
    recipe: Recipe
    rules: tuple[Rule, ...]
    module_name: str
    site: Site
    layout: Layout
    _buffers: dict[str, Tensor | None]
    _parameters: dict[str, nn.Parameter | None]
    _modules: dict[str, nn.Module | None]
    _plans: dict[Any, LinearPlan]
    _last: tuple[Any, LinearPlan] | None
    _given: dict[str, dict[str, Quantizer]]
    _region: tuple[Region | None] | None
    """Where the newest forward that a backward may follow ran: recomputes do not look at the autocast stack."""
    _saved: dict[str, Any]
    """Delayed-scaling states from a checkpoint that no recipe has asked for yet."""
    _warned: bool
    _roles: tuple[QuantizerRole | None, QuantizerRole | None]
    _number: str

    def adopt(
        self,
        recipe: Recipe,
        rules: tuple[Rule, ...],
        name: str = "",
        site: Site | None = None,
        given: dict[str, Quantizer] | None = None,
    ) -> None:
        """Take a recipe, rules and a place; keeps the seed where there is one already.

        `given` is what the recipe gave the slots, where it was asked already.
        """
        self._register()
        self.recipe, self.rules = recipe, rules
        self.layout = getattr(self, "layout", WHOLE)
        self._roles = getattr(self, "_roles", (None, None))
        self.take_name(name or f"Layer_{self._number}", site or (ANYWHERE if name else UNNAMED))
        if seeds.BUFFER not in self._buffers:
            with torch.inference_mode(False):  # an inference tensor could not advance in training
                seed = seeds.initial_seed(self.module_name).to(self.weight.device)
            self.register_buffer(seeds.BUFFER, seed, persistent=False)  # type: ignore[attr-defined]
        states.drop(self)
        self._saved, self._warned = {}, False
        if given is not None:
            self._given[recipe.key] = given

    def release(self) -> None:
        """Give up everything that `adopt` and plans added."""
        for attribute in OWN:
            self.__dict__.pop(attribute, None)
        self._buffers.pop(seeds.BUFFER, None)
        states.drop(self)

    def take_name(self, name: str, site: Site) -> None:
        """The full name in the model, and where rules find the module."""
        self.module_name, self.site = name, site
        self.forget_plans()

    def forget_plans(self) -> None:
        """Build plans anew at the next call, in compiled code too: its constants go by the module's number."""
        self._plans, self._last, self._given, self._region = {}, None, {}, None
        self._register()

    def _register(self) -> None:
        self._number = traced.register(self, self.__dict__.get("_number"))

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """The role of the output at its consumer; a change takes effect at the next forward."""
        return self._roles[0]

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_roles(role, self._roles[1])

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The role of the gradient of the input at its consumer."""
        return self._roles[1]

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_roles(self._roles[0], role)

    def _set_roles(self, *roles: QuantizerRole | None) -> None:
        if roles != self._roles:
            self._roles = (roles[0], roles[1])
            self.forget_plans()

    def get_quantizer_roles(self) -> dict[str, QuantizerRole | None]:
        """Every quantizer slot with its role, forward slots first."""
        return self.setting(self.recipe, self.weight.device.type, self.weight.dtype).slots

    def setting(
        self,
        recipe: Recipe,
        device: str,
        dtype: torch.dtype,
        grads: tuple[bool, bool] = (True, True),
        input_held: Quantizer | None = None,
    ) -> Setting:
        """What decides this module's plan under a recipe."""
        return Setting(
            recipe,
            self.rules,
            self.module_name,
            self.module_type,
            device,
            dtype,
            *grads,
            site=self.site,
            layout=self.layout,
            weight_held=held(self.weight),
            input_held=input_held,
            output_role=self._roles[0],
            grad_input_role=self._roles[1],
        )

    def plan_for(self, x: Tensor, weight: Tensor) -> LinearPlan:
        """The plan of a call; built once per recipe, dtype, device and pattern of gradients."""
        compiling, tracked = torch.compiler.is_compiling(), torch.is_grad_enabled()
        mode = USE if compiling else mode_now()
        region = active_region() if compiling else self._region_of_call(mode)
        recipe, group = (self.recipe, "") if region is None else (region.recipe, region.group)
        if recipe.evaluation is not None and not self.training:
            recipe = recipe.evaluation
        grads = (tracked and x.requires_grad, tracked and weight.requires_grad)
        if compiling:
            where = (x.device.type, str(x.dtype), group)
            return getattr(traced.PLANS, traced.plan_name(self._number, recipe.key, *grads, tracked, *where))
        key = (recipe.key, grads, mode, x.dtype, x.device.type, group, held(x), held(weight))
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        plan = self._plans.get(key)
        if plan is None:
            plan = self.resolve(recipe, (x.device.type, x.dtype, grads, held(x)), group, mode)
            self._plans[key] = plan
        self._take_up(plan, mode)
        self._last = (key, plan)
        return plan

    def _region_of_call(self, mode: int) -> Region | None:
        if in_backward() and self._region is not None:
            return self._region[0]
        region = active_region()
        if mode != USE and (self._region is None or self._region[0] is not region):
            self._region = (region,)
        return region

    def _take_up(self, plan: LinearPlan, mode: int) -> None:
        """What changes when calls switch to a plan: the states, and what is written into a quantized weight next."""
        if plan.is_delayed and mode != USE:
            states.states_for(self, plan)  # another recipe may have given the states other parameters since
        if not isinstance(self.weight, QuantizedTensor):
            return
        if plan.weight_from is DEQUANTIZED and not self._warned:
            self._warned = True
            message = f"{self.module_name}: the weight is held quantized and computes here in high precision"
            warnings.warn(f"{message}; its values are dequantized in every forward", stacklevel=5)
        if plan.weight_from is HELD:
            demand(self.weight, plan.weight_usage, self.module_name)
            if mode != USE:
                follow(self.weight, plan.weight)

    def plan_of(self, recipe: Recipe, device: str, dtype: torch.dtype, *call: Any) -> LinearPlan:
        """The plan under a recipe, whose factory is asked once per slot and never again."""
        setting = self.setting(recipe, device, dtype, *call)
        if recipe.key not in self._given:
            self._given[recipe.key] = ask_recipe(setting)
        return build_plan(setting, self._given[recipe.key])

    def resolve(self, recipe: Recipe, call: tuple[Any, ...], group: str = "", mode: int = USE) -> LinearPlan:
        """Build the plan of a call (device, dtype, grads, input held), with the states that delayed scaling needs."""
        plan = self._bind(recipe, call, group, mode)
        if plan.is_delayed:
            states.require_reduction(self.module_name, plan, group)
        return plan

    def _bind(self, recipe: Recipe, call: tuple[Any, ...], group: str = "", mode: int = USE) -> LinearPlan:
        plan = self.plan_of(recipe, *call)
        if mode == DEFER:  # its recompute takes the seeds of a forward with gradients
            plan = replace(plan, seeds=sum(plan.stochastic))
        if plan.is_delayed:
            numbers = states.states_for(self, plan)
            plan = plan.with_slots(*numbers, group, mode)
            if isinstance(self.weight, QuantizedTensor):
                slots = plan.with_slots(*numbers, group, RECORD).weight_context.slots
                self.weight.context = QuantizeContext(self.weight.context.shard, slots)
        return plan

    def prepare(self, recipe: Recipe) -> None:
        """Make the states that delayed scaling under the recipe needs, so that checkpoints find them."""
        self._bind(recipe, (self.weight.device.type, self.weight.dtype, (True, True), None))

    def calibrate(self, region: Region, x: Tensor, weight: Tensor) -> None:
        """Record the amaxes that delayed scaling under the region's calibrated recipe would; recomputes do not."""
        assert region.calibrating is not None
        if in_backward():
            return
        key = ("calibrating", region.calibrating.key, x.dtype, x.device.type, region.group, held(weight))
        plan = self._plans.get(key)
        if plan is None:
            call = (x.device.type, x.dtype, (False, False), None)
            self._plans[key] = plan = self.resolve(region.calibrating, call, region.group, RECORD)
        if plan.is_delayed:
            states.states_for(self, plan)
            states.record(plan.input_context, x)
            states.record(plan.weight_context, weight)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """As nn.Module, but quantized parameters only change device and nominal dtype, and seeds are made for good."""
        seed = self._buffers.get(seeds.BUFFER)
        held = {name: p for name, p in self._parameters.items() if isinstance(p, QuantizedTensor)}
        for name in held:
            self._parameters[name] = None
        try:
            super()._apply(fn, recurse)  # type: ignore[misc]
        finally:
            self._parameters.update(held)  # type: ignore[arg-type]
        for parameter in held.values():
            moved(parameter, fn)
        fresh = self._buffers.get(seeds.BUFFER)
        if seed is not None and seed.is_meta and fresh is not None and not fresh.is_meta:
            fresh.copy_(seeds.initial_seed(self.module_name))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Delayed-scaling states that the module does not have wait for a recipe that needs them."""
        self._saved.update(states.set_aside(self, state_dict, prefix))  # type: ignore[arg-type]
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        # Plans name states of this process, and a group by its name could be another one elsewhere.
        unbound = type(self.layout)("", self.layout.sequence_parallel)
        return {**self.__dict__, "_plans": {}, "_last": None, "_given": {}, "_region": None, "layout": unbound}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__({**state, "_number": None})  # type: ignore[misc]
        self._register()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        made.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        made.layout = self.layout
        return made


def holds_codes(x: Tensor) -> bool:
    """Whether every plane of a quantized tensor is codes, and none the values in a dtype of their own."""
    if type(x) is Tensor or not isinstance(x, QuantizedTensor):
        return False
    return all(plane is None or plane.format != IDENTITY for plane in x.planes)


def held(x: Tensor) -> Quantizer | None:
    """The quantizer of a quantized tensor, in the formats that it really holds."""
    if type(x) is Tensor or not isinstance(x, QuantizedTensor):
        return None
    row, col = x.planes
    made = x.quantizer
    if (row is None or made.rowwise == row.format) and (col is None or made.columnwise == col.format):
        return made
    return Quantizer(row.format if row else made.rowwise, col.format if col else made.columnwise)

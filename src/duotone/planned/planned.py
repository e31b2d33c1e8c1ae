"""Planned: what every module that follows plans has in common, mixed in before an nn.Module."""

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear.core import Calibrating, LinearStage, record
from duotone.linear.layout import WHOLE, Layout
from duotone.linear.plan import GemmPlan, LinearPlan, PlanRequest, ask_recipe, build_plan
from duotone.linear.plane_source import DEQUANTIZE_HELD, USE_HELD
from duotone.pipeline.op import Op, TensorInfo, held, region_of_call, signal_of
from duotone.pipeline.slot_roles import BoundaryRoles
from duotone.pipeline.stage import Stage
from duotone.planned import delayed_states, weight_options
from duotone.planned.quantized_parameters import demand, drop_empty_extra_state, follow, moved, quantized_parameter
from duotone.planned.sharded_parameters import ShardedParameters
from duotone.planned.split_parameters import is_split
from duotone.recipes.recipe import Recipe, drop_dead, require_recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, QuantizerRole, Site
from duotone.recipes.rules import Rule
from duotone.state import seeds, traced_stages
from duotone.state.amax_mode import AmaxMode, in_backward, mode_now
from duotone.state.autocast_context import DEFAULT_RECIPE, HIGH_PRECISION, AutocastRegion, active_region
from duotone.state.parameters import construction
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.fsdp import tell_shards

Call = tuple[Any, ...]
CACHES = ("_caches", "_queues", "_wgrad_hooks")
UNNAMED = Site(named=False)
LIVE = ("_stages", "_variants", "_rewritten", "_last", "_given", "_region", seeds.LOADED, seeds.RESTORED)
OWN = ("recipe", "rules", "module_name", "site", "layout", "_roles", "_number", "_saved", "_warned", *LIVE)
"""Attributes that `adopt` gives and `release` takes away."""


_UNNAMED = itertools.count(1)


def below(name: str, parts: Sequence[str]) -> list[str]:
    """Names of the children of a module; one without a name counts as `Layer_<n>` there, so that they stay distinct."""
    base = name or f"Layer_{next(_UNNAMED)}"
    return [f"{base}.{part}" for part in parts]


class Planned(BoundaryRoles, ShardedParameters, Op):
    """`recipe` applies where no autocast encloses the call; `rules` go before any recipe.

    `module_name` is the full name in the model, `Layer_<n>` where nobody gave one; `site` is where rules find the
    module. Delayed-scaling states are submodules, there only while a recipe needs them.
    """

    module_type: ClassVar[str]
    fuse_wgrad_accumulation = delay_wgrad_compute = save_original_input = False
    num_gemms = 1
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
    _stages: dict[Any, Stage]
    _last: tuple[Any, Stage] | None
    _variants: dict[Any, Stage]
    """Stages whose weights are cached or whose gradients go elsewhere, by the stage as it was built."""
    _given: dict[str, dict[str, Quantizer]]
    _region: tuple[AutocastRegion | None] | None
    """Where the newest forward that a backward may follow ran: recomputes do not look at the autocast stack."""
    _saved: dict[str, Any]
    """Delayed-scaling states from a checkpoint that no recipe has asked for yet."""
    _warned: bool
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
        require_recipe(type(self).__name__, recipe)
        self._register()
        self.recipe, self.rules = recipe, rules
        self.layout = getattr(self, "layout", WHOLE)
        self._roles = getattr(self, "_roles", (None, None))
        self.take_name(name or f"Layer_{self._number}", site or (ANYWHERE if name else UNNAMED))
        if seeds.BUFFER not in self._buffers:
            with torch.inference_mode(False):  # an inference tensor could not advance in training
                seed = seeds.initial_seed(self.module_name).to(self.weight.device)
            self.register_buffer(seeds.BUFFER, seed, persistent=False)  # type: ignore[attr-defined]
        delayed_states.drop(self)
        self._saved, self._warned = {}, False
        if given is not None:
            self._given[recipe.key] = given

    def release(self) -> None:
        """Give up everything that `adopt` and plans added."""
        for attribute in (*OWN, *CACHES):
            self.__dict__.pop(attribute, None)
        self._buffers.pop(seeds.BUFFER, None)
        delayed_states.drop(self)

    def take_name(self, name: str, site: Site) -> None:
        """The full name in the model, and where rules find the module."""
        self.module_name, self.site = name, site
        self.forget_plans()

    def forget_plans(self) -> None:
        """Build plans anew at the next call, in compiled code too: its constants go by the module's number."""
        self._stages, self._variants, self._rewritten, self._given = {}, {}, {}, {}
        self._last = self._region = None
        self._register()

    def _register(self) -> None:
        self._number = traced_stages.register(self, self.__dict__.get("_number"))

    def roles_changed(self) -> None:
        self.forget_plans()

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        slots = self.setting(self.recipe, str(self.weight.device), self.weight.dtype).slots
        return {slot: slots[slot] for slot in SLOTS[mode]}

    def setting(
        self,
        recipe: Recipe,
        device: str,
        dtype: torch.dtype,
        grads: tuple[bool, bool] = (True, True),
        input_held: Quantizer | None = None,
    ) -> PlanRequest:
        """What decides this module's plan under a recipe."""
        weight = self.weights[0]
        return PlanRequest(
            recipe,
            self.rules,
            self.module_name,
            self.module_type,
            device,
            dtype,
            *grads,
            site=self.site,
            layout=self.layout,
            weight_held=self.weight_held,
            input_held=input_held,
            output_role=self._roles[0],
            grad_input_role=self._roles[1],
            save_original_input=self.save_original_input,
            weight_shape=weight.shape,
            weight_dtype=weight.dtype,
            linears=self.num_gemms,
        )

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weight of each linear that this module is."""
        return (self.weight,)

    def weight_owners(self, member: int) -> tuple[nn.Parameter, ...]:
        """The parameters that the weight of a linear is, or is part of, or is made of."""
        return (self.weights[member],)

    @property
    def weight_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that hold the weights: one each, or one for all."""
        return self.weights

    @property
    def weight_held(self) -> Quantizer | None:
        """The quantizer of weights that are quantized tensors."""
        return held(self.weights[0])

    def plan_for(self, x: Tensor) -> LinearPlan:
        """The plan that a call with `x` would follow now."""
        stage: Any = self.stage_for(signal_of(x))
        return stage.plan

    def stage_for(self, signal: TensorInfo) -> Stage:
        """The stage of a call; built once per recipe, dtype, device and pattern of gradients."""
        compiling, tracked = torch.compiler.is_compiling(), torch.is_grad_enabled()
        mode = AmaxMode.USE if compiling else mode_now()
        region = active_region() if compiling else region_of_call(self, mode)
        recipe, group = (self.recipe, "") if region is None else (region.recipe, region.group)
        if recipe.evaluation is not None and not self.training:
            recipe = recipe.evaluation
        weights = self.weights
        grads = (tracked and signal.requires_grad, tracked and any([w.requires_grad for w in weights]))
        if compiling:
            where = (signal.place, str(signal.dtype), group)
            name = traced_stages.plan_name(self._number, recipe.key, *grads, tracked, *where)
            return getattr(traced_stages.PLANS, name)
        recorded = None
        if region is not None and region.calibrating is not None and not in_backward():
            recorded = region.calibrating
        key = (recipe.key, grads, mode, *signal[:2], signal.index, group, signal.held, self.weight_held, recorded)
        last = self._last
        if last is not None and last[0] == key:
            return last[1]
        stage = self._stages.get(key)
        if stage is None:
            stage = self.resolve(recipe, (signal.place, signal.dtype, grads, signal.held), group, mode, recorded)
            self._drop_dead_plans()
            self._stages[key] = stage
        self._take_up(stage, mode)
        self._last = (key, stage)
        return stage

    def _drop_dead_plans(self) -> None:
        """Forget the plans of recipes that no call can name any more: a program may make a recipe for each step."""
        drop_dead(self._stages)
        drop_dead(self._given)
        live = {id(stage) for stage in self._stages.values()}
        self._variants = {key: made for key, made in self._variants.items() if id(key[0]) in live}

    def _take_up(self, stage: Any, mode: AmaxMode) -> None:
        """What changes when calls switch to a plan: the states, and what is written into a quantized weight next."""
        plan: LinearPlan = stage.plan
        if plan.is_delayed and mode is not AmaxMode.USE:
            delayed_states.states_for(self, plan)  # another recipe may have given the states other parameters since
        for weight in self.weights:
            if not isinstance(weight, QuantizedTensor):
                return
            if plan.weight.source is DEQUANTIZE_HELD and not self._warned:
                self._warned = True
                message = f"{self.module_name}: the weight is held quantized and computes here in high precision"
                warnings.warn(f"{message}; its values are dequantized in every forward", stacklevel=7)
            if plan.weight.source is USE_HELD:
                demand(weight, plan.weight.usage, self.module_name)
                if mode is not AmaxMode.USE:
                    follow(weight, plan.weight.quantizer)

    def quantize_weights(self) -> None:
        """Inside of `quantized_model_init`, keep planes of the weights only."""
        region = construction()
        if region is None or not region.enabled:
            return
        if is_split(self):
            remedy = "use one (attention: fuse_qkv_params=True)"
            raise UserError(f"{self.module_name}: parameters_split excludes quantized_model_init; {remedy}")
        recipe = region.recipe or (DEFAULT_RECIPE if self.recipe == HIGH_PRECISION else self.recipe)
        quantizer = self.plan_of(recipe, str(self.weight.device), self.weight.dtype).weight.quantizer
        self.recipe = recipe if self.recipe == HIGH_PRECISION else self.recipe
        if quantizer.rowwise == quantizer.columnwise == IDENTITY:
            return
        keep = region.preserve_high_precision_init_val
        old = {id(weight): weight.detach() for weight in self.weight_parameters}
        for name, weight in list(self.named_parameters(recurse=False)):  # type: ignore[attr-defined]
            if id(weight) in old:
                made = quantized_parameter(weight, quantizer, preserve=keep)
                self.refuse_held(made)
                setattr(self, name, made)
        if any(quantizer.delayed):
            self.prepare(recipe)
            for weight, value in zip(self.weight_parameters, old.values(), strict=True):
                assert isinstance(weight, QuantizedTensor)
                record(weight.context, value)

    def refuse_held(self, weight: nn.Parameter) -> None:
        """UserError where this module cannot hold the weight in those planes."""

    def plan_of(self, recipe: Recipe, device: str, dtype: torch.dtype, *call: Any) -> LinearPlan:
        """The plan under a recipe, whose factory is asked once per slot and never again."""
        setting = self.setting(recipe, device, dtype, *call)
        if recipe.key not in self._given:
            self._given[recipe.key] = ask_recipe(setting)
        return build_plan(setting, self._given[recipe.key])

    def kernel_of(self, plan: LinearPlan, gemm: GemmPlan) -> str:
        """The name of what multiplies in this module where `gemm` is one of the plan's."""
        return gemm.rule.name

    def resolve(
        self, recipe: Recipe, call: Call, group: str = "", mode: AmaxMode = AmaxMode.USE, recorded: Recipe | None = None
    ) -> Stage:
        """The stage of a call (device, dtype, grads, input held), with the states that delayed scaling needs.

        `recorded` is the recipe whose delayed scales the call calibrates.
        """
        self.require_whole(self.weights)
        plans = self._bind(recipe, call, group, mode)
        seeds.warn_of_load(self, plans[0].seeds)
        if plans[0].is_delayed:
            delayed_states.require_reduction(self.module_name, plans[0], group)
        if recorded is None:
            return self.make_stage([LinearStage(plan) for plan in plans])
        calibrated = self._bind(recorded, (*call[:2], (False, False), None), group, AmaxMode.RECORD)
        if calibrated[0].is_delayed:
            delayed_states.require_reduction(self.module_name, calibrated[0], group)
        pairs = zip(plans, calibrated, strict=True)
        return self.make_stage([Calibrating(plan, recording=other) for plan, other in pairs])

    def invalidate_weight_cache(self) -> None:
        """Encode the weights anew at the next microbatch: for writes through `.data`, which leave no version."""
        weight_options.clear_caches(self)

    def backward_dw(self) -> None:
        """The oldest weight gradients that backward put off: computed, and added to `.grad` or `main_grad`."""
        weight_options.backward_dw(self)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook` after each `backward_dw`: autograd's own hooks on the weights do not fire for it."""
        self.__dict__.setdefault("_wgrad_hooks", []).append(hook)

    def make_stage(self, linears: list[LinearStage]) -> Stage:
        """One stage out of the stages of this module's linears."""
        return linears[0]

    def _bind(self, recipe: Recipe, call: Call, group: str = "", mode: AmaxMode = AmaxMode.USE) -> list[LinearPlan]:
        plan, members = self.plan_of(recipe, *call), range(len(self.weights))
        if mode is AmaxMode.DEFER:  # its recompute takes the seeds of a forward with gradients
            plan = replace(plan, seeds=sum(operand.stream is not None for operand in plan.operands.values()))
        if not plan.is_delayed:
            return [plan for _ in members]
        numbers = delayed_states.states_for(self, plan)
        for member, weight in enumerate(self.weights):
            if isinstance(weight, QuantizedTensor):
                slots = plan.with_slots(*numbers, group, AmaxMode.RECORD, member).weight.context.slots
                weight.context = QuantizeContext(weight.context.shard, slots, propagate=recipe.propagate_nonfinite)
        return [plan.with_slots(*numbers, group, mode, member) for member in members]

    def prepare(self, recipe: Recipe) -> None:
        """Make the states that delayed scaling under the recipe needs, so that checkpoints find them."""
        self._bind(recipe, (str(self.weight.device), self.weight.dtype, (True, True), None))

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
        tell_shards(self._parameters.values())
        drop_empty_extra_state(state_dict, prefix)
        self._saved.update(delayed_states.set_aside(self, state_dict, prefix))  # type: ignore[arg-type]
        if any(key.startswith(prefix) for key in state_dict):
            seeds.note_load(self)
            self._stages, self._last = {}, None  # built anew, so that the first draw is seen
        super()._load_from_state_dict(state_dict, prefix, *args)  # type: ignore[misc]

    def __getstate__(self) -> dict[str, Any]:
        # Plans name states of this process, and a group by its name could be another one elsewhere.
        unbound = type(self.layout)("", self.layout.sequence_parallel)
        kept = {name: value for name, value in self.__dict__.items() if name not in CACHES}
        return {
            **kept,
            "_stages": {},
            "_variants": {},
            "_rewritten": {},
            "_last": None,
            "_given": {},
            "_region": None,
            "layout": unbound,
        }

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

"""Planned: the base of modules that follow plans. It holds the configuration, and its `Planner` holds the plans."""

import copy
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from duotone.linear.core import LinearStage
from duotone.linear.plan import GemmPlan, LinearPlan
from duotone.modules import delayed_states, traced_stages
from duotone.modules.base import PlannedStage
from duotone.modules.foreign_states import translate
from duotone.modules.planner import Planner
from duotone.modules.sent_weights import send_planes
from duotone.modules.weights import ShardedParameters, mark_entries, moved, stay_quantized
from duotone.pipeline.op import info_of
from duotone.pipeline.slot_roles import ConsumerRoles
from duotone.recipes.recipe import RecipeLike, as_recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, UNNAMED, QuantizerRole, Site
from duotone.recipes.rules import Rule
from duotone.sharding.dtensors import is_distributed, link_shards, shard_of
from duotone.sharding.layout import parallel_layout
from duotone.state import seeds
from duotone.tensor import QuantizedTensor, Quantizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

CONFIGURATION = (
    "recipe rules module_name site layout _roles saved_states plans scatter_dim sends_planes plain_gather _rewritten"
).split()
"""Attributes that `adopt` gives and `release` takes away."""

_UNNAMED = itertools.count(1)


def below(name: str, parts: Sequence[str]) -> list[str]:
    """Full names of the children of a module. A module without a name counts as `Layer_<n>`, so that names differ."""
    base = name or f"Layer_{next(_UNNAMED)}"
    return [f"{base}.{part}" for part in parts]


class Planned(ShardedParameters):
    """A module that follows plans. Delayed-scaling states are submodules. They exist only while a recipe needs them."""

    plans: Planner

    def adopt(
        self,
        recipe: RecipeLike,
        rules: tuple[Rule, ...],
        name: str = "",
        site: Site | None = None,
        answers: dict[str, Quantizer] | None = None,
    ) -> None:
        """Follow a recipe and rules under a name and a site. A seed stays. `answers`: known quantizers of slots."""
        recipe = as_recipe(type(self).__name__, recipe)
        if "plans" not in self.__dict__:
            self.plans = Planner(self)
        self.recipe, self.rules, self.plans.warned = recipe, rules, False
        if not name and "module_name" in self.__dict__:  # converted alone, after the model that named it
            name, site = self.module_name, self.site
        name = name or f"Layer_{self.plans.number}"
        self.take_name(name, site or (UNNAMED if name.startswith("Layer_") else ANYWHERE))
        if seeds.BUFFER not in self._buffers:
            with torch.inference_mode(False):  # an inference tensor could not advance in training
                seed = seeds.initial_seed(self.module_name).to(self.weight.device)
            self.register_buffer(seeds.BUFFER, seed, persistent=False)
        delayed_states.drop(self)
        self.saved_states = {}
        if answers is not None:
            traced_stages.take(self.plans, recipe.key, answers)

    def release(self) -> None:
        """Remove everything that `adopt` and plans added, also if an interrupt stopped `adopt` or this call before."""
        if "plans" in self.__dict__:
            self.plans.retire()
        for attribute in (*CONFIGURATION, seeds.LOADED, seeds.RESTORED):
            self.__dict__.pop(attribute, None)
        self._buffers.pop(seeds.BUFFER, None)
        delayed_states.drop(self)

    def take_name(self, name: str, site: Site) -> None:
        """Set the full name in the model, and the site. A seed that nothing has drawn from follows the name."""
        before = self.__dict__.get("module_name")
        self.module_name, self.site = name, site
        if before not in (None, name):
            seeds.follow_name(self, before, name)
        self.forget_plans()

    def forget_plans(self) -> None:
        """Build plans again at the next call, in compiled code too."""
        self.plans.forget()
        self.__dict__.pop("_rewritten", None)

    def roles_changed(self) -> None:
        self.forget_plans()

    @property
    def consumers(self) -> ConsumerRoles:
        """The roles of the modules that read this one's output."""
        return self.plans.consumers

    def forget_recipe(self, recipe: str) -> None:
        if recipe in self.plans.answers:
            self.forget_plans()

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        shown = {"output": self.output_quantizer_role, "grad_input": self.grad_input_quantizer_role}
        slots = {**self.plans.request(self.recipe).slots, **shown}
        return {slot: slots[slot] for slot in SLOTS[mode]}

    @property
    def handle(self) -> Tensor:  # type: ignore[override]
        return self.plans.handle

    @property
    def number(self) -> str:  # type: ignore[override]
        return self.plans.number

    def set_tensor_parallel_group(self, tp_group: "ProcessGroup | None") -> None:
        """Communicate in another group from the next forward on; backwards stay in the group of their forward."""
        self.layout = parallel_layout(self.layout.mode, tp_group, self.layout.sequence_parallel)
        self.forget_plans()

    def require_same_formats(self, plan: LinearPlan, device: str) -> None:
        """UserError on all ranks of the plan's group, in its first call, unless they have the same formats."""
        quantizers = plan.input.quantizer, plan.weight.quantizer, plan.gradient.quantizer
        self.plans.require_same_formats(
            quantizers, device, plan.layout.group, f"propagate_nonfinite = {plan.input.context.propagate}"
        )

    def plan_for(self, x: Tensor) -> LinearPlan:
        """The plan that a call with `x` would follow now."""
        weights = self.weights
        trained = any(weight.requires_grad for weight in weights)
        return self.plans.stage(info_of(x), trained, self.weight_held, weights[0].dtype).plan

    def kernel_of(self, plan: LinearPlan, gemm: GemmPlan) -> tuple[str, str]:
        """The name of the kernel that runs a GEMM of the plan in this module, and the reason."""
        return gemm.rule.name, gemm.reason

    def make_variant(self, stage: PlannedStage, first: bool | Tensor | None, overwrites: bool) -> PlannedStage:
        assert isinstance(stage, LinearStage)
        return self.plans.options.stage(stage, 0, first, overwrites)

    def invalidate_weight_cache(self) -> None:
        """Encode the weights again at the next microbatch, for writes through `.data`, which raise no version."""
        for cache in self.plans.options.caches.values():
            cache.clear()

    def backward_dw(self) -> None:
        """Compute the oldest delayed weight gradients, and add them to `.grad` or `main_grad`."""
        self.plans.options.backward_dw(self)

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], None]) -> None:
        """Call `hook` after each `backward_dw`, which does not call autograd's hooks on the weights."""
        self.plans.options.hooks.append(hook)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Like nn.Module. Quantized parameters change only device and nominal dtype. A seed on meta starts again."""
        seed = self._buffers.get(seeds.BUFFER)
        shards = {name: shard_of(p) for name, p in self._parameters.items() if is_distributed(p)}
        for parameter in self._parameters.values():
            if isinstance(parameter, QuantizedTensor):
                moved(parameter, fn)
        rest = nn.Module()  # takes the others along, so that an interrupt finds each parameter in its place
        rest._parameters = {name: p for name, p in self._parameters.items() if not isinstance(p, QuantizedTensor)}
        rest._buffers, rest._modules = self._buffers, self._modules
        rest._apply(fn, recurse)
        self._parameters.update(rest._parameters)
        for name, shard in shards.items():
            stay_quantized(self._parameters[name], shard)  # type: ignore[arg-type]
        fresh = self._buffers.get(seeds.BUFFER)
        if seed is not None and seed.is_meta and fresh is not None and not fresh.is_meta:
            fresh.copy_(seeds.initial_seed(self.module_name))
        send_planes(self)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *args: object) -> None:
        """Like nn.Module. Delayed-scaling states that the module lacks wait for a recipe that needs them."""
        link_shards(self._parameters.values())
        translate(state_dict, prefix, ("",) * self.num_gemms)
        self.saved_states.update(delayed_states.set_aside(self, state_dict, prefix))
        delayed_states.prepare_load(self, state_dict, prefix)
        if any(key.startswith(prefix) for key in state_dict):
            seeds.note_load(self)
            self.plans.forget_stages()  # so that the first draw is seen
        quantized = self.weight_held
        super()._load_from_state_dict(state_dict, prefix, *args)
        seed = self._buffers.get(seeds.BUFFER)
        if seed is not None and seed.is_meta and not self.weight.is_meta:  # assign=True gave the module its memory
            self._buffers[seeds.BUFFER] = seeds.initial_seed(self.module_name).to(self.weight.device)
        if quantized is not None and self.weight_held is None:
            text = "a load with assign=True put plain weights in place of quantized ones"
            warnings.warn(f"{text}; load without it into a model with memory (to_empty) to encode them", stacklevel=2)
        send_planes(self)

    def _save_to_state_dict(self, destination: dict[str, Tensor], prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        mark_entries(destination, prefix, self._parameters)

    def __getstate__(self) -> dict[str, object]:
        # Plans name states of this process. In another process the name of a group may mean another group.
        state = {name: value for name, value in super().__getstate__().items() if name != "plans"}
        if "layout" in state:
            state["layout"] = type(self.layout)("", self.layout.sequence_parallel)
        return state

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self.plans = Planner(self)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        own: Any = type_before_parametrizations(self)  # torch's class of parametrized modules only refuses pickles
        copied.__setstate__(copy.deepcopy(own.__getstate__(self), memo))
        if "layout" in vars(self):  # that of the class stays there: guards of graphs look for it
            copied.layout = self.layout
        copied.plans.forget()  # they go by the layout
        return copied

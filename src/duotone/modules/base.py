"""What a module that follows plans is to the code around it: its configuration, its weights, and what plans it."""

import weakref
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from duotone.linear.core import LinearStage
from duotone.linear.grouped import GroupedStage
from duotone.linear.plan import LinearPlan
from duotone.numbered import ByName
from duotone.pipeline.op import Op
from duotone.pipeline.rows import Rows
from duotone.pipeline.slot_roles import BoundaryRoles
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import Site
from duotone.recipes.rules import Rule
from duotone.sharding.dtensors import shard_of
from duotone.sharding.layout import WHOLE, Layout
from duotone.state.region import AmaxMode, active_region
from duotone.tensor import Quantizer
from duotone.tensor.quantizer import quantizer_of

PlannedStage = LinearStage | GroupedStage
RECOMPUTED: set[str] = set()
"""Contents of modules whose compiled forward runs again in a backward. They stay, because graphs may stay."""


class Call(NamedTuple):
    """What decides the plan of a call besides the recipe.

    `grads`: whether input and weight need gradients. `layout`: that of the linear, if it is not the module's.
    """

    device: str
    dtype: torch.dtype
    grads: tuple[bool, bool] = (True, True)
    input_held: Quantizer | None = None
    layout: Layout | None = None
    is_traced: bool = False
    is_joined: bool = False


class Plans:
    """The plans of one module under each recipe. `Planner` builds them."""

    number: str
    """By which a graph finds these plans."""
    config = ""
    """A name for what decides the plans besides recipes. Equal modules share it."""
    answers: dict[str, dict[str, Quantizer]]
    """What a recipe gave each slot, by the key of the recipe."""
    answered: ByName
    """The names of `answers`, by the same keys, as guards of graphs read them."""

    def __init__(self, module: "PlannedModule") -> None:
        self.owner = weakref.ref(module)
        self.rows: Rows = {}
        """What runs the stages of this module in graphs."""

    @property
    def module(self) -> "PlannedModule":
        """The module that the plans are for."""
        module = self.owner()
        assert module is not None
        return module

    def plan(self, recipe: Recipe, call: Call | None = None, mode: AmaxMode = AmaxMode.USE) -> LinearPlan:
        """The plan under a recipe. The default `call` is on the weight's device. See `answer` for who is asked."""
        raise NotImplementedError

    def answer(self, recipe: Recipe) -> dict[str, Quantizer]:
        """The quantizer that a recipe gives each slot. A recipe that is a function is called once per slot."""
        raise NotImplementedError

    def prepare(self, recipe: Recipe) -> None:
        """Create the states that delayed scaling under the recipe needs, so that checkpoints contain them."""
        raise NotImplementedError

    def forget_stages(self) -> None:
        """Build stages again at the next eager call, from the same answers of recipes."""
        raise NotImplementedError

    def template(self, name: str, recipe: Recipe, call: Call, mode: AmaxMode) -> PlannedStage:
        """The stage that all modules of equal content share in graphs, under its name."""
        raise NotImplementedError

    def follow(self, name: str) -> tuple[AmaxMode, PlannedStage]:
        """The mode and the eager stage of this module for a template. Delayed states then follow it."""
        raise NotImplementedError

    def eager_stage(self, plan: str, first: bool | None) -> PlannedStage:
        """The stage that an op of a graph runs for this module: `follow`, with the module's caches and sinks.

        `plan` names the template. `first`: whether this is the first microbatch, None if nobody says so.
        """
        raise NotImplementedError


class PlannedModule(BoundaryRoles, Op, nn.Module):
    """A module with weights that follow plans. Its fields are what plans, states and hooks read of it.

    `recipe` applies if no autocast encloses the call. `rules` go before any recipe.

    `module_name` is the full name in the model, or `Layer_<n>`. `site` is the place of the module, as rules see it.
    """

    module_type: ClassVar[str]
    fuse_wgrad_accumulation = delay_wgrad_compute = save_original_input = False
    num_gemms = 1
    all_gemms = 0
    """The number of the linears of all ranks, if these hold different ones. Else 0."""
    weight: nn.Parameter
    recipe: Recipe
    rules: tuple[Rule, ...]
    module_name: str
    site: Site
    layout: Layout = WHOLE
    scatter_dim: int | None = None
    """The dimension of outputs that is cut over the ranks after their sum, if the weight is a DTensor of Shard(1)."""
    plans: Plans
    saved_states: dict[str, dict[str, Tensor]]
    """Delayed-scaling states from a checkpoint that no recipe has asked for yet."""
    sends_planes = False
    """Whether FSDP2 gathers planes of plain weights."""
    plain_gather = ""
    """Why it gathers them in high precision nevertheless."""

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        """The weights: one for each linear of this module."""
        return (self.weight,)

    def weight_owners(self, member: int) -> tuple[nn.Parameter, ...]:
        """The parameters from which the weight of a linear comes: itself, one that contains it, or its pieces."""
        return (self.weights[member],)

    @property
    def weight_parameters(self) -> tuple[nn.Parameter, ...]:
        """The parameters that hold the weights: one for each weight, or one for all."""
        return self.weights

    @property
    def weight_held(self) -> Quantizer | None:
        """The quantizer of weights that are quantized tensors."""
        return quantizer_of(shard_of(self.weights[0]))

    @property
    def differentiates_rowwise(self) -> bool:
        """Whether backward reads rowwise planes of the weights, under the recipe that a call follows now."""
        region = active_region()
        return (
            self.plans.config in RECOMPUTED
            or (self.recipe if region is None else region.recipe).backward_override is not None
        )

    def refuse_held(self, weight: nn.Parameter) -> None:
        """UserError if this module cannot hold the weight in its planes."""

    def make_stage(self, linears: list[LinearStage]) -> PlannedStage:
        """One stage out of the stages of this module's linears."""
        return linears[0]

    def make_variant(self, stage: PlannedStage, first: bool | Tensor | None, overwrites: bool) -> PlannedStage:
        """The stage with this module's caches and sinks."""
        raise NotImplementedError

    def require_whole(self) -> None:
        """UserError if a parameter is a DTensor in a forward. FSDP2 has gathered its parameters by then."""

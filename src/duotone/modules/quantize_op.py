"""Quantize: an op that passes quantized tensors to the ops around it."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from uuid import uuid4

import torch
from torch import Tensor

from duotone.errors import RecipeError
from duotone.formats import IDENTITY
from duotone.linear.operand_plan import BACKWARD_OPERANDS
from duotone.modules.answers import content
from duotone.modules.basic import BasicOp
from duotone.numbered import ByName, constant_in_traces
from duotone.pipeline.op import TensorInfo
from duotone.pipeline.rows import in_parts
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe, drop_dead, recipe_of
from duotone.recipes.roles import ANYWHERE, QuantizerRole
from duotone.state import seeds
from duotone.state.autocast_context import HIGH_PRECISION, active_region
from duotone.state.region import CallRegion, mode_now
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.quantizer import Quantizer

_NUMBERS = itertools.count(1)
STAGES = ByName()
"""For each recipe, by its key: the stages under it, by name."""

INPUT, GRAD_OUTPUT = QuantizerRole("linear", "input"), QuantizerRole("linear", "grad_output")


@dataclass(frozen=True, eq=False)
class QuantizeStage(Stage):
    """x, seed int64 (1,) or None -> x quantized. A quantizer that is None leaves x, or its gradient, as it is."""

    forward_to: Quantizer | None
    backward_to: Quantizer | None
    columnwise: bool
    propagate: bool = True
    row_part: str = ""
    arity = (1,)

    @property
    def draws(self) -> tuple[bool, bool]:
        """Whether forward and backward round stochastically."""
        forward, backward = (to is not None and to.is_stochastic for to in (self.forward_to, self.backward_to))
        return forward, backward

    @property
    def refusal(self) -> str:
        return "" if self.forward_to is self.backward_to is None else "it quantizes"

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (x,)

    def forward(self, x: Tensor, seed: Tensor | None) -> tuple[Tensor, Saved]:
        if self.forward_to is not None:
            x = self.forward_to.quantize(x, usage=Usage(True, self.columnwise), ctx=self._context(seed))
        return x, ((seed,),)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        if self.backward_to is not None:
            ((seed,),) = saved
            dy = self.backward_to.quantize(dy, ctx=self._context(None if seed is None else seed + int(self.draws[0])))
        return dy, None

    def _context(self, seed: Tensor | None) -> QuantizeContext:
        return QuantizeContext(seed=seed, propagate=self.propagate)


class Quantize(BasicOp):
    """Quantizes its input, its gradient or both for the consumer whose roles are given; the identity without a recipe.

    `recipe` applies where no autocast encloses the call. Under a backward override gradients stay as they are. Raises
    RecipeError if the recipe gives a delayed format, whose scale belongs to the module that consumes the tensor.
    """

    def __init__(
        self,
        forward: bool = True,
        backward: bool = False,
        *,
        role: QuantizerRole = INPUT,
        grad_role: QuantizerRole = GRAD_OUTPUT,
        recipe: RecipeLike = HIGH_PRECISION,
    ) -> None:
        super().__init__()
        self.roles = (role if forward else None, grad_role if backward else None)
        self.recipe = as_recipe("Quantize", recipe)
        if backward:
            seed = seeds.initial_seed(f"Quantize_{next(_NUMBERS)}")
            self.register_buffer(seeds.BUFFER, seed, persistent=False)
        self._region = CallRegion()

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "_region"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._region = CallRegion()

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        region = active_region() if torch.compiler.is_dynamo_compiling() else self._region.now(mode_now())
        recipe = self.recipe if region is None else region.recipe
        if recipe.evaluation is not None and not self.training:
            recipe = recipe.evaluation
        forward, backward = self.roles
        name = _name_stage(recipe.key, _fields(forward), _fields(backward), info.requires_grad)
        stage: QuantizeStage = getattr(getattr(STAGES, recipe.key), name)
        return stage, info if stage.forward_to is None else info._replace(quantizer=stage.forward_to)

    def operands(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[Tensor | None]:
        assert isinstance(stage, QuantizeStage)
        count, buffer = sum(stage.draws), self._buffers.get(seeds.BUFFER)
        return (seeds.take(buffer, count) if count and buffer is not None else None,)

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """The slot that it quantizes for a consumer: "output" of forward, "grad_input" of backward."""
        slot, role = ("output", self.roles[0]) if mode == "forward" else ("grad_input", self.roles[1])
        return {} if role is None else {slot: role}


Role = tuple[str, str, str] | None
"""The fields of a role, as constants of a trace."""


def _fields(role: QuantizerRole | None) -> Role:
    return None if role is None else (role.module_type, role.tensor_type, role.name)


@constant_in_traces
def _name_stage(recipe: str, forward: Role, backward: Role, columnwise: bool) -> str:
    """Build a stage once for all ops of these roles. Returns its name among the `STAGES` of the recipe."""
    name = f"stage_{content((forward, backward, columnwise))}"
    if not hasattr(STAGES, recipe):
        drop_dead(vars(STAGES))
        setattr(STAGES, recipe, ByName())
    stages = getattr(STAGES, recipe)
    if not hasattr(stages, name):
        followed = recipe_of(recipe)
        if not BACKWARD_OPERANDS[followed.backward_override].quantizes_gradient:
            backward = None
        x, dy = (None if role is None else _quantizer(followed, QuantizerRole(*role)) for role in (forward, backward))
        stage = QuantizeStage(x, dy, columnwise, followed.propagate_nonfinite)
        # torch keeps graphs on disk, and a quantizer of a user may be another one in a later process.
        words = ["" if each is None else each.words if each.is_fixed else str(uuid4()) for each in (x, dy)]
        key = " ".join(("quantize", *words, str(columnwise), str(stage.propagate)))
        setattr(stages, name, in_parts(stage, key, (False, True), True, gives_quantized=x is not None))
    return name


def _quantizer(recipe: Recipe, role: QuantizerRole) -> Quantizer | None:
    """The recipe's quantizer of the role. None for high precision."""
    quantizer = recipe.quantizer(role, ANYWHERE)
    if any(quantizer.delayed):
        raise RecipeError(f"ops.Quantize has no delayed scale for {role}; give that role a format without a history")
    return None if quantizer.rowwise == quantizer.columnwise == IDENTITY else quantizer

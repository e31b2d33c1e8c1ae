"""The plan of a linear: recipe, roles, gradients, parallel layout and device, resolved once into three GEMMs.

A request decides the plan. Execution reads no mode; it follows the plan. A plan is a frozen, hashable value, and its
rows say which kernel runs.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from duotone.dispatch.rule import GemmProblem, GemmRule
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format
from duotone.linear.operand_plan import OperandPlan
from duotone.linear.plane_source import ENCODE_NOW, HIGH_PRECISION, USE_HELD
from duotone.pipeline.row_call import digest_of
from duotone.pipeline.titles import title
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import Rule, first_match
from duotone.sharding.layout import WHOLE, Layout
from duotone.tensor.context import Slot
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True)
class PlanRequest:
    """A request for a plan: what a module computes, and on which device."""

    recipe: Recipe
    rules: tuple[Rule, ...]
    name: str
    module_type: str
    device: str
    """One of torch ("cpu", "cuda:1"), or an architecture that need not be present ("sm90")."""

    dtype: torch.dtype
    input_grad: bool = True
    weight_grad: bool = True
    site: Site = ANYWHERE
    layout: Layout = WHOLE
    weight_held: Quantizer | None = None
    """The quantizer of a weight that is a quantized tensor already."""

    input_held: Quantizer | None = None
    output_role: QuantizerRole | None = None
    """The role of the output at its consumer; None if the consumer is unknown."""

    grad_input_role: QuantizerRole | None = None
    save_original_input: bool = False
    weight_shape: tuple[int, ...] | None = None
    """(N, K) of each linear on this rank; None if `min_weight_elements` does not apply."""

    weight_dtype: torch.dtype | None = None
    """The dtype of the parameter; None if it is `dtype`."""

    weight_is_freed: bool = False
    """Whether FSDP2 frees the weight after forward, and gathers it again for backward."""

    linears: int = 1
    """How many linears share the plan: the experts of a group."""

    is_traced: bool = False
    """Whether the call is part of a compiled graph."""

    owner: Callable[[], object] | None = field(default=None, compare=False, repr=False)
    """The module, for errors."""

    def without_held(self) -> "PlanRequest":
        """The request as if no operand were quantized yet."""
        return replace(self, weight_held=None, input_held=None)

    def role(self, tensor_type: str) -> QuantizerRole:
        """The role of a slot of this module."""
        return QuantizerRole(self.module_type, tensor_type, self.name)

    @property
    def title(self) -> str:
        """How errors name the module."""
        return title(self.owner()) if self.owner is not None else self.name or "a linear"

    @property
    def slots(self) -> dict[str, QuantizerRole | None]:
        """Every quantizer slot of a linear with the role that its recipe sees."""
        roles = {slot: self.role(slot) for slot in ("input", "weight", "grad_output")}
        return {**roles, "output": self.output_role, "grad_input": self.grad_input_role}


def ask_recipe(request: PlanRequest) -> dict[str, Quantizer]:
    """The quantizer of each slot, from rules and recipe.

    Each slot is asked once, for every expert if the recipe may answer by name. Raises RecipeError if experts of one
    group would have different formats.
    """
    answers: dict[str, Quantizer] = {}
    recipe, roles = request.recipe, request.slots
    members = range(request.linears if recipe.asks_by_slot else 1)
    for member, slot in ((member, slot) for slots in SLOTS.values() for member in members for slot in slots):
        role, own_role = roles[slot], request.role(slot)
        answer = first_match(request.rules, role, request.site, slot=own_role)
        answer = answer or recipe.quantizer(role, request.site, own_role)
        first = answers.setdefault(slot, answer)
        if _formats(answer) != _formats(first):
            raise RecipeError(
                f"{request.title}: the recipe gives {slot} of expert {member} {_words(answer)} and "
                f"of expert 0 {_words(first)}; give all experts of a group the same formats"
            )
    return answers


def _formats(quantizer: Quantizer) -> tuple[Format | None, Format | None, str]:
    return quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source


def _words(quantizer: Quantizer) -> str:
    row, col, source = _formats(quantizer)
    names = f"{row.name if row else None}/{col.name if col else None}"
    return names if source == "original" else f"{names} ({source})"


@dataclass(frozen=True)
class GemmPlan:
    """One GEMM: its problem, the rule that runs it, and the reason."""

    gemm: str
    problem: GemmProblem
    rule: GemmRule
    reason: str

    @property
    def a(self) -> Format:
        """The format of the first operand."""
        return self.problem.a

    @property
    def b(self) -> Format:
        """The format of the second operand."""
        return self.problem.b


OPERANDS = ("input", "weight", "gradient")
"""The fields of a plan that hold operands, in the order of `TENSOR_TYPES`."""


@dataclass(frozen=True)
class LinearPlan:
    """What forward and backward follow: three operands, three GEMMs, and the quantizers of the boundary slots."""

    input: OperandPlan
    weight: OperandPlan
    gradient: OperandPlan
    """The gradient of the output, which backward encodes."""

    output: Quantizer
    grad_input: Quantizer
    layout: Layout
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    seeds: int
    """Stochastic quantizes of one forward and backward: how far the module's seed advances."""

    rolls_forward_alone: bool = False
    """Whether delayed states of forward roll at the end of backward because the gradient is not delayed itself."""

    @property
    def input_grad(self) -> bool:
        """Whether backward computes the gradient of the input."""
        return self.weight.is_kept

    @property
    def weight_grad(self) -> bool:
        """Whether backward computes the gradient of the weight."""
        return self.input.is_kept

    @property
    def operands(self) -> dict[str, OperandPlan]:
        """By tensor type."""
        return dict(zip(TENSOR_TYPES, (self.input, self.weight, self.gradient), strict=True))

    @property
    def quantizers(self) -> dict[str, Quantizer]:
        """The quantizer of each slot."""
        return {kind: operand.quantizer for kind, operand in self.operands.items()}

    @property
    def gemms(self) -> Iterator[GemmPlan]:
        """The three products: of forward, of the gradient of the input, of that of the weight."""
        return iter((self.fprop, self.dgrad, self.wgrad))

    @property
    def refusal(self) -> str:
        """Why second derivatives cannot go through these GEMMs, or ""."""
        if any(fmt != IDENTITY for gemm in self.gemms for fmt in (gemm.a, gemm.b)):
            return "its operands are quantized"
        return "" if self.layout == WHOLE else "it is spread over ranks"

    @property
    def is_delayed(self) -> bool:
        """Whether any operand has delayed scales."""
        return any(any(operand.quantizer.delayed) for operand in self.operands.values())

    def with_slots(self, slot: Callable[[str, int], Slot]) -> "LinearPlan":
        """The plan whose delayed operands use `slot(name of the field, side)`; sides as of `OperandPlan.with_slots`."""
        operands = {name: getattr(self, name).with_slots(partial(slot, name)) for name in OPERANDS}
        return replace(self, **operands, rolls_forward_alone=not any(self.gradient.quantizer.delayed))

    @property
    def is_bindable(self) -> bool:
        """Whether shapes decide all calls of torch and of kernels of a linear with this plan."""
        ours = all(type(gemm.rule).__module__.startswith("duotone.") for gemm in self.gemms)
        return ours and not self.layout.exchanges and all(each.is_bindable for each in self.operands.values())

    @property
    def is_shared(self) -> bool:
        """Whether modules of equal content may run one stage: nothing in it is of one module, or of a user."""
        return not self.is_delayed and all(each.is_known for each in self.operands.values())

    @property
    def is_quantized(self) -> bool:
        """Whether a linear with this plan multiplies codes."""
        low, source = (ENCODE_NOW, USE_HELD), self.input.source
        return source in low or (source is HIGH_PRECISION and self.weight.source in low)

    @property
    def digest(self) -> str:
        """A name of what decides the results of its rows: see `digest_of`."""
        formats = [fmt and fmt.node_name for q in self.quantizers.values() for fmt in (q.rowwise, q.columnwise)]
        operands = [vars(each) for each in self.operands.values()]
        rules = [gemm.rule for gemm in self.gemms]
        return digest_of(formats, rules, operands, self.layout, self.seeds)

    def opened(self, slots: Mapping[Slot, Slot]) -> "LinearPlan":
        """The plan of one call, which has opened slots."""
        return replace(self, **{name: getattr(self, name).opened(slots) for name in OPERANDS})


FORWARD_SLOTS, BACKWARD_SLOTS = 4, 2
"""Delayed-scaling slots of a linear: input and weight in forward, grad_output in backward, two directions each."""

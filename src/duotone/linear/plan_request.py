"""What decides the plan of a linear, and what its recipe answers for each slot."""

from dataclasses import dataclass, replace

import torch

from duotone.errors import RecipeError
from duotone.formats import Format
from duotone.linear.layout import WHOLE, Layout
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, QuantizerRole, Site
from duotone.recipes.rules import Rule, first_match
from duotone.tensor.quantizer import Quantizer


@dataclass(frozen=True)
class PlanRequest:
    """What a module is asked to do, and where."""

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
    """The role of the output at its consumer; None if nobody is known."""

    grad_input_role: QuantizerRole | None = None
    save_original_input: bool = False
    weight_shape: tuple[int, ...] | None = None
    """(N, K) of each linear on this rank; None if `min_weight_elements` does not apply."""

    weight_dtype: torch.dtype | None = None
    """That of the parameter; None if it is `dtype`."""

    linears: int = 1
    """How many linears share the plan: the experts of a group."""

    def without_held(self) -> "PlanRequest":
        """As if no operand were quantized yet."""
        return replace(self, weight_held=None, input_held=None)

    def role(self, tensor_type: str) -> QuantizerRole:
        return QuantizerRole(self.module_type, tensor_type, self.name)

    @property
    def title(self) -> str:
        """How errors name the module."""
        return self.name or "a linear"

    @property
    def slots(self) -> dict[str, QuantizerRole | None]:
        """Every quantizer slot of a linear with the role that its recipe sees."""
        roles = {slot: self.role(slot) for slot in ("input", "weight", "grad_output")}
        return {**roles, "output": self.output_role, "grad_input": self.grad_input_role}


def ask_recipe(request: PlanRequest) -> dict[str, Quantizer]:
    """What rules and recipe give each slot.

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
                f"{request.name or 'a group'}: the recipe gives {slot} of expert {member} {_words(answer)} and "
                f"of expert 0 {_words(first)}; give all experts of a group the same formats"
            )
    return answers


def _formats(quantizer: Quantizer) -> tuple[Format | None, Format | None, str]:
    return quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source


def _words(quantizer: Quantizer) -> str:
    row, col, source = _formats(quantizer)
    names = f"{row.name if row else None}/{col.name if col else None}"
    return names if source == "original" else f"{names} ({source})"

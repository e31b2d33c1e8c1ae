"""A recipe: a frozen value that answers, for the role of a tensor, which quantizer makes its planes."""

from dataclasses import dataclass, fields
from typing import Any, ClassVar

from duotone.errors import RecipeError
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site
from duotone.tensor.quantizer import Quantizer

OVERRIDES = (None, "high_precision", "dequantized")
LINEAR = ("linear", "grouped_linear")


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base of all recipes. `recipe(role) -> Quantizer`; a role of None is a boundary slot with an unknown consumer.

    `strict` turns every fallback to high precision into an error before the first step. `backward_override` runs both
    backward GEMMs in high precision: on the original operands ("high_precision") or on the dequantized operands of
    forward ("dequantized"). `emulate_mixed` allows GEMMs of two quantized formats that no hardware multiplies with each
    other; they run emulated. `evaluation` is the recipe of modules whose `training` is False; None is this recipe.
    """

    strict: bool = False
    backward_override: str | None = None
    emulate_mixed: bool = False
    evaluation: "Recipe | None" = None

    kind: ClassVar[str] = ""

    def __post_init__(self) -> None:
        if self.backward_override not in OVERRIDES:
            allowed = "None, 'high_precision', 'dequantized'"
            raise RecipeError(f"backward_override {self.backward_override!r} is unknown; allowed are {allowed}")
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise RecipeError(f"{field.name} is {getattr(self, field.name)!r}; allowed are true and false")

    @property
    def name(self) -> str:
        return self.kind

    def __call__(self, role: QuantizerRole | None) -> Quantizer:
        raise NotImplementedError(f"{type(self).__name__} does not define __call__(role)")

    def quantizer(self, role: QuantizerRole | None, site: Site = ANYWHERE) -> Quantizer:
        """What a module at `site` gets for `role`: what plans ask. Recipes that look at the site override it."""
        del site
        return self(role)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `duotone.recipes.from_dict` reads it back."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {"recipe": self.kind, **{key: value for key, value in values.items() if value is not None}}


def one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise RecipeError unless `value` is allowed."""
    if value not in allowed:
        raise RecipeError(f"{field} {value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")

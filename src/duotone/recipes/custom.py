"""A recipe from a function: any mapping from role to quantizer that a user writes in Python."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from duotone.errors import RecipeError
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import QuantizerRole
from duotone.tensor.quantizer import Quantizer

Factory = Callable[[QuantizerRole], Any]


@dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """`qfactory(role)` returns a `Quantizer`, or one of the handles named after Transformer Engine's quantizers.

    It is called once per slot when a module builds its plan, never per step.
    """

    qfactory: Factory
    kind: ClassVar[str] = "custom"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory):
            raise RecipeError(f"qfactory must be callable with a role; got {type(self.qfactory).__name__}")

    def __call__(self, role: QuantizerRole) -> Quantizer:
        made = self.qfactory(role)
        value = getattr(made, "value", made)
        if not all(hasattr(value, needed) for needed in ("rowwise", "columnwise", "encode")):
            got = "None" if made is None else type(made).__name__
            raise RecipeError(
                f"qfactory returned {got} for {role}; return a Quantizer (IdentityQuantizer() is high precision)"
            )
        return value

    def to_dict(self) -> dict[str, Any]:
        """For display: a function has no JSON form and is not read back."""
        name = getattr(self.qfactory, "__qualname__", type(self.qfactory).__qualname__)
        return {"recipe": self.kind, "qfactory": name, "strict": self.strict}

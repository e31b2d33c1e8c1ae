"""The autocast context: which recipe converted modules run under, for a region of forward code."""

from dataclasses import dataclass

from duotone.errors import UserError
from duotone.recipes.builtin import Float8CurrentScaling, HighPrecision
from duotone.recipes.recipe import Recipe

DEFAULT_RECIPE = Float8CurrentScaling()
HIGH_PRECISION = HighPrecision()


@dataclass
class Stack:
    """The active recipes, innermost last. One module-level object, because Dynamo traces no ContextVar."""

    recipes: tuple[Recipe, ...] = ()


STACK = Stack()


class autocast:
    """Run converted modules under `recipe`; backward uses what forward resolved and never looks here.

    `enabled=False` means high precision; `recipe=None` means FP8 current scaling. Regions nest, the innermost decides.
    """

    def __init__(self, enabled: bool = True, *, recipe: Recipe | None = None) -> None:
        if recipe is not None and not isinstance(recipe, Recipe):
            hint = "use duotone.recipes.load(name) or one of its classes"
            raise UserError(f"autocast takes a recipe; got {type(recipe).__name__}; {hint}")
        self.recipe = (recipe or DEFAULT_RECIPE) if enabled else HIGH_PRECISION
        self._before: tuple[Recipe, ...] | None = None

    def __enter__(self) -> "autocast":
        if self._before is not None:
            raise RuntimeError("this autocast is entered already; make a new one for each nested region")
        self._before = STACK.recipes
        STACK.recipes = (*self._before, self.recipe)
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        STACK.recipes, self._before = self._before, None


def active_recipe() -> Recipe | None:
    """The recipe of the innermost enclosing autocast, or None outside of any."""
    recipes = STACK.recipes
    return recipes[-1] if recipes else None

"""quantized_model_init: the context in which modules are built with only quantized weights."""

from dataclasses import dataclass

from duotone.errors import UserError
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.state.region import Region, RegionManager, Stack, innermost


@dataclass(eq=False)
class Construction(Region):
    """How weights are built: under which recipe (None: the module's), and whether their first values are preserved."""

    enabled: bool
    recipe: Recipe | None
    preserve_high_precision_init_val: bool

    @property
    def value(self) -> object:
        return self.enabled, self.recipe and self.recipe.key, self.preserve_high_precision_init_val


STACK: Stack[Construction] = Stack("duotone.quantized_model_init")
"""Apart from the stack of autocast, whose recipe it never touches."""


def construction() -> Construction | None:
    """The innermost enclosing region, or None outside of any. Raises UserError if `innermost` does."""
    return innermost(STACK.regions, "quantized_model_init")


class quantized_model_init(RegionManager[Construction]):
    """Modules built inside keep quantized weights only, in the formats of `recipe` (None: FP8 current scaling).

    With `preserve_high_precision_init_val`, each weight also keeps a copy of its values in high precision on the CPU:
    `param.get_high_precision_init_val()` returns it, `param.clear_high_precision_init_val()` drops it.
    `module.reset_parameters()` keeps a copy too, also for shards of a module that was built on meta.
    """

    stack, region_type = STACK, Construction

    def __init__(
        self, enabled: bool = True, *, recipe: RecipeLike | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        if not isinstance(enabled, bool):
            raise UserError(f"enabled is {enabled!r}; allowed are true and false: name the recipe as recipe=")
        chosen = None if recipe is None else as_recipe("quantized_model_init", recipe)
        self._options = enabled, chosen, preserve_high_precision_init_val

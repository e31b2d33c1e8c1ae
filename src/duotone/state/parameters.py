"""quantized_model_init: the context in which modules are built with quantized weights alone."""

from duotone.errors import UserError
from duotone.recipes.recipe import Recipe, require_recipe
from duotone.state.stack import UNKNOWN, Region, Stack, enter, leave


class Construction(Region):
    """How weights are made at present: under which recipe (None is the module's own), and whether values are kept."""

    def __init__(self, enabled: bool, recipe: Recipe | None, preserve_high_precision_init_val: bool) -> None:
        self.enabled = enabled
        self.recipe = recipe
        self.preserve_high_precision_init_val = preserve_high_precision_init_val

    @property
    def value(self) -> object:
        return self.enabled, self.recipe and self.recipe.key, self.preserve_high_precision_init_val


STACK = Stack("duotone.quantized_model_init")
"""A stack of its own: it never touches the recipe of an autocast."""


def construction() -> Construction | None:
    """The innermost enclosing region, or None outside of any.

    Raises UserError in a thread that was started while several threads or tasks had regions open that differ.
    """
    regions = STACK.regions
    if regions and regions[-1] is UNKNOWN:
        raise UserError(
            "this thread was started while quantized_model_init regions of several threads or tasks were open, and "
            "they differ; enter duotone.quantized_model_init in this thread"
        )
    return regions[-1] if regions else None


class quantized_model_init:
    """Modules built inside keep quantized weights only, in the formats of `recipe` (FP8 current scaling where None).

    `preserve_high_precision_init_val` keeps a copy of each weight in high precision on the CPU:
    `param.get_high_precision_init_val()` gives it, `param.clear_high_precision_init_val()` drops it.
    """

    def __init__(
        self, enabled: bool = True, *, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
    ) -> None:
        if recipe is not None:
            require_recipe("quantized_model_init", recipe)
        self._options = enabled, recipe, preserve_high_precision_init_val
        self._region: Construction | None = None

    def __enter__(self) -> "quantized_model_init":
        if self._region is not None:
            raise RuntimeError("this quantized_model_init is entered already; make a new one for each nested region")
        region = self._region = Construction(*self._options)
        enter(STACK, region)
        return self

    def __exit__(self, *exception: object) -> None:
        region, self._region = self._region, None
        assert region is not None
        leave(STACK, region)

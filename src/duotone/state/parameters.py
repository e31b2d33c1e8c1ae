"""quantized_model_init: the context in which modules are built with quantized weights alone."""

from dataclasses import dataclass

from duotone.recipes.recipe import Recipe, require_recipe


@dataclass(frozen=True)
class Construction:
    """How weights are made at present: under which recipe (None is the module's own), and whether values are kept."""

    enabled: bool = False
    recipe: Recipe | None = None
    preserve_high_precision_init_val: bool = False


@dataclass
class Current:
    construction: Construction = Construction()


CURRENT = Current()
"""A slot of its own: it never touches the recipe of an autocast."""


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
        self.construction = Construction(enabled, recipe, preserve_high_precision_init_val)
        self._before: Construction | None = None

    def __enter__(self) -> "quantized_model_init":
        if self._before is not None:
            raise RuntimeError("this quantized_model_init is entered already; make a new one for each nested region")
        self._before, CURRENT.construction = CURRENT.construction, self.construction
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._before is not None
        CURRENT.construction, self._before = self._before, None

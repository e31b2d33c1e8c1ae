"""The autocast context: which recipe planned modules run under, for a region of forward code."""

from dataclasses import dataclass
from typing import Any

from duotone.errors import UserError
from duotone.recipes.builtin import Float8CurrentScaling, HighPrecision
from duotone.recipes.recipe import Recipe, require_recipe
from duotone.state.rolling import PENDING

DEFAULT_RECIPE = Float8CurrentScaling()
HIGH_PRECISION = HighPrecision()


@dataclass(frozen=True)
class Region:
    """What an autocast decides: the recipe, the amax reduction group by name, and whether it only calibrates."""

    recipe: Recipe
    group: str = ""
    calibrating: Recipe | None = None
    """The recipe whose delayed scales are calibrated, while modules compute in high precision."""


@dataclass
class Stack:
    """The active regions, innermost last. One module-level object, because Dynamo traces no ContextVar."""

    regions: tuple[Region, ...] = ()


STACK = Stack()


class autocast:
    """Run planned modules under `recipe`, which may come first: `autocast(recipe)`.

    Backward uses what forward resolved and never looks here.

    `enabled=False` means high precision, and with `calibrating=True` high precision that records the amaxes which
    delayed scaling under `recipe` needs. `recipe=None` means FP8 current scaling. `amax_reduction_group`, a process
    group, is where delayed scaling takes its largest amaxes. Regions nest, the innermost decides, and hold for all
    threads of the process; delayed scales of forward roll once, when the outermost region ends without an exception.
    """

    def __init__(
        self,
        enabled: bool | Recipe = True,
        *,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: Any = None,
    ) -> None:
        if isinstance(enabled, Recipe) and recipe is None:
            enabled, recipe = True, enabled
        if not isinstance(enabled, bool):
            raise UserError(f"enabled is {enabled!r}; allowed are true and false: name the recipe once, as recipe=")
        if recipe is not None:
            require_recipe("autocast", recipe)
        chosen = recipe or DEFAULT_RECIPE
        group = "" if amax_reduction_group is None else amax_reduction_group.group_name
        self.region = Region(
            chosen if enabled else HIGH_PRECISION, group, chosen if calibrating and not enabled else None
        )
        self._before: tuple[Region, ...] | None = None

    def __enter__(self) -> "autocast":
        if self._before is not None:
            raise RuntimeError("this autocast is entered already; make a new one for each nested region")
        self._before = STACK.regions
        STACK.regions = (*self._before, self.region)
        PENDING.depth = len(STACK.regions)
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        assert self._before is not None
        STACK.regions, self._before = self._before, None
        PENDING.depth = len(STACK.regions)
        if not STACK.regions and PENDING.forward:
            PENDING.end_of_region(failed=kind is not None)


def active_region() -> Region | None:
    """The innermost enclosing region, or None outside of any."""
    regions = STACK.regions
    return regions[-1] if regions else None


def active_recipe() -> Recipe | None:
    """The recipe of the innermost enclosing autocast, or None outside of any."""
    region = active_region()
    return None if region is None else region.recipe

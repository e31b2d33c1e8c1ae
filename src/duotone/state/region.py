"""What an autocast decides for a region of forward code, and which region a call is in."""

from duotone.errors import UserError
from duotone.recipes.recipe import Recipe
from duotone.state.stack import UNKNOWN, Region, Stack


class AutocastRegion(Region):
    """The recipe, the amax reduction group by name, and the recipe whose delayed scales are calibrated, if any, while
    modules compute in high precision. `recorded` are delayed states that roll when the region ends."""

    def __init__(self, recipe: Recipe, group: str, calibrating: Recipe | None) -> None:
        self.recipe = recipe
        self.group = group
        self.calibrating = calibrating
        self.recorded: dict[str, set[str]] = {}

    @property
    def value(self) -> object:
        return self.recipe.key, self.group, self.calibrating and self.calibrating.key


STACK = Stack("duotone.autocast")


def active_region() -> AutocastRegion | None:
    """The innermost enclosing region, or None outside of any.

    Raises UserError in a thread that was started while several threads or tasks had regions open that differ.
    """
    regions = STACK.regions
    if not regions:
        return None
    if regions[-1] is UNKNOWN:
        raise UserError(
            "this thread was started while autocast regions of several threads or tasks were open, and they differ; "
            "enter duotone.autocast in this thread"
        )
    return regions[-1]


def active_recipe() -> Recipe | None:
    """The recipe of the innermost enclosing autocast, or None outside of any."""
    region = active_region()
    return None if region is None else region.recipe


def outermost_region() -> AutocastRegion | None:
    """The outermost enclosing region that has not ended in the thread or task that entered it."""
    for region in STACK.current():
        if region.is_open:
            return region
    return None

"""What an autocast decides for a region of forward code, and which region a call is in."""

from duotone.recipes.recipe import Recipe
from duotone.state.stack import Region, Stack, innermost

Recorded = set[tuple[str, str]]
"""Delayed states that recorded an amax: the number of each, and the group that reduces it ("" for none)."""


class AutocastRegion(Region):
    """The recipe and the name of the amax reduction group.

    `calibrating` is the recipe whose delayed scales are calibrated while modules compute in high precision, if any.
    `recorded` are the delayed states that roll when the region ends.
    """

    def __init__(self, recipe: Recipe, group: str, calibrating: Recipe | None) -> None:
        self.recipe = recipe
        self.group = group
        self.calibrating = calibrating
        self.recorded: Recorded = set()

    @property
    def value(self) -> object:
        return self.recipe.key, self.group, self.calibrating and self.calibrating.key


STACK: Stack[AutocastRegion] = Stack("duotone.autocast")


def active_region() -> AutocastRegion | None:
    """The innermost enclosing region, or None outside of any. Raises UserError where `innermost` does."""
    return innermost(STACK.regions, "autocast")


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

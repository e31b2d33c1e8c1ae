"""The autocast context: which recipe planned modules run under, for a region of forward code."""

import functools
import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar

import torch

from duotone.comm import group_size
from duotone.errors import UserError
from duotone.recipes.builtin import Float8CurrentScaling, HighPrecision
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.schedule import Schedule
from duotone.state import rolling
from duotone.state.region import STACK, AutocastRegion, RegionManager
from duotone.state.region import active_recipe as active_recipe
from duotone.state.region import active_region as active_region

P = ParamSpec("P")
T = TypeVar("T")
DEFAULT_RECIPE = Float8CurrentScaling()
HIGH_PRECISION = HighPrecision()


class autocast(RegionManager[AutocastRegion]):
    """Run planned modules under `recipe`, which may come first: `autocast(recipe)`, `autocast(recipe, enabled=flag)`.

    - `enabled=False`: high precision. With `calibrating=True`, it also records the amaxes that delayed scaling under
      `recipe` needs.
    - `recipe=None`: FP8 current scaling.
    - `amax_reduction_group`: a process group or its name. Delayed scaling takes the maximum of amaxes over it.

    Regions nest, and the innermost decides. Backward uses what its forward resolved. Delayed scales of forward roll
    once, when the outermost region ends without an exception.

    A region holds for the thread and the async task that enter it, and for threads and tasks that are started in it. A
    thread that starts while threads or tasks have different regions open raises UserError until it enters a region.
    A region gives a warning if a forward with gradients ran in it, and no module asked for its recipe.
    As a decorator of a function or a coroutine function, each call is a region.
    """

    stack, region_type = STACK, AutocastRegion

    def __init__(
        self,
        first: bool | RecipeLike = True,
        /,
        *,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: RecipeLike | None = None,
        amax_reduction_group: object = None,
    ) -> None:
        if any(isinstance(each, Schedule) for each in (first, enabled, recipe)):
            raise UserError("autocast takes the recipe of one step; give it schedule.at(step), not the schedule")
        if recipe is None and isinstance(first, Recipe | str | Path):
            first, recipe = True, first
        wrong = next((flag for flag in (first, enabled) if not isinstance(flag, bool)), True)
        if wrong is not True:
            raise UserError(f"enabled is {wrong!r}; allowed are true and false: name the recipe once, as recipe=")
        enabled = enabled and first is True
        chosen = DEFAULT_RECIPE if recipe is None else as_recipe("autocast", recipe)
        self._options = (
            chosen if enabled else HIGH_PRECISION,
            _group_name(amax_reduction_group),
            chosen if calibrating and not enabled else None,
        )

    def end(self, region: AutocastRegion, *, failed: bool) -> None:
        if region.recorded:
            rolling.end_of_region(region, failed=failed)
        if failed or torch.compiler.is_dynamo_compiling() or region.recipe == HIGH_PRECISION:
            return
        if self.stack.ran_in_vain(region):
            text = f"nothing that ran under autocast({region.recipe.name!r}) follows recipes, so it changed nothing"
            warnings.warn(f"{text}; call duotone.convert(model, recipe) first, or leave autocast out", stacklevel=3)

    def __call__(self, function: Callable[P, T]) -> Callable[P, T]:
        """The function or coroutine function, with each call inside a region like this one."""
        if not inspect.isroutine(function):
            raise UserError(f"autocast decorates functions; got {type(function).__name__}: decorate its method")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(
                f"autocast does not decorate generators, which leave their caller's code between two steps; "
                f"enter it inside of {function.__name__}, around code that does not yield"
            )

        @functools.wraps(function)
        def call(*args: P.args, **options: P.kwargs) -> T:
            with self._another():
                return function(*args, **options)

        @functools.wraps(function)
        async def wait(*args: P.args, **options: P.kwargs) -> object:
            with self._another():
                return await function(*args, **options)

        return wait if inspect.iscoroutinefunction(function) else call  # type: ignore[return-value]

    def _another(self) -> "autocast":
        another = autocast()
        another._options = self._options
        return another


def _group_name(group: object) -> str:
    """The name of a process group, from the group or its name. UserError if this process has no such group."""
    if group is None:
        return ""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise UserError(
            f"amax_reduction_group is a {type(group).__name__}; give a process group, as torch.distributed.new_group "
            "makes it, or its group_name"
        )
    if isinstance(group, str) and not torch.compiler.is_dynamo_compiling():
        group_size(name)
    return name

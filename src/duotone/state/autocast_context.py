"""The autocast context: which recipe planned modules run under, for a region of forward code."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from duotone.comm import group_size
from duotone.errors import UserError
from duotone.recipes.builtin import Float8CurrentScaling, HighPrecision
from duotone.recipes.recipe import Recipe, require_recipe
from duotone.state import rolling
from duotone.state.region import STACK, AutocastRegion
from duotone.state.region import active_recipe as active_recipe
from duotone.state.region import active_region as active_region
from duotone.state.stack import enter, leave

DEFAULT_RECIPE = Float8CurrentScaling()
HIGH_PRECISION = HighPrecision()


class autocast:
    """Run planned modules under `recipe`, which may come first: `autocast(recipe)`.

    Backward uses what forward resolved and never looks here.

    `enabled=False` means high precision, and with `calibrating=True` high precision that records the amaxes which
    delayed scaling under `recipe` needs. `recipe=None` means FP8 current scaling. `amax_reduction_group`, a process
    group or its name, is where delayed scaling takes its largest amaxes. Regions nest, and the innermost decides;
    delayed scales of forward roll once, when the outermost region ends without an exception.

    A region holds for the thread and the async task that enter it, and for those that are started in it. Where a
    thread starts while regions of several threads or tasks are open that differ, it raises UserError until it enters
    one. As a decorator, each call of a function or of a coroutine function is a region.
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
        self._options = (
            chosen if enabled else HIGH_PRECISION,
            _group_name(amax_reduction_group),
            chosen if calibrating and not enabled else None,
        )
        self._region: AutocastRegion | None = None

    def __enter__(self) -> "autocast":
        if self._region is not None:
            raise RuntimeError("this autocast is entered already; make a new one for each nested region")
        region = self._region = AutocastRegion(*self._options)
        enter(STACK, region)
        return self

    def __exit__(self, kind: Any, *exception: object) -> None:
        region, self._region = self._region, None
        assert region is not None
        leave(STACK, region)
        if region.recorded:
            rolling.end_of_region(region, failed=kind is not None)

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, or coroutine function, of which each call is a region like this one."""
        if not inspect.isroutine(function):
            raise UserError(f"autocast decorates functions; got {type(function).__name__}: decorate its method")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise UserError(
                f"autocast does not decorate generators, which leave their caller's code between two steps; "
                f"enter it inside of {function.__name__}, around code that does not yield"
            )

        @functools.wraps(function)
        def call(*args: Any, **options: Any) -> Any:
            with self._another():
                return function(*args, **options)

        @functools.wraps(function)
        async def wait(*args: Any, **options: Any) -> Any:
            with self._another():
                return await function(*args, **options)

        return wait if inspect.iscoroutinefunction(function) else call

    def _another(self) -> "autocast":
        another = autocast()
        another._options = self._options
        return another


def _group_name(group: Any) -> str:
    """The name of a process group, which may be the name. UserError where this process has no such group."""
    if group is None:
        return ""
    name = group if isinstance(group, str) else getattr(group, "group_name", None)
    if not isinstance(name, str):
        raise UserError(
            f"amax_reduction_group is a {type(group).__name__}; give a process group, as torch.distributed.new_group "
            "makes it, or its group_name"
        )
    if isinstance(group, str) and not torch.compiler.is_compiling():
        group_size(name)
    return name

"""Stages of traced calls: built outside of the trace by a function whose result the compiler takes as a constant."""

import weakref
from collections.abc import Hashable
from typing import NamedTuple, Protocol

import torch

from duotone.numbered import Numbered
from duotone.recipes.recipe import Recipe, drop_dead, recipe_of
from duotone.state.amax_mode import AmaxMode
from duotone.tensor.quantizer import Quantizer


class Call(NamedTuple):
    """What decides the plan of a call besides the recipe.

    `grads`: whether input and weight need gradients. `layout`: that of the linear, if it is not the module's.
    """

    device: str
    dtype: torch.dtype
    grads: tuple[bool, bool] = (True, True)
    input_held: Quantizer | None = None
    layout: Hashable = None


class Planner(Protocol):
    """Builds the stages of one module."""

    def resolve(self, recipe: Recipe, call: Call, group: str, mode: AmaxMode) -> object: ...


_PLANNERS: Numbered[Planner] = Numbered()


def register(planner: Planner, old: str = "") -> str:
    """A new number for a planner. Graphs that were traced under its old one are traced again.

    The stages of a number are forgotten with it, and with the planner.
    """
    _forget(old)
    number = _PLANNERS.add(planner)
    weakref.finalize(planner, _forget, number).atexit = False
    return number


def _forget(number: str) -> None:
    _PLANNERS.pop(number, None)
    for name in _NAMES.pop(number, {}).values():
        delattr(PLANS, name)


class TracedPlans:
    """Stages of traced calls as attributes. Guards of a graph read the attributes of an object at every call."""


PLANS = TracedPlans()
_NAMES: dict[str, dict[tuple[str, ...], str]] = {}
"""For each number of a planner: the names of its stages, by the key of their recipe and by name."""


def plan_name(
    planner: str, recipe: str, input_grad: bool, weight_grad: bool, tracked: bool, device: str, dtype: str, group: str
) -> str:
    """Build the stage of a traced call outside of the trace. Returns its name in `PLANS`, a constant of the graph."""
    call = Call(device, getattr(torch, dtype.removeprefix("torch.")), (input_grad, weight_grad))
    parts = (planner, recipe, input_grad, weight_grad, tracked, device, dtype, group)
    name = "_".join(map(str, parts)).replace(".", "_").replace(":", "_")  # no attribute name has either
    if not hasattr(PLANS, name):
        stage = _PLANNERS[planner].resolve(recipe_of(recipe), call, group, AmaxMode.RECORD if tracked else AmaxMode.USE)
        _drop_dead(_NAMES.setdefault(planner, {}))
        _NAMES[planner][recipe, name] = name
        setattr(PLANS, name, stage)
    return name


def _drop_dead(names: dict[tuple[str, ...], str]) -> None:
    before = dict(names)
    drop_dead(names)
    for key in before.keys() - names.keys():
        delattr(PLANS, before[key])


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the library.
plan_name._dynamo_marked_constant = True  # type: ignore[attr-defined]

"""Stages of traced calls: built outside of the trace by a function whose result the compiler takes as a constant."""

import itertools
import weakref
from typing import Any, Protocol

import torch

from duotone.recipes.recipe import Recipe, recipe_of
from duotone.state.delayed import RECORD, USE


class Resolver(Protocol):
    def resolve(self, recipe: Recipe, call: tuple[object, ...], group: str, mode: int) -> Any: ...


_MODULES: "weakref.WeakValueDictionary[str, Resolver]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count(1)


def register(module: Resolver, old: str | None = None) -> str:
    """A new number for a module; graphs that were traced under its old one are traced again."""
    if old is not None:
        _MODULES.pop(old, None)
    number = str(next(_NUMBERS))
    _MODULES[number] = module
    return number


class TracedPlans:
    """Stages of traced calls as attributes, by name: an object, because traces see its attributes as they are now."""


PLANS = TracedPlans()


def plan_name(
    module: str, recipe: str, input_grad: bool, weight_grad: bool, tracked: bool, device: str, dtype: str, group: str
) -> str:
    """Build the stage of a traced call outside of the trace; the name under which `PLANS` holds it is a constant."""
    call = (device, getattr(torch, dtype.removeprefix("torch.")), (input_grad, weight_grad), None)
    parts = (module, recipe, input_grad, weight_grad, tracked, device, dtype, group)
    name = "_".join(map(str, parts)).replace(".", "_")  # an attribute's name holds no dot
    if not hasattr(PLANS, name):
        setattr(PLANS, name, _MODULES[module].resolve(recipe_of(recipe), call, group, RECORD if tracked else USE))
    return name


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the library.
plan_name._dynamo_marked_constant = True  # type: ignore[attr-defined]

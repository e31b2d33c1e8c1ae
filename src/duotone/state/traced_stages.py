"""Stages of traced calls: built outside of the trace by a function whose result the compiler takes as a constant."""

import weakref
from typing import Any, Protocol

import torch

from duotone.numbered import Numbered
from duotone.recipes.recipe import Recipe, drop_dead, recipe_of
from duotone.state.amax_mode import AmaxMode


class Resolver(Protocol):
    def resolve(self, recipe: Recipe, call: tuple[object, ...], group: str, mode: AmaxMode) -> Any: ...


_MODULES: Numbered[Resolver] = Numbered()


def register(module: Resolver, old: str | None = None) -> str:
    """A new number for a module; graphs that were traced under its old one are traced again.

    What traces of a number read goes with the number, and with the module.
    """
    if old is not None:
        _forget(old)
    number = _MODULES.add(module)
    weakref.finalize(module, _forget, number).atexit = False
    return number


def _forget(number: str) -> None:
    _MODULES.pop(number, None)
    for name in _NAMES.pop(number, {}).values():
        delattr(PLANS, name)


class TracedPlans:
    """Stages of traced calls as attributes, by name: an object, because traces see its attributes as they are now."""


PLANS = TracedPlans()
_NAMES: dict[str, dict[tuple[str, ...], str]] = {}
"""By the number of a module: the names of its stages, by the recipe and what else decides them."""


def plan_name(
    module: str, recipe: str, input_grad: bool, weight_grad: bool, tracked: bool, device: str, dtype: str, group: str
) -> str:
    """Build the stage of a traced call outside of the trace; the name under which `PLANS` holds it is a constant."""
    call = (device, getattr(torch, dtype.removeprefix("torch.")), (input_grad, weight_grad), None)
    parts = (module, recipe, input_grad, weight_grad, tracked, device, dtype, group)
    name = "_".join(map(str, parts)).replace(".", "_").replace(":", "_")  # an attribute's name holds neither
    if not hasattr(PLANS, name):
        stage = _MODULES[module].resolve(recipe_of(recipe), call, group, AmaxMode.RECORD if tracked else AmaxMode.USE)
        _drop_dead(_NAMES.setdefault(module, {}))
        _NAMES[module][recipe, name] = name
        setattr(PLANS, name, stage)
    return name


def _drop_dead(names: dict[tuple[str, ...], str]) -> None:
    before = dict(names)
    drop_dead(names)
    for key in before.keys() - names.keys():
        delattr(PLANS, before[key])


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the library.
plan_name._dynamo_marked_constant = True  # type: ignore[attr-defined]

"""Stages of traced calls, by what decides them: modules of equal content share one stage, and so one graph.

A trace reads a stage as an attribute of `PLANS`. The name of the attribute is a constant of the graph. It contains what
decides the plan, and nothing that only one module has. Things of one module are tensors in the graph: its parameters,
its seed, and the `handle` by which delayed scaling finds its states.
"""

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._guards import TracingContext

from duotone.errors import UserError
from duotone.modules.answers import Answers, shared, warn_of_identities
from duotone.modules.base import RECOMPUTED, Call, PlannedModule, PlannedStage, Plans
from duotone.modules.parametrizations import reads_without_effect
from duotone.modules.trace_errors import leave_to_eager
from duotone.numbered import ByName, Numbered, attribute_name, constant_in_traces, with_guards, without_guards
from duotone.pipeline.row_call import KEEPING
from duotone.pipeline.rows import PARTS
from duotone.recipes.recipe import drop_dead, keep_for_graphs, recipe_of
from duotone.sharding.dtensors import is_distributed
from duotone.state import seeds
from duotone.state.frames import is_trace_recomputed
from duotone.state.region import AMAX_MODES, AmaxMode
from duotone.tensor.quantizer import TRACED, Quantizer, name_quantizer


class Key(NamedTuple):
    """The plan of a traced call depends on these constants. They are strings, since integers may become symbols.

    `config` names the configuration of the module. `answers` names the quantizers of its slots.
    """

    config: str
    answers: str
    recipe: str
    input_grad: bool
    weight_grad: bool
    mode: str
    """The value of an `AmaxMode`."""
    device: str
    dtype: str
    group: str
    weight_is_cast: bool
    """Whether the dtypes of weight and input differ."""
    weight_held: str
    """The formats that the weight is held in, or ""."""
    input_held: str
    """The formats of a quantized input, or ""."""


class Template(NamedTuple):
    """A stage for all modules of one content, and how it reduces and records amaxes."""

    stage: PlannedStage
    group: str
    mode: AmaxMode
    stays: bool
    """Whether it serves later models. A process group may be another one under its name by then."""


_OWNERS: Numbered[Any] = Numbered()
"""Plans of modules, and the stages of attention, by the number in a handle."""
_ALIKE: dict[str, weakref.WeakSet[Plans]] = {}
"""Planners by the content of their modules."""

_RECIPES: dict[str, dict[str, None]] = {}
"""For each content: the keys of the recipes that its graphs follow."""

PLANS = ByName()
"""Templates of traced calls, in holders. Guards compare those with quantizers that are not fixed."""

_NAMES: dict[str, dict[tuple[str, ...], str]] = {}
"""For each content of modules: the names of its stages, by the key of their recipe and by name."""

MOST_GONE = 64
_GONE: dict[str, None] = {}
"""The newest contents that no module has any more. Stages stay for graphs that an equal model finds again."""


def template_of(name: str) -> Template:
    """The template of a name in PLANS. AttributeError if no module has it any more."""
    return cast(Template, getattr(PLANS, name).__annotations__["value"])


def formats_of(quantizer: Quantizer | None) -> str:
    """The formats of a quantized weight, and whether a quantizer of a user's class writes it.

    A plan depends on nothing else of that quantizer. Compiled writes compare its content, see `QuantizedTensor`.
    """
    if quantizer is None:
        return ""
    return quantizer.words if type(quantizer) is Quantizer else f"{quantizer.words}/subclass"


def numbered(owner: object) -> tuple[str, Tensor]:
    """A new number, also as int64 (1,) on the CPU. Through it a graph finds what only one module has."""
    number = _OWNERS.add(owner)
    with torch.inference_mode(False):
        return number, torch.tensor([int(number)], dtype=torch.int64, device="cpu")


def owner_of(number: str) -> Any:
    """Whose number it is. UserError if its module is gone."""
    owner = _OWNERS.get(number)
    if owner is None:
        raise UserError(
            "compiled code of a module ran after the module was gone or reverted; keep it until backward ends"
        )
    return owner


def number_of(handle: Tensor) -> str:
    """The number that a handle holds."""
    return str(handle.item())


def move(planner: Plans, old: str, new: str) -> None:
    """The content of the module of a planner is `new` now; "" is none. Traces ask the planners of their content."""
    if old in _ALIKE:
        _ALIKE[old].discard(planner)
    if new:
        _ALIKE.setdefault(new, weakref.WeakSet()).add(planner)
        _GONE.pop(new, None)
    _forget_gone()


def _forget_gone() -> None:
    """Forget contents that no module has any more, and their stages, but for some of the newest MOST_GONE."""
    for config in [config for config, planners in list(_ALIKE.items()) if next(iter(planners), None) is None]:
        _ALIKE.pop(config, None)
        _forget(config, [key for key, name in _NAMES.get(config, {}).items() if not template_of(name).stays])
        _GONE[config] = None
    for config in list(_GONE)[:-MOST_GONE]:
        del _GONE[config]
        _forget(config, list(_NAMES.get(config, {})))


def _forget(config: str, keys: Iterable[tuple[str, ...]]) -> None:
    """Forget stages of a content, by their keys in `_NAMES`."""
    names = _NAMES.get(config, {})
    for key in keys:
        name = names.pop(key)
        stage = template_of(name).stage
        delattr(PLANS, name)
        for end in ("", *KEEPING):
            PARTS.pop(stage.linears[0].name + end, None)
    if not names:
        _NAMES.pop(config, None)


@constant_in_traces
def ask(config: str, recipe: str) -> bool:
    """Ask a recipe for all modules of a content before a trace reads what it answered for one of them.

    Guards of the graph then hold for modules that have not been called yet. A factory that fails for one of them fails
    again when that one is called.
    """
    keep_for_graphs(recipe)
    _RECIPES.setdefault(config, {})[recipe] = None
    answers = [answer(planner, recipe) for planner in list(_ALIKE[config])]
    warn_of_identities([each for each in answers if isinstance(each, Answers)])
    return True


def answer_as_others(planner: Plans) -> None:
    """Ask the recipes that graphs of its content follow, so that these graphs serve a later module, too."""
    drop_dead(_RECIPES.setdefault(planner.config, {}))
    for recipe in list(_RECIPES[planner.config]):
        answer(planner, recipe)


def take(planner: Plans, recipe: str, answers: Mapping[str, Quantizer]) -> None:
    """Give a planner what the recipe of a key has answered already. The object of a name lives as long as its users."""
    planner.answers[recipe] = answered = shared(answers)
    if hasattr(planner.answered, recipe):
        setattr(planner.answered, recipe, answered.name)


def answer(planner: Plans, recipe: str) -> object:
    """`Plans.answer`. A planner for which that fails has an answer of its own."""
    try:
        return planner.answer(recipe_of(recipe))
    except Exception:  # the user's function may raise anything
        return setattr(planner.answered, recipe, f"{recipe}_{planner.number}")


@constant_in_traces
def plan_name(fields: tuple[Any, ...]) -> str:
    """Build the stage of a traced call outside of the trace. Returns its name in `PLANS`, a constant of the graph.

    `fields` are those of a `Key`.
    """
    key = Key(*fields)
    is_tracing = TracingContext.try_get() is not None  # code behind a broken graph calls this too
    if is_tracing and is_trace_recomputed():
        RECOMPUTED.add(key.config)
    name = attribute_name("_".join(map(str, key)))
    owners = _owners(key.config)  # keeps them alive meanwhile
    same = [planner for planner, owner in owners.items() if owner is not None]
    alike = [planner for planner in same if vars(planner.answered).get(key.recipe) == key.answers]
    if not hasattr(PLANS, name):
        call = Call(
            key.device,
            getattr(torch, key.dtype.removeprefix("torch.")),
            (key.input_grad, key.weight_grad),
            getattr(TRACED, name_quantizer(key.input_held)) if key.input_held else None,
            is_traced=True,
        )
        # A trace may replace parameters (torch.func.functional_call), so that no module has such a weight.
        planner = next((each for each in alike if _has_weight(each.module, key, call.dtype)), alike[0])
        mode = AMAX_MODES[key.mode]
        try:
            stage = planner.template(name, recipe_of(key.recipe), call, mode)
        except UserError as error:
            if is_tracing:
                leave_to_eager(planner, recipe_of(key.recipe), call._replace(is_traced=False), mode, error)
            raise
        _forget_gone()
        _drop_dead(key.config)
        _NAMES.setdefault(key.config, {})[key.recipe, name] = name
        quantizers = *planner.answers[key.recipe].values(), *stage.plan.quantizers.values()
        is_fixed = all(quantizer.is_fixed for quantizer in quantizers)
        stays = is_fixed and not (key.group or stage.plan.layout.group)
        setattr(PLANS, name, (without_guards if is_fixed else with_guards)(Template(stage, key.group, mode, stays)))
    for planner in alike:
        seeds.warn_of_load(planner.module, template_of(name).stage.plan.seeds)
    return name


def _owners(config: str) -> dict[Plans, PlannedModule | None]:
    """The planners of a content and their modules. A module of a model that is gone must not warn for another model.

    Some modules are parts of reference cycles, which Python deletes late.
    """
    planners = list(_ALIKE[config])
    if any(seeds.lacks_seed(owner) for owner in [planner.owner() for planner in planners] if owner is not None):
        gc.collect()
    return {planner: planner.owner() for planner in planners}


def _drop_dead(config: str) -> None:
    """Forget stages of a content whose recipes no longer exist."""
    names = _NAMES.get(config, {})
    living = dict(names)
    drop_dead(living)
    _forget(config, names.keys() - living.keys())


def _has_weight(module: PlannedModule, key: Key, dtype: torch.dtype) -> bool:
    """Whether the weight of a module still has the dtype and the formats that a key was built for."""
    with reads_without_effect(module):
        if any(map(is_distributed, module.weight_owners(0))):  # FSDP2 has not gathered the block of this module
            return False
        formats = module.weights[0].dtype is not dtype, formats_of(module.weight_held)
    return (key.weight_is_cast, key.weight_held) == formats

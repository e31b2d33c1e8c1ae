"""convert_parameters: change the formats of all weights of a model, or nothing if one cannot change."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from duotone.conversion.forwards import owner_of
from duotone.conversion.naming import named_modules, require_masters, require_model
from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear.core import record
from duotone.linear.plan import LinearPlan, ask_recipe
from duotone.linear.plan_builder import build_plan
from duotone.modules import delayed_states, traced_stages
from duotone.modules.planned import Planned
from duotone.modules.split_parameters import require_one_weight
from duotone.modules.weights import quantized_parameter, replace
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.sharding.dtensors import is_distributed, shard_context, shard_of, version_of
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.gathers import owners
from duotone.tensor.plane_tensor import CONVERTED

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass
class Conversion:
    """A parameter object, its new contents, and the values that they encode."""

    old: nn.Parameter
    new: nn.Parameter
    quantizer: Quantizer
    values: Tensor


def convert_parameters(
    model: nn.Module, recipe: RecipeLike, *, masters: Mapping[str, Tensor] | None = None, preserve: bool = False
) -> nn.Module:
    """Quantize the weight of every planned module to the formats of `recipe`, in place; returns the model.

    - Values come from `masters`, by full parameter name, else from the dequantized weights.
    - A weight that the recipe keeps in high precision becomes a plain one. Parameters stay the same objects.
    - The modules follow `recipe` from then on.
    - `preserve` stores the high-precision values on the CPU.

    RecipeError or UserError before anything changes.
    """
    require_model("convert_parameters", model)
    recipe = as_recipe("convert_parameters", recipe)
    planned = [(name, module) for name, module in named_modules(model) if isinstance(module, Planned)]
    if not planned:
        kind = type(model).__name__
        raise UserError(f"nothing in {kind} follows recipes: call duotone.convert(model, recipe) before")
    for name, module in planned:
        _refuse_parts(name, module)
    plans = [(name, module, *_planned_as(module, recipe)) for name, module in planned]
    conversions = _conversions(model, plans, {} if masters is None else masters, preserve)
    _publish(conversions)
    for _, module, plan, slots in plans:
        module.recipe = recipe
        if not plan.is_delayed:
            delayed_states.drop(module)
        module.forget_plans()
        traced_stages.take(module.plans, recipe.key, slots)
        module.plans.prepare(recipe)
    for conversion in conversions:
        weight = shard_of(conversion.old)
        if isinstance(weight, QuantizedTensor) and conversion.new is not conversion.old:
            record(weight.context, conversion.values)
    return model


Plans = Sequence[tuple[str, Planned, LinearPlan, dict[str, Quantizer]]]


def _planned_as(module: Planned, recipe: Recipe) -> tuple[LinearPlan, dict[str, Quantizer]]:
    """The plan for a weight in high precision, and the quantizers of the slots. Raises if evaluation cannot run."""
    request = module.plans.request(recipe).without_held()
    slots = ask_recipe(request)
    plan = build_plan(request, slots)
    delayed_states.agreed_history(plan.quantizers)
    if recipe.evaluation is not None:
        weight = plan.weight.quantizer
        build_plan(dataclasses.replace(request, recipe=recipe.evaluation, weight_held=weight, input_grad=False))
    return plan, slots


def _conversions(model: nn.Module, plans: Plans, masters: Mapping[str, Tensor], preserve: bool) -> list[Conversion]:
    """One conversion for each parameter, also if several modules share it."""
    holders = Counter(id(weight) for _, module, *_ in plans for weight in module.weight_parameters)
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    values = _masters(model, set(holders), masters)
    conversions: dict[int, Conversion] = {}
    for name, module, plan, _ in plans:
        quantizer = plan.weight.quantizer
        for member, weight in enumerate(module.weight_parameters):
            key = id(weight)
            if key not in conversions:
                if owners[key] > holders[key] and not _is_plain(quantizer):
                    other = f"the weight of {name} is tied to a module that is not converted"
                    raise UserError(f"{other}; keep it in high precision")
                ctx = delayed_states.weight_context(module, plan, member)
                conversions[key] = (
                    Conversion(weight, weight, quantizer, weight.detach())
                    if not preserve and key not in values and _is_held(shard_of(weight), quantizer)
                    else _converted(name, weight, quantizer, ctx, (values.get(key), preserve))
                )
                module.refuse_held(conversions[key].new)
            elif conversions[key].quantizer != quantizer:
                raise UserError(f"the weight of {name} is tied to one of another format; give both the same by a rule")
    return list(conversions.values())


def _refuse_parts(name: str, module: Planned) -> None:
    """UserError if a weight consists of other parameters, or is a part of another parameter."""
    if is_parametrized(module, "weight"):
        raise UserError(f"the weight of {name} is parametrized, so it is no parameter; remove its parametrizations")
    require_one_weight(module, name)
    if any(weight.is_meta for weight in module.weight_parameters) and "_hf_hook" in owner_of(module).__dict__:
        remedy = "leave parameters plain, or call duotone.convert_parameters on a model that fits the device"
        raise UserError(f"the weight of {name} is offloaded by accelerate, which moves values and no planes; {remedy}")
    if any(is_distributed(weight) and owners(shard_of(weight))[0] for weight in module.weight_parameters):
        remedy = "call duotone.convert_parameters before fully_shard, or build it in duotone.quantized_model_init"
        raise UserError(f"the weight of {name} is sharded already; {remedy}")


def _converted(
    name: str, weight: nn.Parameter, quantizer: Quantizer, ctx: QuantizeContext, source: tuple[Tensor | None, bool]
) -> Conversion:
    """`source` is the master, and whether to preserve the values in high precision."""
    master, preserve = source
    shard, holder = shard_of(weight), _spread(weight)
    if master is not None and (holder is not None or master.shape != weight.shape):
        shapes = f"{tuple(master.shape)} for the weight of {name}, which is {tuple(shard.shape)}"
        raise UserError(f"a master of shape {shapes}; give its own")
    values = shard.detach()
    if master is not None:  # copied: an Identity plane is an alias of its source
        values = master.detach().to(device=weight.device, dtype=weight.dtype, copy=True)
    columnwise = isinstance(shard, QuantizedTensor) and shard.get_usages()["columnwise"]
    if isinstance(values, QuantizedTensor):
        values = values.values(weight.dtype)
    if not _is_plain(quantizer):
        values.requires_grad_(False)
        if holder is not None:
            if any(quantizer.delayed):
                raise UserError(f"the weight of {name} is cut over ranks, unlike its delayed scales; use current ones")
            ctx = dataclasses.replace(ctx, shard=shard_context(holder, (quantizer.rowwise, quantizer.columnwise)))
        new = quantized_parameter(values, quantizer, preserve=preserve, columnwise=columnwise, ctx=ctx, exact=master)
    elif isinstance(shard, QuantizedTensor) or master is not None:
        new = nn.Parameter(values.clone(), requires_grad=weight.requires_grad)
    else:
        new = weight
    if holder is not None and new is not weight:
        local = new.detach()
        if isinstance(local, QuantizedTensor):
            local.context = dataclasses.replace(local.context, shard=ctx.shard)
        new = nn.Parameter(type(holder)(local, holder._spec, requires_grad=False), weight.requires_grad)
    return Conversion(weight, new, quantizer, values)


def _is_held(weight: Tensor, quantizer: Quantizer) -> bool:
    """Whether a weight has both planes in the formats of a quantizer, with scales of its own."""
    if not isinstance(weight, QuantizedTensor) or None in weight.planes:
        return False
    return weight.quantizer == quantizer and not any(quantizer.delayed)


def _spread(weight: Tensor) -> "DTensor | None":
    return weight if is_distributed(weight) else None


def _publish(conversions: list[Conversion]) -> None:
    """Give all parameter objects their new contents, or none of them."""
    converted: list[Conversion] = []
    try:
        for conversion in conversions:
            if conversion.new is not conversion.old:
                before = version_of(conversion.old)
                first, last = vars(conversion.old).get(CONVERTED, (before, before))
                replace(conversion.old, conversion.new)
                converted.append(conversion)
                setattr(conversion.old, CONVERTED, (first if last == before else before, version_of(conversion.old)))
    except UserError:
        for conversion in reversed(converted):
            torch.utils.swap_tensors(conversion.old, conversion.new)
        raise


def _is_plain(quantizer: Quantizer) -> bool:
    return quantizer.rowwise == quantizer.columnwise == IDENTITY


def _masters(model: nn.Module, weights: set[int], masters: Mapping[str, Tensor]) -> dict[int, Tensor]:
    """Masters by the identity of the weight. UserError if a name is not a weight of a planned module."""
    require_masters(masters)
    names = {n: id(p) for n, p in model.named_parameters(remove_duplicate=False) if id(p) in weights}
    unknown = sorted(set(masters) - set(names))
    if unknown:
        raise UserError(f"masters has {unknown[0]!r}, which is no weight of a converted module; give full names")
    return {names[name]: master for name, master in masters.items()}

"""convert_parameters: the weights of a whole model to other formats, or to high precision, or not at all."""

from collections.abc import Mapping

from torch import Tensor, nn

from duotone.errors import UserError
from duotone.formats import IDENTITY
from duotone.linear.plan import build_plan
from duotone.modules.parameters import quantized_parameter, replace
from duotone.modules.planned import Planned
from duotone.recipes.recipe import Recipe
from duotone.tensor import QuantizedTensor, Quantizer


def convert_parameters(
    model: nn.Module, recipe: Recipe, *, masters: Mapping[str, Tensor] | None = None, preserve: bool = False
) -> nn.Module:
    """Hold the weight of every planned module in the formats that `recipe` gives it, in place; returns the model.

    Values come from `masters`, by full parameter name, where it has them, else from the weights, dequantized. Weights
    that the recipe keeps in high precision become plain again. Parameters stay the same objects. The recipe becomes the
    modules' own. `preserve` keeps the high-precision values on the CPU. Raises before anything changes.
    """
    names = {id(p): name for name, p in model.named_parameters(remove_duplicate=False)}
    made: dict[int, tuple[nn.Parameter, nn.Parameter, Quantizer]] = {}
    planned = [(name, module) for name, module in model.named_modules() if isinstance(module, Planned)]
    owners = _owners(model)
    for name, module in planned:
        weight = module.weight
        setting = module.setting(recipe, weight.device.type, weight.dtype)
        quantizer = build_plan(setting.without_held()).weight
        before = made.get(id(weight))
        if before is not None and before[2] != quantizer:
            raise UserError(f"the weight of {name} is tied to one of another format; give both the same by a rule")
        plain = quantizer.rowwise == quantizer.columnwise == IDENTITY
        if not plain and owners[id(weight)] > sum(id(m.weight) == id(weight) for _, m in planned):
            raise UserError(
                f"the weight of {name} is tied to a module that is not converted; keep it in high precision"
            )
        if before is None:
            made[id(weight)] = (
                weight,
                _new(weight, quantizer, (masters or {}).get(names[id(weight)]), preserve),
                quantizer,
            )
    for old, new, _ in made.values():
        if new is not old:
            replace(old, new)
    for _, module in planned:
        module.recipe = recipe
        module.prepare(recipe)
    return model


def _new(weight: nn.Parameter, quantizer: Quantizer, master: Tensor | None, preserve: bool) -> nn.Parameter:
    if master is not None and master.shape != weight.shape:
        raise UserError(f"a master of shape {tuple(master.shape)} for a weight of {tuple(weight.shape)}; give its own")
    held = isinstance(weight, QuantizedTensor)
    plain = quantizer.rowwise == quantizer.columnwise == IDENTITY
    if master is None and (plain and not held):
        return weight
    values = weight.detach() if master is None else master.detach().to(device=weight.device, dtype=weight.dtype)
    if isinstance(values, QuantizedTensor):
        values = values.values(weight.dtype)
    if plain:
        return nn.Parameter(values.clone(), requires_grad=weight.requires_grad)
    return quantized_parameter(values.requires_grad_(False), quantizer, preserve=preserve)


def _owners(model: nn.Module) -> dict[int, int]:
    """How many modules hold each parameter."""
    count: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            count[id(parameter)] = count.get(id(parameter), 0) + 1
    return count

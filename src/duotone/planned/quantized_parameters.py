"""Quantized parameters: weights that exist only as planes, made when a module is built or converted all at once."""

from collections.abc import Callable, Iterable
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.errors import MissingPlaneError, UserError
from duotone.formats import IDENTITY
from duotone.linear.core import record
from duotone.planned.split_parameters import is_split
from duotone.state.autocast_context import DEFAULT_RECIPE, HIGH_PRECISION
from duotone.state.parameters import construction
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.plane_tensor import INIT_VALUE
from duotone.tensor.state_entry import ENTRY, mark_entry

if TYPE_CHECKING:
    from duotone.planned.planned import Planned

INTERNAL = ("_rowwise", "_columnwise", "quantizer", "context", "is_piece", "_shells", ENTRY)
"""What a quantized tensor keeps in its __dict__; everything else there is a mark of the user."""


def quantized_parameter(
    weight: Tensor, quantizer: Quantizer, *, preserve: bool, columnwise: bool = False, ctx: QuantizeContext = LOCAL
) -> nn.Parameter:
    """A parameter over planes of `weight` alone; columnwise planes where gradients are enabled now, or asked for.

    `preserve` keeps the high-precision values on the CPU: `get_high_precision_init_val()`.
    """
    usage = Usage(True, columnwise or torch.is_grad_enabled())
    requires_grad = weight.requires_grad
    parameter = nn.Parameter(quantizer.make(weight, usage, ctx), requires_grad=requires_grad)
    if preserve:
        setattr(parameter, INIT_VALUE, weight.detach().to("cpu", copy=True))
    return parameter


def quantize_weights(module: "Planned") -> None:
    """Inside of `quantized_model_init`, keep planes of the module's weights only."""
    region = construction()
    if region is None or not region.enabled:
        return
    if is_split(module):
        remedy = "use one (attention: fuse_qkv_params=True)"
        raise UserError(f"{module.module_name}: parameters_split excludes quantized_model_init; {remedy}")
    recipe = region.recipe or (DEFAULT_RECIPE if module.recipe == HIGH_PRECISION else module.recipe)
    quantizer = module.plans.plan(recipe).weight.quantizer
    module.recipe = recipe if module.recipe == HIGH_PRECISION else module.recipe
    if quantizer.rowwise == quantizer.columnwise == IDENTITY:
        return
    values = {id(weight): weight.detach() for weight in module.weight_parameters}
    for name, weight in list(module.named_parameters(recurse=False)):
        if id(weight) in values:
            parameter = quantized_parameter(weight, quantizer, preserve=region.preserve_high_precision_init_val)
            module.refuse_held(parameter)
            setattr(module, name, parameter)
    if any(quantizer.delayed):
        module.plans.prepare(recipe)
        for weight, value in zip(module.weight_parameters, values.values(), strict=True):
            assert isinstance(weight, QuantizedTensor)
            record(weight.context, value)


def replace(old: Tensor, new: nn.Parameter) -> None:
    """Make the parameter object `old` be `new`, so that optimizers and ties keep it; its gradient and marks stay.

    An initial value stays as long as nothing was written, because `new` starts with no writes.
    """
    new.requires_grad_(old.requires_grad)
    initial = isinstance(new, QuantizedTensor) and old._version == 0
    for name, value in vars(old).items():
        if name not in INTERNAL and (name != INIT_VALUE or initial):
            vars(new).setdefault(name, value)
    if old.grad is not None and new.grad is None:
        new.grad = old.grad.to(device=new.device, dtype=new.dtype)
    torch.utils.swap_tensors(old, new)


def moved(parameter: QuantizedTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply a module-wide conversion to a quantized parameter: device and nominal dtype follow, bytes stay."""
    probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
    if probe.device == parameter.device and probe.dtype == parameter.dtype:
        return

    def move(part: Tensor) -> Tensor:
        return torch.empty_like(part, device=probe.device) if part.is_meta else part.to(probe.device)

    planes = parameter.planes.map(move)
    tensor = QuantizedTensor(planes, parameter.quantizer, parameter.shape, probe.dtype, device=probe.device)
    tensor.context = parameter.context
    replace(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def mark_entries(state_dict: dict[str, Any], prefix: str, parameters: Iterable[str]) -> None:
    """Let code that saves a state_dict read the values of quantized parameters at their address."""
    for name in parameters:
        mark_entry(state_dict.get(prefix + name))


def drop_empty_extra_state(state_dict: dict[str, Any], prefix: str) -> None:
    """Take out what Transformer Engine saves for modules without state; anything else stays and is unexpected."""
    extra = state_dict.get(f"{prefix}_extra_state", ...)
    if extra is None or (isinstance(extra, Tensor) and not extra.numel()):
        del state_dict[f"{prefix}_extra_state"]


def demand(parameter: QuantizedTensor, usage: Usage, module: str) -> None:
    """Derive what a plan reads and the parameter lacks. MissingPlaneError, naming the module, where that would lose."""
    try:
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            parameter.update_usage(usage.rowwise or None, usage.columnwise or None)
    except MissingPlaneError as error:
        raise MissingPlaneError(f"the weight of {module}: {error}") from None


def follow(parameter: QuantizedTensor, wanted: Quantizer) -> None:
    """Describe later writes as a recipe wants them, if they are stored alike. Planes and bytes do not change."""
    quantizer = parameter.quantizer
    if type(wanted) is not Quantizer or type(quantizer) is not Quantizer or wanted == quantizer:
        return
    described = replace_fields(
        wanted, rowwise=wanted.rowwise or quantizer.rowwise, columnwise=wanted.columnwise or quantizer.columnwise
    )
    if all(
        plane is None or (fmt is not None and plane.format.stored == fmt.stored)
        for plane, fmt in zip(parameter.planes, (described.rowwise, described.columnwise), strict=True)
    ):
        parameter.quantizer = described

"""Weights of planned modules: their initial values, weights that exist only as planes, and shards of DTensors."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace as replace_fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from duotone.comm import require_same
from duotone.errors import MissingPlaneError, UserError
from duotone.formats import IDENTITY
from duotone.linear.core import record
from duotone.modules.base import PlannedModule
from duotone.modules.delayed_states import name_on_all_ranks, weight_context
from duotone.modules.sent_weights import send_planes
from duotone.modules.split_parameters import is_split, require_one_weight
from duotone.pipeline.titles import title
from duotone.sharding.dtensors import is_distributed, link_shards, shard_of, version_of
from duotone.sharding.layout import compared
from duotone.state.autocast_context import DEFAULT_RECIPE, HIGH_PRECISION
from duotone.state.delayed import DelayedState
from duotone.state.parameters import construction
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.plane_tensor import ENTRY, INIT_VALUE, PlaneTensor, mark_entry

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


INITIALISER = "_init_method"
PRESERVES = "_preserves_init_values"


def keep_initialiser(module: nn.Module, init_method: Callable[[Tensor], object] | None) -> None:
    """Remember the function that fills the weights. Call it before nn.Module's constructor."""
    module.__dict__[INITIALISER] = init_method


def materialise(module: nn.Module) -> None:
    """Move parameters from meta to the default device, or to the device of their mesh. Only delayed scales have values.

    Nothing happens if the default device is meta.
    """
    device = torch.get_default_device()
    absent = [p for p in module.parameters(recurse=False) if p.is_meta]
    if not absent or device.type == "meta":
        return
    meshes = [p.device_mesh.device_type for p in absent if is_distributed(p)]
    for part in (module, *(child for child in module.children() if isinstance(child, DelayedState))):
        part.to_empty(device=meshes[0] if meshes else device, recurse=False)


def initialise(module: nn.Module, default: Callable[[], None] | None = None) -> None:
    """Materialise a module that is on meta, and fill its parameters.

    An `init_method` fills the weights, and biases are zero. Without one, `default` or torch's rule for linears does.
    """
    if hasattr(module, "module_name"):  # at construction the caller's device decides
        materialise(module)
    init_method = module.__dict__.get(INITIALISER)
    with preserved_values(module), torch.no_grad():
        if init_method is None and default is not None:
            default()
            return
        fan_in: int = module.in_features  # type: ignore[assignment]
        bound = fan_in**-0.5 if fan_in else 0.0
        for name, parameter in module.named_parameters(recurse=False):
            if init_method is None:
                nn.init.uniform_(parameter, -bound, bound)
            elif "bias" in name:
                parameter.zero_()
            elif "layer_norm" not in name:
                init_method(parameter)


@contextmanager
def preserved_values(module: nn.Module) -> Iterator[None]:
    """If the module preserves initial values, let the caller fill plain tensors; quantized weights are their codes."""
    parameters = dict(module.named_parameters(recurse=False)) if PRESERVES in vars(module) else {}
    weights = {name: p for name, p in parameters.items() if isinstance(shard_of(p), QuantizedTensor)}
    plain = {name: nn.Parameter(torch.zeros_like(p), requires_grad=False) for name, p in weights.items()}
    module._parameters.update(plain)
    try:
        yield
    finally:
        module._parameters.update(weights)
    for name, weight in weights.items():
        shard, values = shard_of(weight), shard_of(plain[name]).detach()
        if shard._version == 0:  # the first fill counts as no write: masters start from the values
            write_unseen(shard, values)
        else:
            with torch.no_grad():
                shard.copy_(values)
        if not values.is_meta:
            setattr(shard, INIT_VALUE, values.to("cpu", copy=True))


def write_unseen(parameter: Tensor, values: Tensor) -> None:
    """Write values, in their dtype, into a parameter that nothing wrote before. It counts as no write."""
    with torch.no_grad():
        parameter.copy_(values)
    torch._C._autograd._unsafe_set_version_counter((parameter,), (0,))  # type: ignore[attr-defined]


INTERNAL = ("_rowwise", "_columnwise", "quantizer", "context", "is_piece", "is_blank", "gathers", "_shells", ENTRY)
"""What a quantized tensor keeps in its __dict__; everything else there is a mark of the user."""


def quantized_parameter(
    weight: Tensor,
    quantizer: Quantizer,
    *,
    preserve: bool,
    columnwise: bool = False,
    ctx: QuantizeContext = LOCAL,
    exact: Tensor | None = None,
) -> nn.Parameter:
    """A parameter that holds only planes of `weight`; with columnwise ones if asked for, or if gradients are enabled.

    `preserve` keeps high-precision values of `weight` on the CPU: `get_high_precision_init_val()`. `exact`: its values
    before they were rounded to its dtype, from which codes are rounded once.
    """
    usage = Usage(True, columnwise or torch.is_grad_enabled())
    requires_grad = weight.requires_grad
    parameter = nn.Parameter(quantizer.make(weight, usage, ctx), requires_grad=requires_grad)
    forget_bases(parameter)
    if exact is not None:
        write_unseen(parameter, exact)
    if preserve and not weight.is_meta:
        setattr(parameter, INIT_VALUE, weight.detach().to("cpu", copy=True))
    return parameter


def forget_bases(parameter: nn.Parameter) -> None:
    """Let buffers of planes be no views for torch. Their memory stays.

    What compiles a graph over an input with a view in it is never freed: the view holds its base outside of Python.
    """
    if isinstance(parameter, QuantizedTensor):
        whole = parameter.planes.map(lambda part: part if part.is_inference() or not part._is_view() else part.data)
        parameter._rowwise, parameter._columnwise = whole


def quantize_weights(module: PlannedModule) -> None:
    """Inside of `quantized_model_init`, replace the module's weights by quantized parameters."""
    region = construction()
    if region is None or not region.enabled:
        return
    require_one_weight(module, title(module))
    recipe = region.recipe or (DEFAULT_RECIPE if module.recipe == HIGH_PRECISION else module.recipe)
    plan = module.plans.plan(recipe)
    quantizer = plan.weight.quantizer
    module.recipe = recipe if module.recipe == HIGH_PRECISION else module.recipe
    if quantizer.rowwise == quantizer.columnwise == IDENTITY:
        return
    if region.preserve_high_precision_init_val:
        module.__dict__[PRESERVES] = True  # `reset_parameters` does so too
    values = {id(weight): weight.detach() for weight in module.weight_parameters}
    members = {id(weight): member for member, weight in enumerate(module.weight_parameters)}
    for name, weight in list(module.named_parameters(recurse=False)):
        if id(weight) in values:
            ctx = weight_context(module, plan, members[id(weight)])
            parameter = quantized_parameter(
                weight, quantizer, preserve=region.preserve_high_precision_init_val, ctx=ctx
            )
            module.refuse_held(parameter)
            setattr(module, name, parameter)
    if any(quantizer.delayed):
        module.plans.prepare(recipe)
        for weight, value in zip(module.weight_parameters, values.values(), strict=True):
            assert isinstance(weight, QuantizedTensor)
            record(weight.context, value)


def replace(old: Tensor, new: nn.Parameter) -> None:
    """Make the parameter object `old` be `new`, so that optimizers and ties keep it; gradient, hooks and marks stay.

    An initial value stays as long as nothing was written, because `new` starts with no writes. UserError if something
    holds a weak reference to `old`.
    """
    new.requires_grad_(old.requires_grad)
    forget_bases(new)
    initial = isinstance(new, QuantizedTensor) and old._version == 0
    for name, value in vars(old).items():
        if name not in INTERNAL and (name != INIT_VALUE or initial):
            vars(new).setdefault(name, value)
    # A gradient on meta has no values to move.
    if old.grad is not None and new.grad is None and (new.is_meta or not old.grad.is_meta):
        new.grad = old.grad.to(device=new.device, dtype=new.dtype)
    for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks"):
        setattr(new, hooks, getattr(old, hooks))  # torch keeps them at what is swapped
    try:
        torch.utils.swap_tensors(old, new)
    except RuntimeError as error:
        text = " ".join(str(error).split())
        raise UserError(
            "a weight cannot be converted, cast or moved while something holds it, as compiled code does: "
            f"{text}; do so before the model is compiled, and when no output with a graph is alive"
        ) from error


def moved(parameter: QuantizedTensor, fn: Callable[[Tensor], Tensor]) -> None:
    """Apply `fn` of `nn.Module._apply` to a quantized parameter: device and nominal dtype change, bytes do not.

    Buffers move to shared memory if `fn` does that.
    """
    probe = fn(torch.empty(0, dtype=parameter.dtype, device=parameter.device))
    if probe.is_cpu and probe.is_shared():
        parameter.share_memory_()
    if probe.device == parameter.device and probe.dtype == parameter.dtype:
        return

    def move(part: Tensor) -> Tensor:
        return torch.empty_like(part, device=probe.device) if part.is_meta else part.to(probe.device)

    planes = parameter.planes.map(move)
    tensor = QuantizedTensor(planes, parameter.quantizer, parameter.shape, probe.dtype, device=probe.device)
    tensor.context = parameter.context
    replace(parameter, nn.Parameter(tensor, requires_grad=parameter.requires_grad))


def stay_quantized(parameter: "DTensor", shard: Tensor) -> None:
    """Give a DTensor its quantized shard back if a conversion dequantized it. Nominal dtype and device follow."""
    values = shard_of(parameter)
    if isinstance(shard, QuantizedTensor) and not isinstance(values, QuantizedTensor):
        planes = shard.planes.map(lambda part: part.to(values.device))
        parameter._local_tensor = shard.with_planes(planes, dtype=values.dtype, device=values.device)


def mark_entries(state_dict: dict[str, Tensor], prefix: str, parameters: Iterable[str]) -> None:
    """Let code that saves a state_dict read the values of quantized parameters at their address."""
    for name in parameters:
        mark_entry(state_dict.get(prefix + name))


def show_values(module: nn.Module) -> None:
    """Let entries of the state_dict of a module be read at their address, also if it follows no plan."""
    if _mark_own_entries not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_mark_own_entries)


def _mark_own_entries(module: nn.Module, state_dict: dict[str, Tensor], prefix: str, metadata: object) -> None:
    mark_entries(state_dict, prefix, module._parameters)


def demand(parameter: QuantizedTensor, usage: Usage, module: object) -> None:
    """Derive planes that a plan reads and the parameter lacks. MissingPlaneError, which names the module, on a loss."""
    try:
        with torch.inference_mode(False):  # an inference tensor could not be written in training
            parameter.update_usage(usage.rowwise or None, usage.columnwise or None)
    except MissingPlaneError as error:
        raise MissingPlaneError(f"the weight of {title(module)}: {error}") from None


def follow(parameter: PlaneTensor, target: Quantizer) -> None:
    """Let later writes follow a quantizer of the same stored formats. Planes and bytes do not change."""
    quantizer = parameter.quantizer
    if type(target) is not Quantizer or type(quantizer) is not Quantizer or target == quantizer:
        return
    described = replace_fields(
        target, rowwise=target.rowwise or quantizer.rowwise, columnwise=target.columnwise or quantizer.columnwise
    )
    if all(
        plane is None or (fmt is not None and plane.format.stored == fmt.stored)
        for plane, fmt in zip(parameter.planes, (described.rowwise, described.columnwise), strict=True)
    ):
        parameter.quantizer = described


def described(module: PlannedModule, name: str, *, with_formats: bool = True) -> list[str]:
    """The recipe of a module, and the formats and delayed parameters of its slots, in words that ranks compare."""
    answers = module.plans.answer(module.recipe) if with_formats else {}
    words = (f"{name}: {slot} {word}" for slot, quantizer in answers.items() for word in compared(quantizer))
    return [f"{name}: {module.recipe.name}", *words]


def _require_same_recipe(module: PlannedModule) -> None:
    """UserError on all ranks if one of them shards the module under another recipe."""
    meshes = [holder.device_mesh for holder in module._parameters.values() if is_distributed(holder)]
    is_whole = bool(meshes) and not is_split(module)  # pieces of a weight become shards one after the other
    names = described(module, name_on_all_ranks(module), with_formats=is_whole)
    devices = {group.group_name: mesh.device_type for mesh in meshes for group in mesh.get_all_groups()}
    unlike = "do not build the same linears", "give every rank the same model and recipe before fully_shard"
    for group, device in devices.items():  # in one order on all ranks
        require_same(names, torch.device(device), group, unlike)


def _require_gradients(module: PlannedModule) -> None:
    """UserError if autograd does not get the gradients of a module's shards, which FSDP2 reduces in its backward."""
    if (module.fuse_wgrad_accumulation or module.delay_wgrad_compute) and any(map(is_distributed, module.parameters())):
        raise UserError(
            f"{title(module)}: FSDP2 reduces gradients when backward ends, and does not see those in main_grad or "
            "of backward_dw; leave fuse_wgrad_accumulation and delay_wgrad_compute out"
        )


def lacks_rowwise(weight: Tensor) -> bool:
    """Whether FSDP2 has gathered the weight without its rowwise plane. Guards of graphs ask, too."""
    return isinstance(weight, QuantizedTensor) and weight.gathers is not None and not weight.gathers.valid.rowwise


def records_amaxes(weight: Tensor) -> bool:
    """Whether each forward records amaxes that the shards of `gather_quantized` agreed on."""
    return isinstance(weight, QuantizedTensor) and weight.gathers is not None and weight.gathers.is_delayed


def is_sent(weight: Tensor) -> bool:
    """Whether FSDP2 has gathered planes of a plain weight."""
    param = weight.gathers.param if isinstance(weight, QuantizedTensor) and weight.gathers is not None else None
    return param is not None and not isinstance(param._sharded_local_tensor, QuantizedTensor)


def _hand_slots(whole: object, holder: object) -> None:
    """Let writes of a new shard follow the delayed scales of the weight that it is a part of."""
    shard = shard_of(holder) if isinstance(holder, Tensor) else None
    if isinstance(shard, QuantizedTensor) and isinstance(whole, QuantizedTensor):
        if shard.context.slots == (None, None):
            shard.context = replace_fields(shard.context, slots=whole.context.slots)


class ShardedParameters(PlannedModule):
    """Lets FSDP2 and tensor parallelism of DTensors cut the parameters of a module, or refuses."""

    distributes: tuple[str, ...] = ()
    """The parameters that may become DTensors by something else than FSDP2."""
    row_order = ""
    """Why ranks must not cut the rows of the weight, and what to do; "" if they may."""

    def __setattr__(self, name: str, value: object) -> None:
        """As nn.Module. FSDP2 sets shards and whole parameters in turn, where this is not nn.Module's `__setattr__`."""
        parameters = self.__dict__.get("_parameters", {}) if isinstance(value, nn.Parameter) else {}
        if name in parameters and (is_distributed(value) or is_distributed(parameters[name])):
            _hand_slots(parameters[name], value)
            if is_distributed(parameters[name]):  # FSDP2 gathers without a new version
                value.version_of_shard = version_of(parameters[name])  # type: ignore[union-attr]
            parameters[name] = value
        else:
            super().__setattr__(name, value)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As nn.Module. UserError if a parameter that must stay plain would become a DTensor."""
        if is_distributed(param) and not is_distributed(self._parameters.get(name)):
            if name not in self.distributes:
                self._refuse(name)
            if self.row_order and any(placement.is_shard(0) for placement in param.placements):
                raise UserError(f"{title(self)}: {self.row_order}")
        super().register_parameter(name, param)  # type: ignore[arg-type]

    def register_load_state_dict_post_hook(self, hook: Callable[..., object]) -> object:
        """As nn.Module. FSDP2 calls it directly after it has replaced a parameter by its shard."""
        link_shards(self._parameters.values())  # first: shards that it refuses would leave other ranks waiting
        _require_same_recipe(self)
        _require_gradients(self)
        send_planes(self)
        self.plans.forget_stages()
        return super().register_load_state_dict_post_hook(hook)

    def require_whole(self) -> None:
        """UserError if a parameter is a DTensor in a forward. FSDP2 has gathered its parameters by then."""
        for name, parameter in self._parameters.items():
            if is_distributed(parameter):
                self._refuse(name)

    def _refuse(self, name: str) -> None:
        raise UserError(
            f"{title(self)} takes no {name} that is a DTensor; give "
            "parallelize_module plain linears of one output, whose weights are whole and not quantized, or leave the "
            "module out and build it with parallel_mode=, tp_group="
        )

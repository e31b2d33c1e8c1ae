"""Ranks that follow the same recipes. They are compared on request, and when DistributedDataParallel takes a model."""

import gc
import warnings
from typing import TypeGuard

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from duotone.comm import require_same
from duotone.modules.base import PlannedModule
from duotone.modules.delayed_states import STATES
from duotone.modules.weights import described
from duotone.numbered import never_compiled
from duotone.state.seeds import BUFFER

UNLIKE = "do not follow the same recipes", "convert the model alike on all ranks"


def require_same_recipes(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise UserError on all ranks of `group` (all by default) if their models follow different recipes or formats.

    `fully_shard` and DistributedDataParallel compare them without this call. One collective of two numbers on the
    device of the parameters. Without a process group nothing is compared.
    """
    if not dist.is_initialized():
        return
    names = [text for name, module in model.named_modules() if is_planned(module) for text in described(module, name)]
    device = next(model.parameters()).device
    require_same(names, device, (group or dist.distributed_c10d._get_default_group()).group_name, UNLIKE)


def is_planned(module: nn.Module) -> TypeGuard[PlannedModule]:
    """Whether a module follows recipes now."""
    return isinstance(module, PlannedModule) and "plans" in vars(module)


class NotBroadcast(set[str]):
    """Names that DistributedDataParallel leaves out of its collectives, with those of delayed states and of seeds.

    These follow from the calls of a rank, and some calls create them. So ranks may have others.
    """

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or not {*STATES, BUFFER}.isdisjoint(str(name).split("."))


def leave_to_ranks(model: nn.Module) -> None:
    """Let each DistributedDataParallel that took a part of the model before it followed recipes leave these out too.

    A part does not know its wrapper, so all objects of the process are looked at.
    """
    parts, wrapper_class = set(model.modules()), nn.parallel.DistributedDataParallel
    for each in gc.get_objects() if dist.is_initialized() else ():
        if issubclass(type(each), wrapper_class) and not parts.isdisjoint(each.modules()):
            each.parameters_to_ignore = NotBroadcast(each.parameters_to_ignore)


class WrappedModels:
    """Compares the ranks of DistributedDataParallel when its constructor takes a model, before it communicates.

    A model in which nothing follows recipes costs no collective: other ranks may not know of Duotone. Groups without a
    name, which some libraries bring, cannot be asked.
    """

    def __init__(self) -> None:
        self.is_registered = False

    def register(self) -> None:
        """Start to compare, unless it was started before."""
        if not self.is_registered:
            self.is_registered = True
            register_module_module_registration_hook(self)

    @never_compiled  # torch makes modules while it compiles, and Dynamo would trace this call for each
    def __call__(self, wrapper: nn.Module, name: str, model: nn.Module | None) -> None:
        if name != "module" or not isinstance(wrapper, nn.parallel.DistributedDataParallel) or model is None:
            return
        is_constructed, planned = name in wrapper._modules, [*filter(is_planned, model.modules())]
        if is_constructed or not planned or wrapper.process_group not in dist.distributed_c10d._world.pg_map:
            return
        require_same_recipes(model, wrapper.process_group)
        wrapper.parameters_to_ignore = NotBroadcast(wrapper.parameters_to_ignore)
        if any(module.fuse_wgrad_accumulation or module.delay_wgrad_compute for module in planned):
            text = "DistributedDataParallel reduces no gradient in main_grad or of backward_dw; reduce them yourself"
            warnings.warn(f"{text}, as in register_wgrad_accumulation_and_reduce_hooks", stacklevel=4)


WRAPPED = WrappedModels()

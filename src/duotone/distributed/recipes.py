"""Ranks that follow the same recipes."""

import torch.distributed as dist
from torch import nn

from duotone.comm import require_same
from duotone.planned.planned import Planned
from duotone.planned.weights import described

UNLIKE = "do not follow the same recipes", "convert the model alike on all ranks"


def require_same_recipes(model: nn.Module, group: dist.ProcessGroup | None = None) -> None:
    """Raise UserError on all ranks of `group` (all by default) if their models follow other recipes or formats.

    `fully_shard` compares them itself. DistributedDataParallel does not: call this before it. One collective of two
    numbers on the device of the parameters. Without a process group nothing is compared.
    """
    if not dist.is_initialized():
        return
    modules = ((name, module) for name, module in model.named_modules() if isinstance(module, Planned))
    names = [text for name, module in modules for text in described(module, name)]
    device = next(model.parameters()).device
    require_same(names, device, (group or dist.distributed_c10d._get_default_group()).group_name, UNLIKE)

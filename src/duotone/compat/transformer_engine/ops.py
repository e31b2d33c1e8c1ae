"""Fusible ops that take the arguments of Transformer Engine's."""

import torch
from torch import Tensor, nn

from duotone import ops
from duotone.compat.transformer_engine.options import Options
from duotone.compat.transformer_engine.their_arguments import default_device, ranks
from duotone.errors import UserError

RENAMED = {
    "dtype": "params_dtype",
    "tensor_parallel_mode": "parallel_mode",
    "tensor_parallel_group": "tp_group",
    "accumulate_into_main_grad": "fuse_wgrad_accumulation",
}
UNUSED = ("rng_state_tracker_function", "tensor_parallel_size")
"""Options that may only be unset."""


def uniform(weight: Tensor) -> None:
    """Fill a weight as torch fills those of its linears."""
    nn.init.kaiming_uniform_(weight, a=5**0.5)


def _options(title: str, options: dict[str, object]) -> Options:
    for name in UNUSED:
        if options.pop(name, None) not in (None, 1):
            raise UserError(f"te.ops.{title}({name}=) has no counterpart in Duotone; leave it out")
    named: Options = {RENAMED.get(name, name): value for name, value in options.items()}
    if ranks(named) == 1:
        for name in ("parallel_mode", "tp_group", "sequence_parallel"):
            named.pop(name, None)
    return {"device": named.pop("device", None) or default_device(), "init_method": uniform, **named}


class TakesTheirOptions:
    """Mixed in before a linear of Duotone. Biases are zero at first."""

    def __init__(self, *sizes: int, **options: object) -> None:
        super().__init__(*sizes, **_options(type(self).__name__, options))


class BuiltOnTheirDevice:
    """Mixed in before an op that is built on the GPU where nothing else is asked for."""

    def __init__(self, *sizes: int, device: torch.device | str | None = None, **options: object) -> None:
        super().__init__(*sizes, device=device or default_device(), **options)  # type: ignore[call-arg]


def _with(mixin: type, op: type) -> type:
    return type(op.__name__, (mixin, op), {"__module__": __name__})


Linear, BasicLinear = _with(TakesTheirOptions, ops.Linear), _with(TakesTheirOptions, ops.BasicLinear)
GroupedLinear, Bias = _with(TakesTheirOptions, ops.GroupedLinear), _with(BuiltOnTheirDevice, ops.Bias)
LayerNorm, RMSNorm = _with(BuiltOnTheirDevice, ops.LayerNorm), _with(BuiltOnTheirDevice, ops.RMSNorm)

"""Fusible ops that take the arguments of Transformer Engine's."""

from typing import Any

from torch import Tensor, nn

from duotone import ops
from duotone.compat.transformer_engine.options import Options
from duotone.compat.transformer_engine.pytorch import default_device
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
    """As torch fills the weights of its linears."""
    nn.init.kaiming_uniform_(weight, a=5**0.5)


def _options(title: str, options: Options) -> Options:
    for name in UNUSED:
        if options.pop(name, None) not in (None, 1):
            raise UserError(f"te.ops.{title}({name}=) has no counterpart in Duotone; leave it out")
    named = {RENAMED.get(name, name): value for name, value in options.items()}
    group = named.get("tp_group")
    if group is None or group.size() == 1:
        for name in ("parallel_mode", "tp_group", "sequence_parallel"):
            named.pop(name, None)
    return {"device": named.pop("device", None) or default_device(), "init_method": uniform, **named}


class Linear(ops.Linear):
    """Biases are zero at first."""

    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **_options("Linear", options))


class BasicLinear(ops.BasicLinear):
    def __init__(self, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(in_features, out_features, **_options("BasicLinear", options))


class GroupedLinear(ops.GroupedLinear):
    """Biases are zero at first."""

    def __init__(self, num_groups: int, in_features: int, out_features: int, **options: Any) -> None:
        super().__init__(num_groups, in_features, out_features, **_options("GroupedLinear", options))


class LayerNorm(ops.LayerNorm):
    def __init__(self, normalized_shape: int, *, device: Any = None, **options: Any) -> None:
        super().__init__(normalized_shape, device=device or default_device(), **options)


class RMSNorm(ops.RMSNorm):
    def __init__(self, normalized_shape: int, *, device: Any = None, **options: Any) -> None:
        super().__init__(normalized_shape, device=device or default_device(), **options)


class Bias(ops.Bias):
    def __init__(self, size: int, *, device: Any = None, **options: Any) -> None:
        super().__init__(size, device=device or default_device(), **options)

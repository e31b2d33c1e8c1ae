"""parameters_split: pieces of one weight become parameters that stay views of one buffer.

Where pieces are DTensors, those of a rank share a buffer too, and its weight is its rows of each piece.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from duotone.allocate import rows_below
from duotone.custom_gradient import with_gradient
from duotone.errors import UserError
from duotone.modules.base import PlannedModule
from duotone.pipeline.graph_patterns import find_joined_weights
from duotone.sharding.dtensors import is_distributed

Splits = Sequence[str] | Mapping[str, int] | None
ONE_WEIGHT = "build attention with fuse_qkv_params=True, an MLP without split_gate, a linear without parameters_split"


def split_parameters(module: PlannedModule, splits: Splits, out_features: int) -> None:
    """Replace `weight` and `bias` by parameters `<name>_weight` and `<name>_bias` over the same memory.

    The sizes are those of the whole linear, of which this rank may hold an equal part. UserError unless they sum to
    out_features and divide over the ranks.
    """
    if splits is None:
        return
    sizes = dict(splits) if isinstance(splits, Mapping) else {name: out_features // len(splits) for name in splits}
    wrong = [name for name in sizes if not isinstance(name, str) or "." in name or not name]
    if wrong:
        raise UserError(f"parameters_split names a piece {wrong[0]!r}; names are words without a dot")
    positive = all(isinstance(size, int) and size > 0 for size in sizes.values())
    if not sizes or not positive or sum(sizes.values()) != out_features:
        words = ", ".join(f"{name}={size}" for name, size in sizes.items()) or "nothing"
        raise UserError(f"parameters_split gives {words}, which must be positive and sum to {out_features}")
    ranks = out_features // module.weight.shape[0]
    odd = next((name for name, size in sizes.items() if size % ranks), None)
    if odd is not None:
        raise UserError(f"parameters_split gives {odd} {sizes[odd]} rows, which do not divide over {ranks} ranks")
    sizes = {name: size // ranks for name, size in sizes.items()}
    for kind in ("weight", "bias"):
        whole = module._parameters.pop(kind)
        if whole is None:
            module._parameters[kind] = None
            continue
        for name, piece in zip(sizes, whole.detach().split(list(sizes.values())), strict=True):
            module.register_parameter(f"{name}_{kind}", nn.Parameter(piece, requires_grad=whole.requires_grad))
    module.__dict__["_split_names"] = tuple(sizes)


def tensors_of(module: nn.Module, name: str) -> dict[str, Any]:
    """Where the tensor of a parameter is: FSDP1 makes it an attribute while the module runs."""
    return module._parameters if name in module._parameters else module.__dict__


def is_split(module: nn.Module) -> bool:
    """Whether the weight of a module is pieces."""
    return "_split_names" in module.__dict__


def require_one_weight(module: nn.Module, name: str) -> None:
    """UserError if the weight of the module of that name is pieces, which cannot be quantized parameters."""
    if is_split(module):
        names = ", ".join(f"{name}_weight" for name in module.__dict__["_split_names"])
        raise UserError(
            f"the weight of {name} is stored as {names}, and only one whole weight can be a quantized parameter; "
            f"{ONE_WEIGHT}"
        )


def pieces(module: nn.Module, kind: str) -> tuple[nn.Parameter, ...]:
    """The parameters that the "weight" or the "bias" is split into; none of a bias that is not there."""
    if kind in module._parameters:
        return ()
    names = [f"{name}_{kind}" for name in module.__dict__["_split_names"]]
    return tuple(parameter for name in names if (parameter := tensors_of(module, name)[name]) is not None)


def parameters_of(module: nn.Module, kind: str) -> tuple[nn.Parameter, ...]:
    """The parameters that the "weight" or the "bias" of a linear is, or is split into; none of an absent bias."""
    if is_split(module):
        return pieces(module, kind)
    parameter = module._parameters.get(kind)
    return () if parameter is None else (parameter,)


def whole_of(module: nn.Module, kind: str) -> Tensor:
    """The whole "weight" or "bias". If the pieces are DTensors, it has the shape alone: NaN, and not writable."""
    parts = pieces(module, kind)
    first = parts[0]
    if not is_distributed(first):
        return joined(parts)
    rows = sum(part.shape[0] for part in parts)
    with torch.inference_mode():
        nothing = torch.full((), torch.nan, dtype=first.dtype, device=first.device, requires_grad=first.requires_grad)
        return nothing.expand(rows, *first.shape[1:])


def share_buffer(module: nn.Module) -> None:
    """Put what this rank holds of pieces that are DTensors into one buffer, so that `joined` copies nothing."""
    for kind in ("weight", "bias"):
        parts = [part for part in pieces(module, kind) if is_distributed(part)]
        local = [part._local_tensor.detach() for part in parts]
        rows = rows_below(local).split([part.shape[0] for part in local]) if local else ()
        for part, piece in zip(parts, rows, strict=True):
            part._local_tensor = piece


def fit_pieces(module: nn.Module, kind: str, state_dict: dict[str, Tensor], prefix: str, names: Sequence[str]) -> None:
    """Let a linear in equal pieces load the "weight" or "bias" of one that is whole, and the other way round."""
    one, parts = f"{prefix}{kind}", [f"{prefix}{name}_{kind}" for name in names]
    if is_split(module) and one in state_dict:
        state_dict.update(zip(parts, state_dict.pop(one).chunk(len(parts)), strict=True))
    elif not is_split(module) and all(part in state_dict for part in parts):
        state_dict[one] = torch.cat([state_dict.pop(part) for part in parts])


def joined(parts: Sequence[Tensor]) -> Tensor:
    """As `rows_below`, with gradients."""
    if len(parts) == 1:
        return parts[0]
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        find_joined_weights()
        return torch.cat(list(parts))  # a trace knows no addresses; a row does
    sizes = [part.shape[0] for part in parts]
    return with_gradient(lambda *parts: rows_below(parts), lambda dy: dy.split(sizes), *parts)

"""parameters_split: pieces of one weight become parameters that stay views of one buffer."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from duotone.dispatch.graph_patterns import find_patterns
from duotone.dispatch.produced_ops import rows_below
from duotone.errors import UserError
from duotone.pipeline.autograd import with_gradient

if TYPE_CHECKING:
    from duotone.planned.linear import Linear

Splits = Sequence[str] | Mapping[str, int] | None


def split_parameters(module: "Linear", splits: Splits, out_features: int) -> None:
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


def pieces(module: nn.Module, kind: str) -> tuple[nn.Parameter, ...]:
    """The parameters that the "weight" or the "bias" is split into."""
    names = [f"{name}_{kind}" for name in module.__dict__["_split_names"]]
    return tuple(parameter for name in names if (parameter := tensors_of(module, name)[name]) is not None)


def joined(parts: Sequence[Tensor]) -> Tensor:
    """As `rows_below`, with gradients."""
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        find_patterns()
        return torch.cat(list(parts))  # a trace knows no addresses; the op of a cast does
    sizes = [part.shape[0] for part in parts]
    return with_gradient(lambda *parts: rows_below(parts), lambda dy: dy.split(sizes), *parts)

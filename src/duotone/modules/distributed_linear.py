"""A linear whose weight is a DTensor: what each rank multiplies, and how the output lies on the mesh.

| input | weight | output | gradient of the input |
|---|---|---|---|
| Replicate() | Shard(0) | Shard(-1) | Partial() |
| Shard(-1) | Shard(1) | Partial() | Shard(-1) |
| Replicate() | Replicate() | Replicate() | Replicate() |
| Shard(dim) | Replicate() | Shard(dim) | Shard(dim) |
| Shard(dim) | Shard(0) | Shard(-1) | Shard(dim) |
| Shard(-1) | Shard(1) | Shard(dim) | Shard(-1) |

`dim` is not the last. In the last two rows codes are gathered, those of the input and of the gradient of the output;
the last one takes a module whose `scatter_dim` is `dim`. Of a weight in pieces (`parameters_split`) a rank has rows of
each piece, so that no placement says how its columns of the output lie: `LocalPieces` hold them.
"""

from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from duotone.errors import UserError
from duotone.modules.base import PlannedModule
from duotone.modules.split_parameters import joined, parameters_of
from duotone.pipeline.op import refuse_distributed
from duotone.pipeline.titles import title
from duotone.sharding.dtensors import is_distributed
from duotone.sharding.layout import GatheringShards, ScatteringShards, Sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import Placement

    from duotone.sharding.activation_layout import ActivationLayout


class Placed(NamedTuple):
    """The layout of a call, how its output lies, and where the gradients of weight and bias are summed."""

    layout: Sharded
    output: "ActivationLayout"
    bias: "Placement"
    """The placement that the bias must have."""
    gradient: "Placement | None" = None
    """The placement of the gradients of weight and bias before their sum over the ranks. None without a sum."""


def placed(module: PlannedModule, x: "ActivationLayout | None") -> Placed:
    """The layout and placements of a call with an input placed like `x`. UserError if the weight does not fit it."""
    from torch.distributed.tensor import Partial, Replicate, Shard

    x, weight = _on_one_mesh(module, x)
    weights = parameters_of(module, "weight")
    group, y = x.group, x._replace(shape=(*x.shape[:-1], sum(part.shape[0] for part in weights)))
    columns = y._replace(placement=Shard(x.last), of_pieces=len(weights) > 1)
    match x.dim, weight:
        case None, Replicate():
            return Placed(Sharded(group), y, Replicate())
        case None, Shard(dim=0):
            return Placed(Sharded(group, weight_dim=0, grad_dim=1), columns, Shard(0))
        case dim, Shard(dim=1) if dim == x.last and module.scatter_dim is not None:
            rows = _even(module, x, module.scatter_dim)
            layout = ScatteringShards(group, input_dim=1, weight_dim=1, grad_dim=0)
            return Placed(layout, y._replace(placement=Shard(rows)), Replicate())
        case dim, Shard(dim=1) if dim == x.last:
            return Placed(Sharded(group, input_dim=1, weight_dim=1), y._replace(placement=Partial()), Replicate())
        case dim, Replicate() if dim != x.last:
            return Placed(Sharded(group, input_dim=0, grad_dim=0), y, Replicate(), Partial())
        case dim, Shard(dim=0) if dim is not None and dim != x.last:
            _even(module, x, dim)
            return Placed(GatheringShards(group, input_dim=0, weight_dim=0, grad_dim=1), columns, Shard(0))
    raise UserError(
        f"{title(module)}: its input is {x.placement!r} and its weight {weight!r}; allowed are an "
        "input of Shard(-1) with Shard(1), and any other with Shard(0) or Replicate()"
    )


def _even(module: PlannedModule, x: "ActivationLayout", dim: int) -> int:
    """`dim` from 0 on. UserError if it is the last one, or if the ranks do not divide it."""
    at = dim + len(x.shape) if dim < 0 else dim
    if not 0 <= at < x.last or x.shape[at] % x.mesh.size():
        raise UserError(
            f"{title(module)}: an input {x.shape} has no dimension {dim} before its last that divides over "
            f"{x.mesh.size()} ranks; pad it, or take the whole of it"
        )
    return at


def _on_one_mesh(module: PlannedModule, x: "ActivationLayout | None") -> tuple["ActivationLayout", "Placement"]:
    """How the input lies, and the placement of the weight on the same mesh. UserError if there is no such mesh."""
    from duotone.sharding.activation_layout import placement_of

    name, (weight, *others) = module.module_name, parameters_of(module, "weight")
    if not is_distributed(weight):
        refuse_distributed(module)
    if x is None:
        raise UserError(
            f"{title(module)}: its weight is a DTensor and its input is not; give it a DTensor, as the styles of "
            "parallelize_module do, and call a model of FSDP2 through its forward"
        )
    if module.fuse_wgrad_accumulation or module.delay_wgrad_compute:
        raise UserError(f"{title(module)}: DTensors give their gradients to autograd; leave fuse_ and delay_wgrad out")
    if weight.device_mesh != x.mesh:
        meshes = f"its weight is on {weight.device_mesh} and its input on {x.mesh}"
        raise UserError(f"{title(module)}: {meshes}; use one mesh")
    if any(not is_distributed(other) or other._spec.placements != weight.placements for other in others):
        raise UserError(f"{title(module)}: the pieces of its weight lie differently; give all of them one placement")
    return x, placement_of(weight, f"the weight of {name}")


def local_operands(module: PlannedModule, x: "ActivationLayout | None") -> tuple[Sharded, Tensor, Tensor | None]:
    """The layout of a call and this rank's weight and bias, whose gradients become DTensors like the parameters."""
    from duotone.sharding.activation_layout import placement_of, to_local

    call, name = placed(module, x), module.module_name
    for part in module.modules():  # `distribute_module` makes DTensors of seeds and delayed states too
        for key, buffer in part._buffers.items():
            if is_distributed(buffer):
                part._buffers[key] = buffer.to_local()
    weights = [weight for weight in parameters_of(module, "weight") if is_distributed(weight)]
    stored = placement_of(weights[0], f"the weight of {name}")
    every = parameters_of(module, "bias")
    biases = [bias for bias in every if is_distributed(bias)]
    if len(biases) < len(every) or any(placement_of(bias, f"the bias of {name}") != call.bias for bias in biases):
        raise UserError(f"{title(module)}: beside a weight of {stored!r} its bias has to be a DTensor of {call.bias!r}")
    weight = joined([to_local(weight, call.gradient or stored, stored) for weight in weights])
    bias = [to_local(bias, call.gradient or call.bias, call.bias) for bias in biases]
    return call.layout, weight, joined(bias) if bias else None

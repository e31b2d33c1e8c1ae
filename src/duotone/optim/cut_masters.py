"""Write quantized weights that are whole on every rank from masters that are cut over the ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from duotone.comm import all_gather, all_reduce
from duotone.errors import UserError
from duotone.optim.checks import check_writable
from duotone.sharding.dtensors import is_distributed
from duotone.tensor import QuantizedTensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


@torch.no_grad()
def quantize_master_weights(
    model_weights: Sequence[Tensor],
    master_weights: Sequence[Tensor | None],
    start_offsets: Sequence[int | None],
    group: "ProcessGroup | None" = None,
) -> None:
    """Write each weight as `weight.copy_(master.to(weight.dtype))` would from the whole master, bit for bit.

    `master_weights` are the flat pieces (n,) of this rank, in any floating dtype; `start_offsets` say where each begins
    in the flattened weight. A rank without a piece gives None for both. Every rank of `group`, all by default, calls
    this with the same weights, of any formats, and gets all of their planes. Preserved values are removed.

    UserError on all ranks, before anything is written, unless the pieces cover each weight once. UserError or
    MissingPlaneError if a weight cannot be written or is a DTensor.
    """
    name = (group or dist.group.WORLD).group_name  # type: ignore[union-attr]
    pieces = [*zip(model_weights, master_weights, start_offsets, strict=True)]
    for weight in model_weights:
        if is_distributed(weight):
            raise UserError("quantize_master_weights takes whole weights; use duotone.optim.AdamW for shards")
        check_writable(weight)
    places = [[-1 if start is None else start, 0 if master is None else master.numel()] for _, master, start in pieces]
    if not places:
        return
    table = all_gather(torch.tensor([places], device=model_weights[0].device), name).tolist()
    for at, weight in enumerate(model_weights):
        spans = sorted((start, start + count) for start, count in (of_rank[at] for of_rank in table) if count)
        if [0, *(end for _, end in spans)] != [*(start for start, _ in spans), weight.numel()]:
            raise UserError(
                f"the pieces of master {at} are at {spans}, and do not cover its {weight.numel()} elements once; "
                "give each rank's piece and its offset, or None for both"
            )
    for weight, master, start in pieces:
        words = torch.zeros(-(-weight.numel() * weight.dtype.itemsize // 4), dtype=torch.int32, device=weight.device)
        if master is not None and start is not None:
            words.view(weight.dtype)[start : start + master.numel()] = master
        whole = all_reduce(words, "sum", name).view(weight.dtype)  # bits, so that -0 stays
        weight.copy_(whole[: weight.numel()].view(weight.shape))
        if isinstance(weight, QuantizedTensor):
            weight.clear_high_precision_init_val()

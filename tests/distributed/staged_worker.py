"""Each collective through `staged`, whose copies here are of tensors on the CPU, against sums and slices by hand."""

from collections.abc import Callable
from pathlib import Path

import checks
import staged
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor

from duotone import recipes

staged.install("CPU", "CUDA")  # gloo has both devices, so the copies reach it as if they came from the other one
OP = dist.ReduceOp
SENT = [[1, 2], [3, 4]]
"""Rows that each rank sends to each."""


def rows(rank: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """What a rank has: 8 small integers, other ones on each."""
    return (torch.arange(8) + 10 * rank - 4).to(dtype)


def ranks(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Of this rank, and of the first and the second one."""
    return rows(dist.get_rank(), dtype), rows(0, dtype), rows(1, dtype)


@check
def reductions_add_take_the_largest_and_the_mean(folder: Path) -> None:
    references: dict[OP.RedOpType, Callable[[Tensor, Tensor], Tensor]] = {
        OP.SUM: torch.add,
        OP.MAX: torch.maximum,
        OP.AVG: lambda a, b: (a + b) / 2,
    }
    for dtype in (torch.float32, torch.bfloat16, torch.int8):
        for op, of in list(references.items())[: 3 if dtype.is_floating_point else 2]:
            x, first, second = ranks(dtype)
            want, half = of(first, second), slice(4 * dist.get_rank(), 4 * dist.get_rank() + 4)
            whole, piece, listed = x.clone(), x.new_empty(4), x.new_empty(4)
            dist.all_reduce(whole, op)
            dist.reduce_scatter_tensor(piece, x, op)
            dist.reduce_scatter(listed, list(x.chunk(2)), op)
            same(whole, want, f"all_reduce {op}")
            same(torch.stack((piece, listed)), want[half].expand(2, 4), f"reduce_scatter {op}")
            dist.reduce(x, 1, op)
            same(x if dist.get_rank() else want, want, f"reduce {op}")


@check
def tensors_reach_the_ranks_that_they_are_sent_to(folder: Path) -> None:
    for dtype in (torch.float32, torch.float8_e4m3fn, torch.bool):
        (x, first, second), rank = ranks(dtype), dist.get_rank()
        both, halves = torch.cat((first, second)), [torch.cat((each[:4], each[4:])) for each in (first, second)]
        into, listed = torch.empty_like(both), list(torch.empty_like(both).chunk(2))
        dist.all_gather_into_tensor(into, x)
        dist.all_gather(listed, x)
        same(torch.stack((into, torch.cat(listed))).float(), both.expand(2, 16).float(), f"all_gather {dtype}")
        whole = torch.zeros_like(both)
        whole[8 * rank : 8 * rank + 8] = x
        dist.all_gather_into_tensor(whole, whole[8 * rank : 8 * rank + 8])  # FSDP2's input is a part of its output
        same(whole.float(), both.float(), f"all_gather of a part {dtype}")
        local = x.clone()
        dist.broadcast(local, 1)
        same(local.float(), second.float(), f"broadcast {dtype}")
        dist.scatter(local, halves if rank == 0 else None, 0)
        same(local.float(), halves[rank].float(), f"scatter {dtype}")
        gathered = [torch.empty_like(x) for _ in range(2)]
        dist.gather(x, gathered if rank == 1 else None, 1)
        same(torch.cat(gathered if rank else [first, second]).float(), both.float(), f"gather {dtype}")
        counts = [row[rank] for row in SENT]
        received = x.new_empty(sum(counts))
        dist.all_to_all_single(received, x[: sum(SENT[rank])], counts, SENT[rank])
        parts = [each[: sum(row)].split(row)[rank] for each, row in zip((first, second), SENT, strict=True)]
        same(received.float(), torch.cat(parts).float(), f"all_to_all_single {dtype}")


@check
def functional_collectives_and_lists_of_tensors_go_the_same_way(folder: Path) -> None:
    ops, group = torch.ops._c10d_functional, dist.distributed_c10d._get_default_group().group_name
    x, first, second = ranks()
    means = ops.all_reduce_coalesced([x, 2 * x], "avg", group)
    gathered = ops.all_gather_into_tensor_coalesced([x, 2 * x], 2, group)
    pieces = ops.reduce_scatter_tensor_coalesced([x, 2 * x], "sum", 2, group)
    for i, (mean, both, piece) in enumerate(zip(means, gathered, pieces, strict=True)):
        a, b = (i + 1) * first, (i + 1) * second
        same(ops.wait_tensor(mean), (a + b) / 2, "mean")
        same(ops.wait_tensor(both), torch.cat((a, b)), "gathered")
        same(ops.wait_tensor(piece), (a + b).chunk(2)[dist.get_rank()], "piece")


@check
def a_rank_may_wait_for_what_it_gets_before_it_sends(folder: Path) -> None:
    x, *both = ranks(torch.float8_e5m2)
    received, other = torch.empty_like(x), 1 - dist.get_rank()
    for work in [dist.irecv(received, other), dist.isend(x, other)]:
        assert work is not None
        work.wait()
    same(received.float(), both[other].float(), "received")


@check
def quantized_tensors_of_a_list_are_written(folder: Path) -> None:
    """Lists of lists hide them from torch's dispatcher, so the collective gets them as they are."""
    mxfp8, one = recipes.load("mxfp8")(None), torch.ones(64, 32, dtype=torch.bfloat16)
    gathered = [mxfp8.quantize(one) for _ in range(2)]
    dist.all_gather(gathered, one * 2 ** (1 + dist.get_rank()))
    same(torch.stack([each.dequantize() for each in gathered]), torch.stack([2 * one, 4 * one]))


@check
def a_future_holds_what_was_reduced(folder: Path) -> None:
    """DDP reads it, not the tensor that it reduced."""
    x, first, second = ranks()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    [result] = work.get_future().wait()
    assert result.data_ptr() == x.data_ptr()
    same(result, first + second)


if __name__ == "__main__":
    checks.main()

"""Collectives of CUDA tensors go over gloo on the host: ranks can share one card, which NCCL refuses.

gloo alone sends nothing that lies on a card, and knows no float8.
"""

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._C._distributed_c10d import PythonCallbackWork, _create_work_from_future  # type: ignore
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

BACKEND = "cpu:gloo,cuda:gloo"
OPS = (
    "_allgather_base_ allgather_ allgather_coalesced_ allgather_into_tensor_coalesced_ allreduce_ allreduce_coalesced_ "
    "_reduce_scatter_base_ reduce_scatter_ reduce_scatter_tensor_coalesced_ alltoall_base_ barrier broadcast_ gather_ "
    "recv_ recv_any_source_ reduce_ scatter_ send"
).split()
"""All collectives of torch end in one of these, functional ones, too. Lists of `all_to_all` do not: gloo has none."""
LIBRARY = torch.library.Library("c10d", "IMPL")


def install(device: str = "CUDA", host: str = "CPU") -> None:
    """In this process, tensors on `device` go through the backend of `host`, which gets copies on the CPU."""
    for name in OPS:
        op = getattr(torch.ops.c10d, name).default
        LIBRARY.impl(name, partial(staged, op, DispatchKeySet(getattr(DispatchKey, host))), device)


def staged(op: OpOverload, keys: DispatchKeySet, *arguments: Any) -> Any:
    """Run a collective on copies, whose results go back before it returns, or as the rank waits for what it receives.

    Copies wait for the current stream and for their own end, so that all streams see the results.
    """
    names = [argument.name for argument in op._schema.arguments]
    sent = partial(as_sent, is_reduced="reduce_op" in names)
    copies = tree_map_only(Tensor, lambda x: sent(x).to("cpu", copy=True), arguments)
    answer = op.redispatch(keys, *copies)
    if op.name() == "c10d::send":
        return answer
    work = dist.Work.unbox(answer[-1] if isinstance(answer, tuple) else answer)
    results = outputs(names, arguments)

    def finish(timeout: timedelta | None = None) -> bool:
        work.wait()
        for result, copy in zip(results, outputs(names, copies), strict=True):
            sent(result).copy_(copy)
        return True

    if op.name().startswith("c10d::recv_"):
        return dist.Work.boxed(PythonCallbackWork(finish))
    finish()
    future = torch.futures.Future(devices=[each.device for each in results if each.is_cuda])
    future.set_result(results)
    ended = dist.Work.boxed(_create_work_from_future(future))
    return (arguments[0], ended) if isinstance(answer, tuple) else ended


def as_sent(x: Tensor, is_reduced: bool) -> Tensor:
    """The same memory, without autograd. Codes travel as bytes, as long as nothing is computed on them."""
    return x.data if is_reduced or x.itemsize > 1 else x.data.view(torch.uint8)


def outputs(names: list[str], arguments: Any) -> list[Tensor]:
    """The tensors that a collective writes to."""
    written = [value for name, value in zip(names, arguments, strict=False) if not name.startswith("input")]
    return [leaf for leaf in tree_leaves(written) if isinstance(leaf, Tensor)]

"""FSDP2 over quantized parameters on two gloo processes; fsdp_worker.py holds the checks."""

import torch

from duotone import QuantizedTensor

WORKER = "fsdp_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)


def test_a_shard_loads_where_there_is_no_group_and_never_communicates(failures) -> None:
    """core 59."""
    for rank in (0, 1):
        shard = torch.load(failures.folder(WORKER) / f"shard-{rank}.pt", weights_only=True)
        assert isinstance(shard, QuantizedTensor) and shard.context.shard is None
        shard.copy_(torch.ones_like(shard.dequantize()))
        assert torch.equal(shard.dequantize(), torch.ones(128, 128, dtype=torch.bfloat16))

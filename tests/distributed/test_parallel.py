"""Tensor and sequence parallelism on two gloo processes; parallel_worker.py holds the checks."""

import pickle

import pytest
import torch

from duotone.errors import UserError

WORKER = "parallel_worker.py"


def test_every_check_of_the_worker_passes_on_all_ranks(failures, check) -> None:
    assert not failures(WORKER, check)


@pytest.mark.parametrize("what", ["quantizer", "recipe", "tensor", "module"])
def test_pickles_load_in_a_process_without_a_group_and_never_communicate(failures, what) -> None:
    """core 22, 23: what is used locally works; a module that was parallel asks for a group."""
    value = pickle.loads((failures.folder(WORKER) / f"{what}-0.pkl").read_bytes())
    if what == "quantizer":
        value.encode(torch.randn(32, 32))
    elif what == "tensor":
        value.copy_(torch.randn(value.shape))
        assert value.context.shard is None
    elif what == "module":
        with pytest.raises(UserError, match="pass a group of this process"):
            value(torch.randn(32, 128).bfloat16())

"""Attention over the ranks of a tensor-parallel group; parallel_worker.py holds the checks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from duotone.attention import MultiheadAttention, TransformerLayer
from duotone.errors import UserError

WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.mark.skipif(
    not (dist.is_available() and dist.is_gloo_available()), reason="this torch has no gloo; install one"
)
def test_two_ranks_give_the_layer_of_one(tmp_path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", str(WORKER), str(tmp_path), "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    ranks = [subprocess.Popen([*command, str(rank)], env=environment, **pipes) for rank in range(2)]
    outputs = [process.communicate(timeout=240) for process in ranks]
    assert not any(process.returncode for process in ranks), outputs[0][1][-3000:] + outputs[1][1][-3000:]
    found = [json.loads(line) for out, _ in outputs for line in out.splitlines() if line.startswith("{")]
    assert len(found) == 6
    assert not [failure for each in found for failure in each["failures"]]


class Group:
    """A process group as far as sizes go."""

    group_name = "tp"

    def size(self) -> int:
        return 4


def test_groups_that_do_not_divide_over_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="8 heads, 2 groups and 4 ranks do not divide"):
        MultiheadAttention(32, 8, num_gqa_groups=2, set_parallel_mode=True, tp_group=Group())


def test_another_group_reaches_every_linear() -> None:
    given = {"set_parallel_mode": True, "tp_group": Group(), "fuse_qkv_params": True, "layer_type": "decoder"}
    layer = TransformerLayer(32, 64, 4, **given)
    other = Group()
    other.group_name = "other"
    layer.set_tensor_parallel_group(other)
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 and {linear.layout.group for linear in linears} == {"other"}

"""Attention over the ranks of a tensor-parallel group; parallel_worker.py holds the checks."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from launching import launch, names

import duotone
from duotone.attention import MultiheadAttention, TransformerLayer
from duotone.errors import UserError

WORKER = Path(__file__).parent / "parallel_worker.py"


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_give_the_modules_of_one(tmp_path, world) -> None:
    failures = launch([WORKER], tmp_path, world)
    assert set(failures) == set(names(WORKER))
    assert not [failure for each in failures.values() for failure in each]


class Group:
    """A process group as far as sizes go."""

    group_name = "tp"

    def size(self) -> int:
        return 4


def test_groups_that_do_not_divide_over_ranks_are_refused() -> None:
    with pytest.raises(UserError, match="8 heads, 2 groups and 4 ranks do not divide"):
        MultiheadAttention(32, 8, num_gqa_groups=2, set_parallel_mode=True, tp_group=Group())


def test_another_group_reaches_every_linear_and_norm() -> None:
    options = {"set_parallel_mode": True, "tp_group": Group(), "fuse_qkv_params": True, "layer_type": "decoder"}
    options |= {"sequence_parallel": True, "qk_norm_type": "RMSNorm"}
    layer = TransformerLayer(32, 64, 4, **options)
    other = Group()
    other.group_name = "other"
    layer.set_tensor_parallel_group(other)
    linears = [module for module in layer.modules() if isinstance(module, torch.nn.Linear)]
    assert len(linears) == 7 and {linear.layout.group for linear in linears} == {"other"}
    norms = [module._norm for module in layer.modules() if hasattr(module, "_norm")]
    norms = [norm for norm in norms if norm is not None]
    assert len(norms) == 7 and {norm.gradients.group for norm in norms} == {"other"}


def test_a_pickled_norm_leaves_its_group_and_a_copy_stays() -> None:
    """A name of a group may mean another group in another process."""
    norm = duotone.RMSNorm(8, tp_group=Group())
    assert copy.deepcopy(norm)._norm.gradients.group == "tp"
    loaded = pickle.loads(pickle.dumps(norm))
    with pytest.raises(UserError, match="process group '' does not exist here"):
        loaded(torch.ones(2, 8)).sum().backward()
    assert loaded(torch.ones(2, 8)).equal(duotone.RMSNorm(8)(torch.ones(2, 8)))

"""Tensor- and sequence-parallel layers on two ranks against the whole layer in one process."""

from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check
from torch import Tensor, nn

from duotone import recipes
from duotone.attention import TransformerLayer

GIVEN = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "num_gqa_groups": 2}


def mine(t: Tensor, axis: int) -> Tensor:
    return t.chunk(dist.get_world_size(), axis)[dist.get_rank()]


def shard(name: str, t: Tensor) -> Tensor:
    """This rank's part of a parameter of the whole layer."""
    if name.endswith(("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias")):
        return mine(t, 0)
    return mine(t, 1) if name.endswith(("proj.weight", "fc2.weight")) else t


def layers(name: str, sequence: bool) -> tuple[nn.Module, nn.Module]:
    recipe = recipes.load(name)
    whole = TransformerLayer(64, 128, 4, recipe=recipe, **GIVEN)
    split = {"set_parallel_mode": True, "tp_group": dist.group.WORLD, "sequence_parallel": sequence}
    part = TransformerLayer(64, 128, 4, recipe=recipe, **GIVEN, **split)
    part.load_state_dict({key: shard(key, value) for key, value in whole.state_dict().items()})
    return whole, part


def near(got: Tensor, want: Tensor, bound: float) -> None:
    assert got.shape == want.shape and (got - want).norm() <= bound * want.norm(), (got - want).norm() / want.norm()


def compare(name: str, sequence: bool, bound: float = 1e-5) -> None:
    whole, part = layers(name, sequence)
    x, dy = torch.randn(32, 2, 64, requires_grad=True), torch.randn(32, 2, 64)
    own = (mine(x, 0) if sequence else x).detach().requires_grad_()
    expected, out = whole(x), part(own)
    expected.backward(dy)
    out.backward(mine(dy, 0) if sequence else dy)
    near(out, mine(expected, 0) if sequence else expected, bound)
    near(own.grad, mine(x.grad, 0) if sequence else x.grad, bound)
    for (key, ours), theirs in zip(part.named_parameters(), whole.parameters(), strict=True):
        if key.endswith(("qkv.weight", "fc1.weight", "proj.weight", "fc2.weight")):
            near(ours.grad, shard(key, theirs.grad), bound)


@check
def heads_split_over_ranks_give_the_whole_layer(folder: Path) -> None:
    compare("bf16", sequence=False)


@check
def shards_of_the_sequence_give_the_whole_layer(folder: Path) -> None:
    compare("bf16", sequence=True)


@check
def quantized_shards_give_the_whole_quantized_layer(folder: Path) -> None:
    """MXFP8: blocks end where shards do; sums in another order move few elements to another code."""
    compare("mxfp8", sequence=True, bound=1e-2)


if __name__ == "__main__":
    checks.main()

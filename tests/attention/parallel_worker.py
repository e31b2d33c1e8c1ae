"""Tensor- and sequence-parallel modules on several ranks against the whole module in one process."""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist
from checks import check
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.attention import MultiheadAttention, TransformerLayer
from duotone.comm import all_reduce

HEADS = {"attention_dropout": 0.0, "fuse_qkv_params": True, "num_gqa_groups": 4}
NORMED = {"output_layernorm": True, "qk_norm_type": "RMSNorm", "normalization": "RMSNorm"}
COLUMNS, ROWS = ("qkv.weight", "qkv.bias", "fc1.weight", "fc1.bias"), ("proj.weight", "fc2.weight")


BOUNDS = {"bf16": 1e-5, "mxfp8": 2e-2, "fp8-rowwise": 0.1, "fp8-current": 0.1}
"""Of the norm of an error. Sums in another order move few elements to another code. Scales of tensors and rows that are
cut by features are those of a shard, which moves many: E5M2 has steps of a quarter."""

OF_NORMS = 1.5
"""A gradient of a norm is a sum over tokens: values cancel more than errors. A missing sum has an error of 0.7."""


def piece_of_rank(t: Tensor, axis: int) -> Tensor:
    return t.chunk(dist.get_world_size(), axis)[dist.get_rank()]


def shard(name: str, t: Tensor) -> Tensor:
    """This rank's part of a parameter of the whole module."""
    if name.endswith(COLUMNS):
        return piece_of_rank(t, 0)
    return piece_of_rank(t, 1) if name.endswith(ROWS) else t


def near(result: Tensor, want: Tensor, bound: float, what: str) -> None:
    error = (result - want).norm() / want.norm()
    assert result.shape == want.shape and error <= bound, f"{what}: {error}"


def compare(build: Callable[..., nn.Module], sequence: bool, bound: float, what: str) -> None:
    """Outputs, and gradients of the input and of all parameters."""
    whole = build()
    part = build(set_parallel_mode=True, tp_group=dist.group.WORLD, sequence_parallel=sequence)
    part.load_state_dict({key: shard(key, value) for key, value in whole.state_dict().items()})
    x, dy = torch.randn(64, 2, 128, requires_grad=True), torch.randn(64, 2, 128)
    leaf = (piece_of_rank(x, 0) if sequence else x).detach().requires_grad_()
    expected, out = whole(x), part(leaf)
    expected.backward(dy)
    out.backward(piece_of_rank(dy, 0) if sequence else dy)
    near(out, piece_of_rank(expected, 0) if sequence else expected, bound, f"{what}, output")
    near(leaf.grad, piece_of_rank(x.grad, 0) if sequence else x.grad, bound, f"{what}, gradient of the input")
    for (key, parameter), twin in zip(part.named_parameters(), whole.parameters(), strict=True):
        limit = OF_NORMS * bound if "norm" in key else bound
        near(parameter.grad, shard(key, twin.grad), limit, f"{what}, gradient of {key}")


def modules(recipe: Any) -> dict[str, Callable[..., nn.Module]]:
    return {
        "LayerNormMLP": partial(duotone.LayerNormMLP, 128, 512, recipe=recipe),
        "MultiheadAttention": partial(MultiheadAttention, 128, 4, input_layernorm=True, recipe=recipe, **HEADS),
        "TransformerLayer": partial(TransformerLayer, 128, 256, 4, hidden_dropout=0.0, recipe=recipe, **HEADS),
        "TransformerLayer with norms of heads and of the output": partial(
            TransformerLayer, 128, 256, 4, hidden_dropout=0.0, recipe=recipe, **HEADS, **NORMED
        ),
    }


@check
def shards_give_the_whole_module(folder: Path) -> None:
    """Blocks end where shards do."""
    for recipe, bound in BOUNDS.items():
        for (name, build), sequence in itertools.product(modules(recipes.load(recipe)).items(), (False, True)):
            compare(build, sequence, bound, f"{name}, {recipe}, {sequence}")


@check
def a_norm_before_a_column_parallel_linear_gives_the_whole_one(folder: Path) -> None:
    for recipe, sequence in itertools.product(BOUNDS, (False, True)):
        options = {"recipe": recipes.load(recipe), "params_dtype": torch.float32}
        whole = duotone.LayerNormLinear(128, 256, **options)
        split = {"parallel_mode": "column", "tp_group": dist.group.WORLD, "sequence_parallel": sequence}
        part = duotone.LayerNormLinear(128, 256, **options, **split)
        is_cut = {"weight", "bias"}
        part.load_state_dict(
            {key: piece_of_rank(t, 0) if key in is_cut else t for key, t in whole.state_dict().items()}
        )
        x, dy = torch.randn(128, 128, requires_grad=True), torch.randn(128, 256)
        leaf = (piece_of_rank(x, 0) if sequence else x).detach().requires_grad_()
        y, out = whole(x), part(leaf)
        y.backward(dy)
        out.backward(piece_of_rank(dy, 1))
        bound = BOUNDS[recipe]
        near(out, piece_of_rank(y, 1), bound, f"{recipe}, {sequence}, output")
        near(
            leaf.grad,
            piece_of_rank(x.grad, 0) if sequence else x.grad,
            bound,
            f"{recipe}, {sequence}, gradient of the input",
        )
        near(
            part.weight.grad,
            piece_of_rank(whole.weight.grad, 0),
            bound,
            f"{recipe}, {sequence}, gradient of the weight",
        )
        for name in ("layer_norm_weight", "layer_norm_bias"):
            near(
                getattr(part, name).grad, getattr(whole, name).grad, bound, f"{recipe}, {sequence}, gradient of {name}"
            )


@check
def compiled_norms_sum_their_gradients_too(folder: Path) -> None:
    """Copies stay in the group. A norm outside of modules sums if it has a group."""
    split = {"parallel_mode": "column", "tp_group": dist.group.WORLD, "sequence_parallel": True}
    part = nn.Sequential(
        duotone.RMSNorm(128, tp_group=dist.group.WORLD), duotone.LayerNormLinear(128, 256, recipe="mxfp8", **split)
    )
    twin = copy.deepcopy(part)
    compiled = torch.compile(twin, fullgraph=True, backend="aot_eager")
    x = piece_of_rank(torch.randn(128, 128), 0)
    part(x).square().mean().backward()
    compiled(x).square().mean().backward()
    for (name, eager), parameter in zip(part.named_parameters(), twin.parameters(), strict=True):
        near(parameter.grad, eager.grad, 1e-6, name)  # on CUDA compiled code adds them up in another order
    norm = part[0].weight.grad
    assert norm.any() and norm.equal(all_reduce(norm, "max", dist.group.WORLD.group_name))


if __name__ == "__main__":
    checks.main()

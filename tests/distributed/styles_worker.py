"""torch's styles on LayerNormLinear, LayerNormMLP, MultiheadAttention and TransformerLayer, against one process."""

import copy
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import check, close, mesh, refused
from checks import same_product as same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import duotone
from duotone import recipes
from duotone.allocate import rows_below

EXACT = "bf16"
"""The recipe that quantizes nothing. Its modules here have parameters in fp32, so that orders of sums show alone."""

FP8 = "fp8-current", "mxfp8", "fp8-delayed"
BOUND = {EXACT: 1e-5, **dict.fromkeys(FP8, 0.15)}
"""Relative error behind a sum that is rounded to bf16, and then encoded again."""
OF_LAYERS = {EXACT: 1e-5, **dict.fromkeys(FP8, 0.22)}
"""That of gradients. FP8 alone changes those of a layer by up to 0.45 against fp32; another order of sums, by half."""

Plan = dict[str, ParallelStyle]
MLP = {"fc1": ColwiseParallel(), "fc2": RowwiseParallel()}
ATTENTION = {"qkv": ColwiseParallel(), "proj": RowwiseParallel()}
LAYER = {"self_attention.layernorm_qkv": ColwiseParallel(), "self_attention.proj": RowwiseParallel()}
LAYER |= {f"layernorm_mlp.{name}": style for name, style in MLP.items()}


def dtype(recipe: str) -> torch.dtype:
    return torch.float32 if recipe == EXACT else torch.bfloat16


def make(kind: Callable[..., nn.Module], *sizes: int, recipe: str = EXACT, **options: Any) -> nn.Module:
    """A module whose norms are no identity, and whose halves of weights have amaxes of their own."""
    torch.manual_seed(2)
    m = kind(*sizes, recipe=recipes.load(recipe), params_dtype=dtype(recipe), **options)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn_like(p) * (0.2 if p.dim() == 2 else 1.0))
            p[: len(p) // 2] *= 2 if p.dim() == 2 else 1
    return m


def layer(recipe: str = EXACT, **options: Any) -> nn.Module:
    options = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "bias": False} | options
    return make(duotone.TransformerLayer, 64, 128, 4, recipe=recipe, activation="swiglu", split_gate=True, **options)


def compare(m: nn.Module, plan: Plan, recipe: str, x: Tensor, exact: tuple[str, ...] = (), **call: Any) -> nn.Module:
    """A step of the module, and of its copy that the plan cuts. Gradients of `exact` have equal bits."""
    cut = parallelize_module(copy.deepcopy(m), mesh(), plan)
    inputs, outputs = [x.clone().requires_grad_() for _ in range(2)], []
    for module, leaf in zip((m, cut), inputs, strict=True):
        outputs.append(module(leaf, **call))
        outputs[-1].backward(torch.randn(outputs[0].shape, generator=checks.seeded(4)).to(x.dtype))
    want = dict(m.named_parameters())
    close(outputs[1], outputs[0], BOUND[recipe], f"{recipe}: output")
    close(inputs[1].grad, inputs[0].grad, OF_LAYERS[recipe], f"{recipe}: gradient of the input")
    for name, p in cut.named_parameters():
        assert type(p.grad) is type(p.detach()), name
        assert not isinstance(p, DTensor) or p.grad.placements == p.placements, name
        close(p.grad, want[name].grad, OF_LAYERS[recipe], f"{recipe}: gradient of {name}")
        if name in exact and recipe != EXACT:
            same(p.grad.full_tensor(), want[name].grad, f"{recipe}: gradient of {name}")
    return cut


@check
def a_norm_and_its_linear_take_columns(folder: Path) -> None:
    """The norm stays whole on all ranks; pieces of the weight are cut each for itself."""
    for recipe, split in itertools.product((EXACT, *FP8), (None, {"a": 64, "b": 128})):
        m = make(duotone.LayerNormLinear, 64, 192, recipe=recipe, parameters_split=split)
        weights = [f"{name}_{kind}" for name in split for kind in ("weight", "bias")] if split else ["weight", "bias"]
        whole, x = nn.Sequential(m), torch.randn(32, 64).to(dtype(recipe))
        if split is None:
            plan = {"0": ColwiseParallel(output_layouts=Replicate())}
            cut = compare(whole, plan, recipe, x, tuple(f"0.{name}" for name in weights))
        else:
            cut = parallelize_module(copy.deepcopy(whole), mesh(), {"0": ColwiseParallel()})
            sizes = [size // 2 for size in split.values() for _ in range(2)]
            parts = whole(x).split(sizes, -1)
            same(cut(x), torch.cat(parts[dist.get_rank() :: 2], -1), f"{recipe}: this rank's part of each piece")
            local = [cut[0]._parameters[f"{name}_weight"].to_local() for name in split]
            assert rows_below(local).data_ptr() == local[0].data_ptr()
        for name, p in cut[0].named_parameters():
            assert p.placements == ((Shard(0),) if name in weights else (Replicate(),)), name
        assert [*cut.state_dict()] == [*whole.state_dict()]


@check
def a_gated_mlp_computes_what_torch_does(folder: Path) -> None:
    for recipe in (EXACT, *FP8):
        m = make(duotone.LayerNormMLP, 64, 128, recipe=recipe, activation="swiglu", split_gate=True)
        x = torch.randn(32, 64).to(dtype(recipe))
        exact = tuple(f"{name}_{kind}" for name in ("fc1.gate", "fc1.up") for kind in ("weight", "bias"))
        cut = compare(m, MLP, recipe, x, (*exact, "fc2.weight", "fc2.bias"))
        p = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in cut.named_parameters()}
        normed = F.layer_norm(x, (64,), p["layer_norm_weight"], p["layer_norm_bias"])
        gate, up = (F.linear(normed, p[f"fc1.{name}_weight"], p[f"fc1.{name}_bias"]) for name in ("gate", "up"))
        want = F.linear(F.silu(gate) * up, p["fc2.weight"], p["fc2.bias"])
        close(cut(x), want, BOUND[recipe], f"{recipe}: output")
        alone = {"": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate())}
        spread = distribute_module(parallelize_module(copy.deepcopy(m), mesh(), MLP | alone), mesh())
        spread(x).backward(torch.ones_like(x))
        m.zero_grad()
        m(x).backward(torch.ones_like(x))
        for p, q in zip(spread.parameters(), m.parameters(), strict=True):
            assert isinstance(p, DTensor) and p.grad.placements == p.placements
            close(p.grad, q.grad, BOUND[recipe], f"{recipe}: a gradient, all of DTensors")


@check
def layers_and_attention_equal_one_process(folder: Path) -> None:
    x = torch.randn(16, 2, 64)
    for recipe in (EXACT, *FP8):
        compare(layer(recipe), LAYER, recipe, x.to(dtype(recipe)))
    norms = {name: SequenceParallel(sequence_dim=2, use_local_output=True) for name in ("q_norm", "k_norm")}
    options = {"attention_dropout": 0.0, "num_gqa_groups": 2, "bias": False}
    kinds: tuple[tuple[dict[str, Any], Plan], ...] = (
        ({"fuse_qkv_params": True}, ATTENTION),
        ({"qk_norm_type": "RMSNorm", "qkv_format": "bshd"}, ATTENTION | norms),
    )
    for more, plan in kinds:
        compare(make(duotone.MultiheadAttention, 64, 4, **options, **more), plan, EXACT, x)
    cross = make(duotone.MultiheadAttention, 64, 4, attention_type="cross", attn_mask_type="no_mask", **options)
    plan = {"query_layer": ColwiseParallel(), "key_value": ColwiseParallel(), "proj": RowwiseParallel()}
    compare(cross, plan, EXACT, x, encoder_output=torch.randn(8, 2, 64))
    low = dataclasses.replace(recipes.load("fp8-current"), fp8_dpa=True, dpa_min_tokens=0)
    m = parallelize_module(layer("fp8-current"), mesh(), LAYER)
    with duotone.autocast(recipe=low):
        close(m(x.bfloat16()), layer("fp8-current")(x.bfloat16()), BOUND["fp8-current"], "fp8_dpa")


@check
def sequence_parallel_layers_equal_one_process(folder: Path) -> None:
    """Tokens are cut outside of the linears, which gather codes and scatter sums."""
    for recipe in (EXACT, "fp8-current", "mxfp8"):
        up, down = (ColwiseParallel(input_layouts=Shard(0)) for _ in "ab"), RowwiseParallel(output_layouts=Shard(0))
        down.use_local_output = False
        whole, plan = layer(recipe), dict(zip(LAYER, (None, down, None, down), strict=True))
        for name, style in zip((*LAYER,)[::2], up, strict=True):
            style.desired_input_layouts = (Shard(0),)
            plan[name] = style
        cut = parallelize_module(copy.deepcopy(whole), mesh(), plan)
        distribute_module(cut.layernorm_mlp, mesh())
        cut.self_attention.proj.scatter_dim = cut.layernorm_mlp.fc2.scatter_dim = 0
        x, dy = (torch.randn(64, 2, 64).to(dtype(recipe)) for _ in range(2))
        leaf, shard = x.clone().requires_grad_(), distribute_tensor(x, mesh(), [Shard(0)]).requires_grad_()
        want, result = whole(leaf), cut(shard)
        want.backward(dy)
        result.backward(distribute_tensor(dy, mesh(), [Shard(0)]))
        assert result.placements == shard.grad.placements == (Shard(0),)
        close(result, want, BOUND[recipe], f"{recipe}: output")
        close(shard.grad, leaf.grad, BOUND[recipe], f"{recipe}: gradient of the input")
        for (name, p), q in zip(cut.named_parameters(), whole.parameters(), strict=True):
            assert p.grad.placements == p.placements
            close(p.grad, q.grad, BOUND[recipe], f"{recipe}: gradient of {name}")


@check
def whole_state_dicts_go_in_and_out(folder: Path) -> None:
    """Of one process and of ranks. Without DTensors a fc1 in halves and a whole one load each other."""
    options, whole = StateDictOptions(full_state_dict=True), layer("mxfp8")
    cut = parallelize_module(layer("mxfp8"), mesh(), LAYER)
    with torch.no_grad():
        for p in cut.parameters():
            p.zero_()
    set_model_state_dict(cut, whole.state_dict(), options=options)
    saved = get_model_state_dict(cut, options=options)
    assert [*saved] == [*whole.state_dict()] and "layernorm_mlp.fc1.gate_weight" in saved
    for name, value in saved.items():
        same(value, whole.state_dict()[name], name)
    fused = make(duotone.LayerNormMLP, 64, 128, activation="swiglu")
    halves = duotone.LayerNormMLP(64, 128, activation="swiglu", split_gate=True)
    halves.load_state_dict(fused.state_dict())
    same(halves.fc1.gate_weight, fused.fc1.weight[:128], "gate")
    same(halves.fc1.up_bias, fused.fc1.bias[128:], "up")
    fused.load_state_dict(halves.state_dict())
    same(fused.fc1.weight, halves.fc1.weight, "whole")


@check
def plans_and_weights_of_pieces_say_what_they_are(folder: Path) -> None:
    cut = parallelize_module(layer("fp8-delayed"), mesh(), LAYER)
    rows, want = duotone.plan(cut), duotone.plan(layer("fp8-delayed"))
    assert [(row.gemm, row.a, row.b, row.reason) for row in rows] == [(r.gemm, r.a, r.b, r.reason) for r in want]
    weight = cut.layernorm_mlp.fc1.weight
    assert weight.shape == (256, 64) and weight.isnan().all(), "its rows lie on several ranks"
    try:
        nn.init.zeros_(weight)
    except RuntimeError as error:
        assert "not allowed" in str(error)
    else:
        raise AssertionError("an outline was written in silence")


@check
def a_gated_fc1_may_be_a_shard_of_fsdp_alone(folder: Path) -> None:
    m = make(duotone.LayerNormMLP, 64, 128, activation="swiglu")
    sharded, x = copy.deepcopy(m), torch.randn(32, 64)
    fully_shard(sharded.fc1, mesh=mesh())
    same(sharded(x), m(x), "output")


@check
def optimizers_step_beside_plain_norms(folder: Path) -> None:
    cut = parallelize_module(layer("mxfp8"), mesh(), LAYER)
    before = {name: p.detach().clone() for name, p in cut.named_parameters()}
    # torch's foreach, its default on CUDA, refuses plain tensors beside DTensors
    for optimizer in (
        duotone.optim.AdamW(cut.parameters(), lr=0.1),
        torch.optim.AdamW(cut.parameters(), lr=0.1, foreach=False),
    ):
        cut(torch.randn(16, 2, 64).bfloat16()).sum().backward()
        optimizer.step()
    assert all(not torch.equal(*map(local, (p, before[name]))) for name, p in cut.named_parameters())


def local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@check
def what_cannot_be_cut_is_refused_before_anything_changes(folder: Path) -> None:
    x = torch.randn(16, 2, 64)
    by_kind = {"fuse_qkv_params": True, "qkv_weight_interleaved": False}
    for m, plan, words in (
        (make(duotone.LayerNormMLP, 64, 128, activation="swiglu"), MLP, "split_gate=True"),
        (make(duotone.MultiheadAttention, 64, 4, **by_kind), ATTENTION, "leave fuse_qkv_params"),
        (make(duotone.LayerNormLinear, 64, 64), RowwiseParallel(), "use ColwiseParallel"),
        (make(duotone.LayerNormLinear, 64, 64, return_layernorm_output=True), ColwiseParallel(), "tp_group="),
        (make(duotone.LayerNormLinear, 64, 64, return_bias=True), ColwiseParallel(), "linears of one output"),
        (make(duotone.Linear, 64, 64, return_bias=True), RowwiseParallel(), "linears of one output"),
    ):
        before = dict(m.named_parameters())
        refused(lambda m=m, plan=plan: parallelize_module(m, mesh(), plan), words)  # type: ignore[misc]
        assert dict(m.named_parameters()) == before
    refused(lambda: duotone.LayerNormMLP(64, 128, split_gate=True), "gated activations")
    normed = parallelize_module(make(duotone.MultiheadAttention, 64, 4, qk_norm_type="RMSNorm"), mesh(), ATTENTION)
    refused(lambda: normed(x), "SequenceParallel(sequence_dim=2, use_local_output=True)")
    groups = parallelize_module(make(duotone.MultiheadAttention, 64, 4, num_gqa_groups=1), mesh(), ATTENTION)
    refused(lambda: groups(x), "ranks must divide num_gqa_groups")
    refusals = ({"output_layouts": Replicate()}, "Shard(-1)"), ({"use_local_output": False}, "LocalPieces")
    for options, words in refusals:
        m = make(duotone.LayerNormMLP, 64, 128, activation="swiglu", split_gate=True)
        m = parallelize_module(m, mesh(), {"fc1": ColwiseParallel(**options)})
        refused(lambda m=m: m(x), words)
    recipe = dataclasses.replace(recipes.load("fp8-current"), fp8_dpa=True, fp8_mha=True)
    m = parallelize_module(layer("fp8-current"), mesh(), LAYER)
    with duotone.autocast(recipe=recipe):
        refused(lambda: m(x.bfloat16()), "fp8_mha of the recipe")


if __name__ == "__main__":
    checks.main()

"""te.Linear over two ranks, as scripts for Transformer Engine build it, against the whole layers on one."""

import sys
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, seeded
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import duotone
from duotone.compat import te as compat
from duotone.errors import UserError

compat.install()

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Format, MXFP8BlockScaling  # noqa: E402

TOKENS, WIDTH, WIDE = 16, 32, 64


def piece(t: Tensor, dim: int = 0) -> Tensor:
    return t.chunk(2, dim)[dist.get_rank()].contiguous()


def whole() -> tuple[nn.Linear, nn.Linear, Tensor]:
    torch.manual_seed(3)
    return nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH), torch.randn(TOKENS, WIDTH)


def cut(up: nn.Linear, down: nn.Linear, late: bool, sequence: bool) -> tuple[nn.Module, nn.Module]:
    """The two linears over the ranks, whose group comes with them or after them."""
    group = {} if late else {"tp_group": dist.group.WORLD}
    options = {"tp_size": 2, "sequence_parallel": sequence, **group}
    column = te.Linear(WIDTH, WIDE, parallel_mode="column", **options)
    row = te.Linear(WIDE, WIDTH, parallel_mode="row", **options)
    if late:
        try:
            column(torch.ones(TOKENS, WIDTH))
        except UserError as error:
            assert "set_tensor_parallel_group first" in str(error)
        else:
            raise AssertionError("a forward without a group ran")
        for linear in (column, row):
            linear.set_tensor_parallel_group(dist.group.WORLD)
    with torch.no_grad():
        column.weight.copy_(piece(up.weight)), column.bias.copy_(piece(up.bias))
        row.weight.copy_(piece(down.weight, 1)), row.bias.copy_(down.bias)
    return column, row


@check
def a_column_and_a_row_of_ranks_compute_the_whole(folder: Path) -> None:
    for late in (False, True):
        for sequence in (False, True):
            up, down, x = whole()
            column, row = cut(up, down, late, sequence)
            assert column.weight.shape == (WIDE // 2, WIDTH) and row.tp_size == 2
            y = row(torch.relu(column(piece(x) if sequence else x)))
            want = down(torch.relu(up(x)))
            want.square().sum().backward()
            y.square().sum().backward()
            assert torch.allclose(y, piece(want) if sequence else want, atol=1e-5)
            assert torch.allclose(column.weight.grad, piece(up.weight.grad), atol=1e-3)


@check
def layers_that_ask_for_user_buffers_train_as_without(folder: Path) -> None:
    """The calls of Transformer Engine's example of an overlap. Nothing overlaps, so values are equal."""
    recipe = DelayedScaling(fp8_format=Format.HYBRID, amax_history_len=32, amax_compute_algo="max")
    common = {"tp_group": dist.group.WORLD, "tp_size": 2, "sequence_parallel": True}
    every = {"set_parallel_mode": True, "seq_length": TOKENS}
    heads = {"attention_dropout": 0.0, "fuse_qkv_params": True}
    bulk = {"ub_overlap_ag": True, "ub_bulk_wgrad": True, "ub_bulk_dgrad": True}
    layers = {
        te.LayerNormLinear: ((WIDTH, 3 * WIDTH), {"parallel_mode": "column"}, {**bulk, "ub_name": "qkv"}),
        te.LayerNormMLP: ((WIDTH, WIDE), every, {**bulk, "ub_overlap_rs": True}),
        te.MultiheadAttention: (
            (WIDTH, 4), {"set_parallel_mode": True, **heads, "input_layernorm": True}, {**bulk, "ub_overlap_rs": True}
        ),
        te.TransformerLayer: (
            (WIDTH, WIDE, 4), {**every, **heads, "hidden_dropout": 0.0}, {**bulk, "ub_tp_comm_overlap": True}
        ),
    }  # fmt: skip
    te.module.base.initialize_ub([2 * TOKENS, WIDTH], 2, use_fp8=True, bootstrap_backend="gloo")
    for layer, (sizes, options, buffers) in layers.items():
        results = []
        for overlap in ({}, buffers):
            torch.manual_seed(5)
            m = layer(*sizes, **common, **options, **overlap)
            optimizer = torch.optim.Adam(m.parameters(), lr=1e-3)
            for _ in range(3):
                x = torch.randn(TOKENS // 2, 2, WIDTH, requires_grad=True)
                with te.fp8_autocast(enabled=True, fp8_recipe=recipe, fp8_group=dist.group.WORLD):
                    y = m(x)
                y.sum().backward()
                optimizer.step()
            results.append((y, x.grad, *m.parameters()))
        for result, want in zip(*results, strict=True):
            assert torch.equal(result, want) and want.isfinite().all(), layer.__name__
    te.module.base.destroy_ub()


@check
def a_rank_has_its_part_of_each_expert_and_the_caller_communicates(folder: Path) -> None:
    options = {"tp_group": dist.group.WORLD, "tp_size": 2, "bias": False}
    column = te.GroupedLinear(2, WIDTH, WIDE, parallel_mode="column", **options)
    row = te.GroupedLinear(2, WIDE, WIDTH, parallel_mode="row", **options)
    assert column.weight1.shape == (WIDE // 2, WIDTH) and row.weight0.shape == (WIDTH, WIDE // 2)
    x = torch.ones(TOKENS, WIDTH)
    torch.testing.assert_close(column(x, [TOKENS, 0]), nn.functional.linear(x, column.weight0))
    try:
        te.GroupedLinear(2, WIDTH, WIDE, parallel_mode="row", tp_group=dist.group.WORLD)
    except UserError as error:
        assert "give bias=False" in str(error)
    else:
        raise AssertionError("each rank would add the bias")


@check
def amaxes_are_reduced_over_all_ranks_without_a_group(folder: Path) -> None:
    """As there; Duotone's own autocast reduces nothing unless told."""
    linear = te.Linear(WIDTH, WIDE)
    for value in (1.0, 3.0):
        with te.fp8_autocast(fp8_recipe=DelayedScaling(amax_history_len=2)):
            linear(torch.full((4, WIDTH), value * (1 + dist.get_rank()))).sum().backward()
    assert duotone.recipe_state(linear)["duotone_forward.scale"][0] == 448 / 6


@check
def heads_of_attention_are_those_of_all_ranks(folder: Path) -> None:
    attention = te.DotProductAttention(4, 8, num_gqa_groups=2, tp_size=2, tp_group=dist.group.WORLD)
    assert attention(torch.ones(4, 1, 2, 8), *[torch.ones(4, 1, 1, 8)] * 2).shape == (4, 1, 16)


@check
def shards_are_filled_with_numbers_of_their_rank(folder: Path) -> None:
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7 + dist.get_rank())
    options = {"tp_group": dist.group.WORLD, "get_rng_state_tracker": lambda: tracker}
    linear = te.Linear(WIDTH, WIDE, parallel_mode="column", **options)
    shards = [torch.empty_like(linear.weight) for _ in range(2)]
    dist.all_gather(shards, linear.weight.detach())
    assert not torch.equal(*shards) and abs(linear.weight.std() / 0.023 - 1) < 0.2


@check
def shards_of_quantized_weights_come_from_meta(folder: Path) -> None:
    """As the examples of Transformer Engine do it: built on meta, sharded, then filled."""
    recipe = DelayedScaling(amax_history_len=2)
    with te.quantized_model_init(recipe=recipe, preserve_high_precision_init_val=True):
        block = te.TransformerLayer(WIDTH, WIDE, 4, fuse_qkv_params=True, device="meta")
        model = nn.Sequential(
            te.LayerNormMLP(WIDTH, WIDE, device="meta"), te.Linear(WIDTH, WIDTH, device="meta"), block
        )
    fully_shard(model)
    bases = [module for module in model.modules() if isinstance(module, te.TransformerEngineBaseModule)]
    assert bases == [*model[:2], block.self_attention, block.layernorm_mlp]
    for module in bases:
        module.reset_parameters()
    assert not any(p.is_meta for p in model.parameters())
    for parameter in model.parameters():
        shard = parameter._local_tensor
        if isinstance(shard, te.QuantizedTensor):
            values = shard.get_high_precision_init_val()
            codes = shard.dequantize().cpu()
            assert not torch.equal(values, codes) and torch.allclose(values, codes, rtol=2**-4, atol=2**-9)
    with te.autocast(recipe=recipe):
        model(torch.ones(TOKENS, 1, WIDTH)).sum().backward()
    weight = model[1].weight.full_tensor()
    assert abs(weight.dequantize().std() / 0.023 - 1) < 0.2 and model[1].weight.grad.full_tensor().isfinite().all()


def sharded(values: dict[str, Tensor]) -> nn.Module:
    """A quantized and a plain linear over two ranks, with these values, and masters from them."""
    with te.quantized_model_init(recipe=MXFP8BlockScaling()):
        model = nn.Sequential(te.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH, dtype=torch.bfloat16))
    model.load_state_dict({name: value.to(model.state_dict()[name].dtype) for name, value in values.items()})
    return fully_shard(model)


@check
def fused_adam_updates_shards_as_one_process_updates_the_whole(folder: Path) -> None:
    """Against torch's AdamW in fp32. States are DTensors, so that torch's functions save, gather and load them."""
    reference = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH))
    for parameter in reference.parameters():
        dist.broadcast(parameter.data.copy_(parameter.bfloat16()), 0)
    values = reference.state_dict()
    model = sharded(values)
    options = {"lr": 0.01, "weight_decay": 0.1}
    adam = te.optimizers.FusedAdam(model.parameters(), master_weights=True, **options)
    for name, parameter in model.named_parameters():
        adam.initialize_state(parameter)
        if "0.weight" in name:
            adam.set_scaled_state(parameter, "master_param", piece(values[name]))
    oracle = torch.optim.AdamW(reference.parameters(), **options)
    for step in range(4):
        if step == 2:
            states = {"model": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, adam)}
            dcp.save(states, checkpoint_id=folder / "dcp")
            model = sharded({name: torch.zeros_like(value) for name, value in values.items()})
            adam = te.optimizers.FusedAdam(model.parameters(), master_weights=True, **options)
            states = {"model": get_model_state_dict(model), "adam": get_optimizer_state_dict(model, adam)}
            dcp.load(states, checkpoint_id=folder / "dcp")
            set_model_state_dict(model, states["model"])
            set_optimizer_state_dict(model, adam, states["adam"])
        for shard, twin in zip(model.parameters(), reference.parameters(), strict=True):
            twin.grad = torch.randn(twin.shape, generator=seeded(step))
            grad = DTensor.from_local(piece(twin.grad).to(shard.dtype), shard.device_mesh, shard.placements)
            twin.grad = grad.full_tensor().to(twin.dtype)
            shard.grad = grad
        adam.step(), oracle.step()
    full = get_optimizer_state_dict(model, adam, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    for (name, shard), twin in zip(model.named_parameters(), reference.parameters(), strict=True):
        if shard.dtype == torch.bfloat16 or name == "0.weight":
            master = adam.get_unscaled_state(shard, "master_param").full_tensor()
            assert torch.allclose(master, twin, rtol=1e-5, atol=1e-6), name
            if dist.get_rank() == 0:
                assert torch.equal(full["state"][name]["master_param"], master.cpu())
        whole = shard.full_tensor()
        whole = whole.dequantize() if isinstance(whole, te.QuantizedTensor) else whole.float()
        assert torch.allclose(whole, twin, rtol=2**-3 if name == "0.weight" else 2**-7, atol=1e-2), name


@check
def whole_states_are_refused_for_shards_and_load_as_the_error_tells(folder: Path) -> None:
    values = nn.Sequential(nn.Linear(WIDTH, WIDE), nn.Linear(WIDE, WIDTH)).state_dict()
    models = [sharded(values) for _ in range(2)]
    adam, other = (te.optimizers.FusedAdam(model.parameters(), master_weights=True) for model in models)

    def step(model: nn.Module, adam: torch.optim.Optimizer) -> None:
        for parameter in model.parameters():
            ones = torch.ones(parameter.to_local().shape, dtype=parameter.dtype)
            parameter.grad = DTensor.from_local(ones, parameter.device_mesh, parameter.placements)
        adam.step()

    step(models[0], adam)
    saved = adam.state_dict()
    for state in saved["state"].values():
        state |= {name: value.full_tensor() for name, value in state.items() if isinstance(value, DTensor)}
    try:
        other.load_state_dict(saved)
    except UserError as error:
        assert "whole tensor" in str(error) and "set_optimizer_state_dict" in str(error) and "\n" not in str(error)
    else:
        raise AssertionError("whole states were loaded for shards")
    assert not any(other.state.values())
    options = StateDictOptions(full_state_dict=True)
    full = get_optimizer_state_dict(models[0], adam, options=options)
    set_optimizer_state_dict(models[1], other, full, options=options)
    for shard, twin in zip(models[0].parameters(), models[1].parameters(), strict=True):
        for name in ("exp_avg", "exp_avg_sq", *(["master"] if "master" in adam.state[shard] else [])):
            assert torch.equal(adam.state[shard][name].to_local(), other.state[twin][name].to_local()), name
    step(models[1], other)


if __name__ == "__main__":
    assert "transformer_engine" in sys.modules
    checks.main()

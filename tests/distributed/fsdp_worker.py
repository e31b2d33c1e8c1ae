"""FSDP2 over quantized parameters: three SGD steps equal the single process bit for bit, for whatever format."""

import copy
import dataclasses
import functools
import json
import operator
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import checks
import fsdp_models
import torch
import torch.distributed as dist
from checks import check, same
from fsdp_models import HYBRID, model
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

import duotone
from duotone import recipes
from duotone.comm import collectives
from duotone.errors import MissingPlaneError, UserError
from duotone.recipes import Recipe, Rule, RuleRecipe


def train(
    m: nn.Module, steps: int = 3, after: Callable[[], None] = lambda: None, optimizer: Optimizer | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    x, y = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    optimizer = optimizer or torch.optim.SGD(m.parameters(), lr=0.5)
    losses, gradients = [], []
    for _ in range(steps):
        loss = ((m(x) - y).float() ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        gradients += [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in m.parameters()]
        optimizer.step()
        after()
        losses.append(loss.detach())
    return losses, [g.clone() for g in gradients]


def shard(m: nn.Sequential) -> nn.Sequential:
    mesh = checks.mesh()
    for layer in (m[0], m[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(m, mesh=mesh)


def compare(recipe: Recipe, optimizer: Callable[[nn.Module], Optimizer | None] = lambda m: None) -> nn.Module:
    sharded = model(recipe)
    single = copy.deepcopy(sharded)
    shard(sharded)
    results = [functools.reduce(operator.iadd, train(m, optimizer=optimizer(m)), []) for m in (sharded, single)]
    for result, want in zip(*results, strict=True):
        same(result, want, "losses and gradients")
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        piece, local = whole.chunk(world)[rank], parameter._local_tensor
        if not hasattr(whole, "planes"):
            same(local, piece, "bias")
            continue
        for result, want in zip(local.planes, piece.planes, strict=True):
            for name, part in want.parts.items():
                same(result.parts[name], part, f"{want.format.name} {name}")
    return sharded


@check
def modules_without_a_name_may_have_other_numbers_on_each_rank(folder: Path) -> None:
    for _ in range(dist.get_rank()):
        duotone.Linear(16, 16, recipe="mxfp8")
    torch.manual_seed(0)
    m = duotone.Linear(64, 32, recipe="mxfp8")
    x = torch.randn(32, 64)
    want = m(x)
    same(fully_shard(m)(x), want)


@check
def mxfp8(folder: Path) -> None:
    compare(recipes.load("mxfp8"))


@check
def hybrid_of_mxfp8_and_fp8(folder: Path) -> None:
    compare(HYBRID)


@check
def fp8_per_tensor(folder: Path) -> None:
    compare(recipes.load("fp8-current"))


@check
def nvfp4_2d_weights(folder: Path) -> None:
    compare(recipes.load("nvfp4"))


@check
def fp8_per_row(folder: Path) -> None:
    compare(recipes.load("fp8-rowwise"))


@check
def fp8_block(folder: Path) -> None:
    compare(recipes.load("fp8-block"))


@check
def plain_weights_that_backward_encodes_again(folder: Path) -> None:
    """FSDP frees a weight after forward and gathers it anew before backward, into the tensor that was kept."""
    for name in ("mxfp8", "fp8-delayed"):
        for again in (True, False):
            recipe = dataclasses.replace(recipes.load(name), recompute_columnwise=again)
            sharded = model(recipe, is_quantized=False)
            single = copy.deepcopy(sharded)
            shard(sharded)
            for result, want in zip(*(train(m)[0] + train(m)[1] for m in (sharded, single)), strict=True):
                same(result, want, f"losses and gradients, {name}, {again}")


@check
def a_monitored_run_has_the_same_bits_and_a_file_for_each_rank(folder: Path) -> None:
    plain, watched = (shard(model(recipes.load("mxfp8"), is_quantized=False)) for _ in range(2))
    expected = train(plain)
    with duotone.observe.Monitor(watched, folder / "monitor.jsonl", every=2) as monitor:
        results = train(watched, after=monitor.step)
    for result, want in zip(results[0] + results[1], expected[0] + expected[1], strict=True):
        same(result, want)
    rank = dist.get_rank()
    lines = (folder / f"monitor{f'.rank{rank}' if rank else ''}.jsonl").read_text().splitlines()
    rows = {(row["step"], row["module"], row["role"]) for row in map(json.loads, lines)}
    roles = [(name, role) for name in ("0", "2") for role in ("input", "weight", "grad_output")]
    assert rows == {(step, *role) for step in (1, 2) for role in roles}, rows


@check
def fp8_delayed_agrees_on_its_scale_without_an_amax_reduction_group(folder: Path) -> None:
    compare(recipes.DelayedScaling(amax_history_len=2))


@check
def a_copy_that_is_sharded_writes_its_weights_with_delayed_scales(folder: Path) -> None:
    """A copy has no context: the first forward, which sees gathered weights, gives it to the shards."""
    single = model(recipes.DelayedScaling(amax_history_len=2))
    for result, want in zip(train(shard(copy.deepcopy(single)))[0], train(single)[0], strict=True):
        same(result, want)


@check
def shards_write_under_the_delayed_scales_of_their_weights_before_a_forward(folder: Path) -> None:
    """FSDP2 makes a shard by `new_zeros`, which gives other tensors no slots."""
    sharded = shard(model(recipes.DelayedScaling(amax_history_len=2)))
    single = model(recipes.DelayedScaling(amax_history_len=2))
    for m in (sharded, single):
        with torch.no_grad():
            for weight in m.parameters():
                weight.mul_(1000.0)
    for (name, result), want in zip(sharded.named_buffers(), single.buffers(), strict=True):
        same(result, want, name)


@check
def experts_of_a_copy_shard_one_after_the_other(folder: Path) -> None:
    """A copy asks the recipe anew while one expert is a shard already and the next one is whole."""
    one = duotone.GroupedLinear(2, 64, 64, recipe="mxfp8")
    duotone.convert_parameters(one, "mxfp8")
    x, rows = torch.randn(64, 64), [24, 40]
    same(fully_shard(copy.deepcopy(one))(x, rows), one(x, rows))


@check
def adamw_updates_shards_as_one_process_updates_the_whole(folder: Path) -> None:
    """Masters, moments and planes; each step agrees on the scales of all weights in one collective."""
    for name, agreements in {"fp8-current": 1, "nvfp4": 1, "fp8-rowwise": 1, "fp8-delayed": 1, "mxfp8": 0}.items():
        optimizers: list[duotone.optim.AdamW] = []

        def adamw(m: nn.Module, optimizers: list[duotone.optim.AdamW] = optimizers) -> Optimizer:
            optimizers.append(duotone.optim.AdamW(m.parameters(), lr=0.01, master_weights=True))
            return optimizers[-1]

        compare(recipes.load(name), adamw)
        sharded, single = (list(optimizer.state.values()) for optimizer in optimizers)
        for state, whole in zip(sharded, single, strict=True):
            for key in ("exp_avg", "exp_avg_sq", "master"):
                assert isinstance(state[key], DTensor) and state[key].dtype == torch.float32
                same(state[key].full_tensor(), whole[key], f"{name} {key}")
        with mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce) as agreed:
            optimizers[0].step()
        assert agreed.call_count == agreements, (name, agreed.call_count)


@check
def shards_are_written_in_the_formats_of_a_later_recipe(folder: Path) -> None:
    """As whole weights are; a shard under the recipe before would keep its delayed scale for ever."""
    results = []
    for change in (shard, lambda m: m):  # one after the other: a region rolls the states of all models
        m, losses = change(model(recipes.load("fp8-delayed"))), []
        for name in ("fp8-delayed", "fp8-current", "fp8-current"):
            with duotone.autocast(recipe=recipes.load(name)):
                losses += train(m, 1)[0]
        results.append([*losses, *map(fsdp_models.whole, m.parameters())])
    for result, want in zip(*results, strict=True):
        same(result, want, "losses and weights")


@check
def masters_take_what_is_loaded_into_shards_after_the_optimizer(folder: Path) -> None:
    for name in ("mxfp8", "fp8-current", "nvfp4"):
        one = model(recipes.load(name))
        results = []
        for m in (shard(copy.deepcopy(one)), one):
            optimizer = duotone.optim.AdamW(m.parameters(), lr=0.01, master_weights=True)
            train(m, 1, optimizer=optimizer)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            m.load_state_dict({key: value * -2 for key, value in m.state_dict().items()})
            train(m, 1, optimizer=optimizer)
            results.append([*map(fsdp_models.whole, m.parameters())])
        for result, want in zip(*results, strict=True):
            same(result, want, name)


@check
def masters_cut_anywhere_write_the_bits_of_whole_ones(folder: Path) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    names = ("mxfp8", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "nvfp4", "mxfp8-fwd-nvfp4-bwd")
    weights: list[Tensor] = []
    for name in (*names, ""):
        m = nn.Sequential(nn.Linear(129, 67, bias=False)).bfloat16()
        if name:
            duotone.convert(m, recipes.load(name), rules=())
            duotone.convert_parameters(m, recipes.load(name))
        weights.append(next(m.parameters()).detach())
    masters = [torch.randn(67 * 129) * 4 for _ in weights]
    masters[0][:7] = -0.0
    cuts = [0, 1, 129, 130, 5001, 67 * 129, 64, 8000]
    want = [
        weight.clone().copy_(master.bfloat16().view(67, 129)) for weight, master in zip(weights, masters, strict=True)
    ]

    def write(cuts: list[int], gap: int = 0) -> None:
        starts = [0 if rank == 0 else cut + gap for cut in cuts]
        ends = [cut if rank == 0 else 67 * 129 for cut in cuts]
        pieces = [m[a:b] if a < b and rank < 2 else None for m, a, b in zip(masters, starts, ends, strict=True)]
        offsets = [None if piece is None else start for piece, start in zip(pieces, starts, strict=True)]
        duotone.optim.quantize_master_weights(weights, pieces, offsets, dist.group.WORLD)

    before = [weight.clone() for weight in weights]
    for gap in (1, -1):
        try:
            write([64] * len(weights), gap)
        except UserError as error:
            assert "the pieces of master 0" in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError("pieces that do not cover the weight once were taken")
    for weight, same_as in zip(weights, before, strict=True):
        equal_parts(weight, same_as)
    write(cuts)
    assert size == 2
    for weight, same_as in zip(weights, want, strict=True):
        equal_parts(weight, same_as)


def equal_parts(result: Tensor, want: Tensor) -> None:
    for a, b in zip(getattr(result, "parts", [result]), getattr(want, "parts", [want]), strict=True):
        same(a, b)


@check
def reshard_after_forward_off_is_the_same(folder: Path) -> None:
    whole, saved = model(HYBRID), model(HYBRID)
    shard(whole)
    mesh = checks.mesh()
    for layer in (saved[0], saved[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(saved, mesh=mesh, reshard_after_forward=False)
    for result, want in zip(*(functools.reduce(operator.iadd, train(m), []) for m in (saved, whole)), strict=True):
        same(result, want)


@check
def shards_that_cut_blocks_are_refused_before_anything_is_sent(folder: Path) -> None:
    m = nn.Sequential(nn.Linear(128, 48 * dist.get_world_size(), bias=False)).bfloat16()
    duotone.convert(m, recipes.load("mxfp8"))
    duotone.convert_parameters(m, recipes.load("mxfp8"))
    try:
        fully_shard(m, mesh=checks.mesh())
    except MissingPlaneError as error:
        assert "multiples of 32" in str(error), error
    else:
        raise AssertionError("a shard of 48 rows cuts the columnwise blocks of 32")


@check
def uneven_shards_are_refused_when_the_model_is_sharded(folder: Path) -> None:
    world = dist.get_world_size()
    m = nn.Sequential(nn.Linear(16, 8 * world + 1, bias=False)).bfloat16()
    duotone.convert(m, recipes.load("fp8-current"))
    duotone.convert_parameters(m, recipes.load("fp8-current"))
    try:
        fully_shard(m, mesh=checks.mesh())
    except MissingPlaneError as error:  # a rank whose shard is padded meets a piece first, which shares its scale
        assert "17 rows over 2 ranks" in str(error) or dist.get_rank(), error
    else:
        raise AssertionError("ranks would gather pieces of different sizes")


WRITTEN = {
    "fp8-current": recipes.load("fp8-current"),
    "nvfp4": recipes.load("nvfp4"),
    "fp8-rowwise": recipes.load("fp8-rowwise"),
    "mxfp8 and nvfp4": RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="nvfp4", wgrad="mxfp8_e4m3"),)),
}


def by_checkpoint(m: nn.Module, values: dict[str, Tensor]) -> None:
    set_model_state_dict(m, dict(values), options=StateDictOptions(full_state_dict=True))


def by_load_state_dict(m: nn.Module, values: dict[str, Tensor]) -> None:
    m.load_state_dict({name: distributed(m.get_parameter(name), value) for name, value in values.items()})


@torch.no_grad()
def by_copy(m: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        m.get_parameter(name).copy_(distributed(m.get_parameter(name), value))


@torch.no_grad()
def by_local_tensor(m: nn.Module, values: dict[str, Tensor]) -> None:
    for name, value in values.items():
        m.get_parameter(name).to_local().copy_(value.chunk(dist.get_world_size())[dist.get_rank()])


def distributed(like: DTensor, value: Tensor) -> DTensor:
    return distribute_tensor(value, like.device_mesh, like.placements)


def once(m: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    leaf = x.clone().requires_grad_()
    y = m(leaf)
    y.backward(dy)
    return y.detach(), leaf.grad


def written_as_one_process_writes(recipe: Recipe, write, mesh: DeviceMesh) -> None:  # type: ignore[no-untyped-def]
    sharded = model(recipe)
    single = copy.deepcopy(sharded)
    for layer in (sharded[0], sharded[2], sharded):
        fully_shard(layer, mesh=mesh)
    torch.manual_seed(11)
    values = {name: torch.randn(p.shape).bfloat16() for name, p in single.named_parameters()}
    for value in values.values():
        value[len(value) // 2 :] *= 8  # the shards' own amaxes differ
    write(sharded, values)
    single.load_state_dict(values)
    rank, world = dist.get_rank(), dist.get_world_size()
    for parameter, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        if hasattr(whole, "planes"):
            piece = whole.chunk(world)[rank]
            for result, want in zip(parameter._local_tensor.planes, piece.planes, strict=True):
                for name, part in want.parts.items():
                    same(result.parts[name], part, f"{want.format.name} {name}")
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    for result, want, what in zip(once(sharded, x, dy), once(single, x, dy), ("y", "dx"), strict=True):
        same(result, want, what)


@check
def writes_before_the_first_forward_agree_on_their_scales(folder: Path) -> None:
    """A checkpoint in bf16 is loaded into the shards: their bytes are those of the quantized whole weight."""
    mesh = checks.mesh()
    for recipe in WRITTEN.values():
        written_as_one_process_writes(recipe, by_checkpoint, mesh)
    for write in (by_load_state_dict, by_copy, by_local_tensor):
        written_as_one_process_writes(WRITTEN["mxfp8 and nvfp4"], write, mesh)


@check
def writes_between_forwards_without_a_backward_reach_the_next_one(folder: Path) -> None:
    """As an evaluation does that loads one checkpoint after the other. No gather has sent columnwise planes then."""
    for name in ("mxfp8", "fp8-current"):
        sharded = model(recipes.load(name))
        single = copy.deepcopy(sharded)
        shard(sharded)
        x = torch.randn(64, 128).bfloat16()
        for factor in (1, 8):
            values = {key: torch.randn(p.shape).bfloat16() * factor for key, p in single.named_parameters()}
            by_copy(sharded, values)
            single.load_state_dict(values)
            with torch.no_grad():
                same(sharded(x), single(x), f"{name} {factor}")
            same(sharded(x), single(x), f"{name} {factor}, for a backward")


@check
def writes_of_replicated_shards_agree_in_the_group_that_shards(folder: Path) -> None:
    mesh = init_device_mesh(checks.DEVICE, (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    written_as_one_process_writes(WRITTEN["fp8-current"], by_checkpoint, mesh)


@check
def a_trained_shard_pickles_without_its_group(folder: Path) -> None:
    m = compare(HYBRID)
    local = m[0].weight._local_tensor
    assert local.context.shard is not None
    torch.save(local, folder / f"shard-{dist.get_rank()}.pt")


if __name__ == "__main__":
    checks.main()

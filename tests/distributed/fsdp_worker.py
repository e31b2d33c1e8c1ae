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
import torch
import torch.distributed as dist
from checks import check, same
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.comm import collectives
from duotone.dispatch import stages
from duotone.errors import MissingPlaneError
from duotone.recipes import Recipe, Rule, RuleRecipe

HYBRID = RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="fp8_e4m3_tensor", wgrad="mxfp8_e4m3"),))


def model(recipe: Recipe, *, held: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 256)).bfloat16()
    with torch.no_grad():
        for layer in (made[0], made[2]):
            layer.weight[:128] *= 4  # the shards' own amaxes differ
    duotone.convert(made, recipe)
    if held:
        duotone.convert_parameters(made, recipe)
    return made


def train(m: nn.Module, steps: int = 3, after: Callable[[], None] = lambda: None) -> tuple[list[Tensor], list[Tensor]]:
    torch.manual_seed(1)
    x, y = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    optimizer = torch.optim.SGD(m.parameters(), lr=0.5)
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
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (m[0], m[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(m, mesh=mesh)


def compare(recipe: Recipe) -> nn.Module:
    sharded = model(recipe)
    single = copy.deepcopy(sharded)
    shard(sharded)
    for got, want in zip(*(functools.reduce(operator.iadd, train(m), []) for m in (sharded, single)), strict=True):
        same(got, want, "losses and gradients")
    rank, world = dist.get_rank(), dist.get_world_size()
    for mine, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        piece, local = whole.chunk(world)[rank], mine._local_tensor
        if not hasattr(whole, "planes"):
            same(local, piece, "bias")
            continue
        for got, want in zip(local.planes, piece.planes, strict=True):
            for name, part in want.parts.items():
                same(got.parts[name], part, f"{want.format.name} {name}")
    return sharded


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
            sharded = model(recipe, held=False)
            single = copy.deepcopy(sharded)
            shard(sharded)
            for got, want in zip(*(train(m)[0] + train(m)[1] for m in (sharded, single)), strict=True):
                same(got, want, f"losses and gradients, {name}, {again}")


@check
def a_monitored_run_has_the_same_bits_and_a_file_for_each_rank(folder: Path) -> None:
    plain, watched = (shard(model(recipes.load("mxfp8"), held=False)) for _ in range(2))
    expected = train(plain)
    with duotone.observe.Monitor(watched, folder / "monitor.jsonl", every=2) as monitor:
        results = train(watched, after=monitor.step)
    for got, want in zip(results[0] + results[1], expected[0] + expected[1], strict=True):
        same(got, want)
    rank = dist.get_rank()
    lines = (folder / f"monitor{f'.rank{rank}' if rank else ''}.jsonl").read_text().splitlines()
    rows = {(row["step"], row["module"], row["role"]) for row in map(json.loads, lines)}
    roles = [(name, role) for name in ("0", "2") for role in ("input", "weight", "grad_output")]
    assert rows == {(step, *role) for step in (1, 2) for role in roles}, rows


@check
def fp8_delayed_agrees_on_its_scale_without_an_amax_reduction_group(folder: Path) -> None:
    compare(recipes.DelayedScaling(amax_history_len=2))


@check
def reshard_after_forward_off_is_the_same(folder: Path) -> None:
    whole, kept = model(HYBRID), model(HYBRID)
    shard(whole)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (kept[0], kept[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=False)
    fully_shard(kept, mesh=mesh, reshard_after_forward=False)
    for got, want in zip(*(functools.reduce(operator.iadd, train(m), []) for m in (kept, whole)), strict=True):
        same(got, want)


@check
def shards_that_cut_blocks_are_refused_before_anything_is_sent(folder: Path) -> None:
    m = nn.Sequential(nn.Linear(128, 48 * dist.get_world_size(), bias=False)).bfloat16()
    duotone.convert(m, recipes.load("mxfp8"))
    duotone.convert_parameters(m, recipes.load("mxfp8"))
    try:
        fully_shard(m, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
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
        fully_shard(m, mesh=init_device_mesh("cpu", (world,)))
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
    for mine, whole in zip(sharded.parameters(), single.parameters(), strict=True):
        if hasattr(whole, "planes"):
            piece = whole.chunk(world)[rank]
            for got, want in zip(mine._local_tensor.planes, piece.planes, strict=True):
                for name, part in want.parts.items():
                    same(got.parts[name], part, f"{want.format.name} {name}")
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 256).bfloat16()
    for got, want, what in zip(once(sharded, x, dy), once(single, x, dy), ("y", "dx"), strict=True):
        same(got, want, what)


@check
def writes_before_the_first_forward_agree_on_their_scales(folder: Path) -> None:
    """A checkpoint in bf16 is loaded into the shards: their bytes are those of the quantized whole weight."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for recipe in WRITTEN.values():
        written_as_one_process_writes(recipe, by_checkpoint, mesh)
    for write in (by_load_state_dict, by_copy, by_local_tensor):
        written_as_one_process_writes(WRITTEN["mxfp8 and nvfp4"], write, mesh)


@check
def writes_of_replicated_shards_agree_in_the_group_that_shards(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
    written_as_one_process_writes(WRITTEN["fp8-current"], by_checkpoint, mesh)


@check
def a_trained_shard_pickles_without_its_group(folder: Path) -> None:
    m = compare(HYBRID)
    local = m[0].weight._local_tensor
    assert local.context.shard is not None
    torch.save(local, folder / f"shard-{dist.get_rank()}.pt")


class Traffic(TorchDispatchMode):
    """The bytes that this rank gives to each gather, and how often amaxes are agreed on."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers: list[int] = []
        self.agreements = mock.patch.object(collectives, "all_reduce", wraps=collectives.all_reduce)

    def __enter__(self) -> "Traffic":
        self.reduce = self.agreements.start()
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        self.agreements.stop()
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.c10d._allgather_base_.default:
            self.gathers.append(args[1].nbytes)
        return func(*args, **(kwargs or {}))


EIGHT_BITS, FOUR_BITS = 0.52, 0.29
"""Most bytes of a plane on the wire, of those in bf16."""

OF_PASSES = {
    "mxfp8": EIGHT_BITS,
    "fp8-current": EIGHT_BITS,
    "fp8-rowwise": EIGHT_BITS,
    "fp8-block": EIGHT_BITS,
    "fp8-delayed": EIGHT_BITS,
    "nvfp4": FOUR_BITS,
}


@check
def each_gather_sends_the_plane_that_its_pass_reads(folder: Path) -> None:
    size = 256 * 256 // dist.get_world_size() * 2
    mixed = RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="nvfp4", wgrad="mxfp8_e4m3"),))
    cases = [(recipes.load(name), share, share) for name, share in OF_PASSES.items()]
    for recipe, forward, backward in [*cases, (HYBRID, EIGHT_BITS, EIGHT_BITS), (mixed, EIGHT_BITS, FOUR_BITS)]:
        m = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(3))).bfloat16()
        duotone.convert_parameters(duotone.convert(m, recipe, rules=()), recipe)
        for layer in (*m, m):
            fully_shard(layer, mesh=init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=True)
        for _ in range(2):
            with Traffic() as traffic:
                m(torch.randn(32, 256).bfloat16()).sum().backward()
            sent = [bytes / size for bytes in traffic.gathers]
            assert len(sent) == 6 and max(sent[:3]) <= forward and max(sent[3:]) <= backward, (recipe.name, sent)
            assert not traffic.reduce.call_count


@check
def a_foreach_step_agrees_on_all_scales_in_one_collective(folder: Path) -> None:
    for name, count in {"fp8-current": 1, "nvfp4": 1, "fp8-delayed": 1, "mxfp8": 0}.items():
        m = model(recipes.load(name))
        one = copy.deepcopy(m)
        shard(m)
        batch = torch.randn(64, 128).bfloat16()
        for each in (m, one):
            optimizer = torch.optim.SGD(each.parameters(), lr=0.5, foreach=True)
            each(batch).float().square().mean().backward()
            with Traffic() as traffic:
                optimizer.step()
            assert traffic.reduce.call_count == (count if each is m else 0), (name, traffic.reduce.call_count)
        same(m(batch), one(batch), name)


Ways = Callable[[nn.Sequential, DeviceMesh], None]
STEPS_OF = ("mxfp8", "fp8-current", "nvfp4")
"""Recipes whose columnwise planes travel, are views of what travels, and are computed from it."""


def steps(m: nn.Module, microbatches: int = 2) -> list[Tensor]:
    """Losses and last weights. Ranks see the same batch; all microbatches but the last leave gradients unreduced."""
    torch.manual_seed(1)
    dtype = next(m.parameters()).dtype
    optimizer, results = torch.optim.SGD(m.parameters(), lr=0.5), []
    for _ in range(2):
        for index in range(microbatches):
            if isinstance(m, FSDPModule):
                m.set_requires_gradient_sync(index == microbatches - 1)
                m.set_reshard_after_backward(index == microbatches - 1)
            x, y = torch.randn(64, 128).to(dtype), torch.randn(64, 256).to(dtype)
            loss = ((m(x) - y).float() ** 2).mean()
            loss.backward()
            results.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append(m(x).float())
    return [*results, *(p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in m.parameters())]


def split(m: nn.Sequential, mesh: DeviceMesh, **options: object) -> None:
    for layer in (m[0], m[2], m):
        fully_shard(layer, mesh=mesh, **options)


def recomputed(m: nn.Sequential) -> None:
    m[2] = checkpoint_wrapper(m[2])


def prefetched(m: nn.Sequential, mesh: DeviceMesh) -> None:
    split(m, mesh)
    m[0].set_modules_to_forward_prefetch([m[2]])
    m[2].set_modules_to_backward_prefetch([m[0]])


def resharded(m: nn.Sequential, mesh: DeviceMesh) -> None:
    split(m, mesh)
    m.set_reshard_after_forward(True)


def recomputed_inside(m: nn.Sequential, mesh: DeviceMesh) -> None:
    recomputed(m)
    split(m, mesh)


def recomputed_outside(m: nn.Sequential, mesh: DeviceMesh) -> None:
    split(m, mesh)
    recomputed(m)


class Recomputed(nn.Sequential):
    """Recomputes with torch's function, of which no name tells."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


def recomputed_by_a_function(m: nn.Sequential, mesh: DeviceMesh) -> None:
    m[2] = Recomputed(m[2])
    split(m, mesh)


WAYS: dict[str, Ways] = {
    "reshards": resharded,
    "keeps": functools.partial(split, reshard_after_forward=False),
    "prefetches": prefetched,
    "recomputes inside": recomputed_inside,
    "recomputes outside": recomputed_outside,
    "recomputes by a function": recomputed_by_a_function,
    "offloads": functools.partial(split, offload_policy=CPUOffloadPolicy(pin_memory=False)),
}


@check
def every_way_to_shard_gives_the_bits_of_one_process(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name in STEPS_OF:
        single = steps(model(recipes.load(name)))
        for way, apply in WAYS.items():
            m = model(recipes.load(name))
            apply(m, mesh)
            for got, want in zip(steps(m), single, strict=True):
                same(got.to(want.dtype), want, f"{name}, {way}")


if __name__ == "__main__":
    stages.COMPILE_FROM = 1 << 40  # all backends give the same bits, and a compiler would take most of the time
    checks.main()

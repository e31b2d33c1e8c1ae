"""Checkpoints through torch.distributed.checkpoint: saved by some ranks, loaded by as many or by others."""

import functools
import itertools
import os
import shutil
import sys
import warnings
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, refused, same, seeded
from torch import Tensor, nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import duotone
from duotone import recipes
from duotone.distributed import async_save, latest, load, save
from duotone.errors import UserError
from duotone.sharding.dtensors import shard_of
from duotone.tensor import QuantizedTensor

RANKS = tuple(ranks for ranks in (1, 2, 4) if ranks <= int(sys.argv[2]))
CASES = {
    "mxfp8": True,
    "fp8-current": True,
    "fp8-delayed": True,
    "mxfp8-fwd-nvfp4-bwd": True,
    "fp8-block": True,
    "nvfp4": False,
}
"""Recipe -> whether the parameters live quantized."""


def network(recipe: str, ranks: int, seed: int = 0) -> nn.Sequential:
    """A model that is sharded over the first ranks."""
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Dropout(0.1), nn.Linear(512, 256, bias=False)).bfloat16()
    duotone.convert(m, recipes.load(recipe), rules=())
    if CASES[recipe]:
        duotone.convert_parameters(m, recipes.load(recipe))
    if ranks > 1:
        for layer in (m[0], m[3], m):
            fully_shard(layer, mesh=meshes()[ranks])
    return m


@functools.cache
def meshes() -> dict[int, DeviceMesh]:
    """Of the first 1, 2 and 4 ranks, as far as there are so many."""
    return {ranks: DeviceMesh(checks.DEVICE, range(ranks)) for ranks in RANKS}


def takes_part(ranks: int) -> bool:
    meshes()  # all ranks make the groups
    return dist.get_rank() < ranks


def steps(m: nn.Module, optimizer: torch.optim.Optimizer, first: int, count: int = 2) -> list[Tensor]:
    losses = []
    for step in range(first, first + count):
        x = torch.randn(32, 128, generator=seeded(step * 10 + dist.get_rank())).bfloat16()
        loss = (m(x).float() ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def state(m: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Copies of all that the next step depends on."""
    tensors = {**duotone.rng_state(m), **duotone.recipe_state(m), "generator": torch.get_rng_state()}
    for name, parameter in m.named_parameters():
        local = shard_of(parameter.detach())
        parts = local.parts if isinstance(local, QuantizedTensor) else [local]
        tensors |= {f"{name} {at}": part for at, part in enumerate(parts)}
        tensors |= {f"{name} {key}": shard_of(value) for key, value in optimizer.state[parameter].items()}
    return {name: tensor.clone() for name, tensor in tensors.items()}


def alike(result: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert result.keys() == want.keys(), result.keys() ^ want.keys()
    for name, tensor in want.items():
        same(result[name], tensor, name)


def pair(recipe: str, ranks: int, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    m = network(recipe, ranks, seed)
    return m, torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=False)


@check
def a_resumed_run_has_the_bits_of_one_that_went_on(folder: Path) -> None:
    if takes_part(2):
        group = meshes()[2].get_group()
        for recipe in CASES:
            run = pair(recipe, 2)
            steps(*run, 0)
            path = folder / "resumed" / recipe / "step-2"
            save(path, *run, {"step": torch.tensor(2)}, group=group)
            losses = steps(*run, 2)
            want = state(*run)
            resumed = pair(recipe, 2, seed=1)
            assert load(path, *resumed, group=group)["step"] == 2
            for result, loss in zip(steps(*resumed, 2), losses, strict=True):
                same(result, loss, f"{recipe}: losses")
            alike(state(*resumed), want)


@check
def any_number_of_ranks_loads_what_any_other_number_saved(folder: Path) -> None:
    for (saved_by, loaded_by), recipe in itertools.product(itertools.permutations(RANKS, 2), ("mxfp8", "fp8-delayed")):
        path = folder / "others" / f"{recipe}-{saved_by}" / "step-2"
        if takes_part(saved_by) and not path.exists():
            run = pair(recipe, saved_by)
            steps(*run, 0)
            save(path, *run, group=meshes()[saved_by].get_group())
            whole = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in run[0].named_parameters()}
            if dist.get_rank() == 0:
                values = {name: p.detach() + 0 for name, p in whole.items()}
                torch.save([values, duotone.rng_state(run[0])], path.parent / "whole.pt")
        dist.barrier()
        if takes_part(loaded_by):
            m, optimizer = pair(recipe, loaded_by, seed=1)
            load(path, m, optimizer, group=meshes()[loaded_by].get_group())
            values, seeds = torch.load(path.parent / "whole.pt", checks.DEVICE)
            for name, parameter in m.named_parameters():
                want = values[name].chunk(loaded_by)[dist.get_rank()]
                local = shard_of(parameter.detach())
                same(local + 0, want, f"{recipe}, {saved_by} to {loaded_by}: {name}")
                if (
                    isinstance(local, QuantizedTensor)
                    and local.derives_columnwise
                    and local.planes.columnwise is not None
                ):
                    rowwise, columnwise = (plane.dequantize(local.dtype) for plane in local.planes)
                    same(columnwise.t(), rowwise, f"{recipe}, {saved_by} to {loaded_by}: {name} columnwise")
                assert optimizer.state[parameter]["step"] == 2 and optimizer.state[parameter]["exp_avg"].any()
            assert duotone.rng_state(m).keys() == seeds.keys()
            steps(m, optimizer, 2)


STATES = {
    "masters": {"master_weights": True},
    "fp8": {"master_dtype": None, "moment_dtype": torch.float8_e4m3fn, "capturable": True},
}


@check
def states_of_adamw_go_to_any_number_of_ranks(folder: Path) -> None:
    """Masters, moments and their scales. As many ranks as saved go on with the bits of a run that did not stop."""
    for (kind, options), saved_by in itertools.product(STATES.items(), RANKS):
        path = folder / kind / f"step-{saved_by}"
        if takes_part(saved_by):
            m = network("mxfp8", saved_by)
            went = m, duotone.optim.AdamW(m.parameters(), lr=1e-2, **options)
            steps(*went, 0)
            save(path, *went, group=meshes()[saved_by].get_group())
            saved = [gathered(state) for state in went[1].state.values()]
            if dist.get_rank() == 0:
                torch.save(saved, path / "whole.pt")
            steps(*went, 2)
        dist.barrier()
        for loaded_by in filter(takes_part, RANKS):
            m = network("mxfp8", loaded_by, seed=1)
            optimizer = duotone.optim.AdamW(m.parameters(), lr=1e-2, **options)
            load(path, m, optimizer, group=meshes()[loaded_by].get_group())
            for result, want in zip(
                optimizer.state.values(), torch.load(path / "whole.pt", checks.DEVICE), strict=True
            ):
                alike(gathered(result), want)
            if loaded_by == saved_by:
                steps(m, optimizer, 2)
                alike(state(m, optimizer), state(*went))


@check
def torch_gathers_and_spreads_states_of_adamw(folder: Path) -> None:
    if not takes_part(2):
        return
    group, options = meshes()[2].get_group(), StateDictOptions(full_state_dict=True, cpu_offload=True)
    pairs = [network("mxfp8", 2, seed) for seed in (0, 1)]
    optimizers = [duotone.optim.AdamW(m.parameters(), lr=1e-2, **STATES["fp8"]) for m in pairs]
    for run in zip(pairs, optimizers, strict=True):
        steps(*run, 0)
    full = [get_optimizer_state_dict(pairs[0], optimizers[0], options=options)]
    dist.broadcast_object_list(full, 0, group)
    set_optimizer_state_dict(pairs[1], optimizers[1], full[0], options=options)
    for result, want in zip(*(of.state.values() for of in optimizers), strict=True):
        alike(gathered(result), gathered(want))


@check
def columns_of_ranks_have_the_moments_of_the_whole(folder: Path) -> None:
    """In FP8, where shards end on blocks. Their scales lie like the columns."""
    if not takes_part(2):
        return
    torch.manual_seed(0)
    whole = nn.Parameter(torch.randn(8, 512).bfloat16())
    cut = nn.Parameter(distribute_tensor(whole.detach().clone(), meshes()[2], [Shard(1)]))
    states: list[dict[str, Tensor]] = []
    for parameter in (whole, cut):
        optimizer = duotone.optim.AdamW([parameter], lr=1e-2, moment_dtype=torch.float8_e4m3fn)
        for step in range(2):
            grad = torch.randn(8, 512, generator=seeded(step)).bfloat16()
            parameter.grad = grad if parameter is whole else distribute_tensor(grad, meshes()[2], [Shard(1)])
            optimizer.step()
        states.append(gathered(optimizer.state[parameter]))
    alike(*states)
    same(cut.detach().full_tensor(), whole.detach(), "weight")


@check
def moments_of_columns_that_end_inside_of_blocks_stay_in_fp32(folder: Path) -> None:
    """Other ranks would read their FP8 codes with scales of other columns."""
    if not takes_part(2):
        return
    mesh, group, runs = meshes()[2], meshes()[2].get_group(), []
    weight, grad = (torch.randn(8, 192, generator=seeded(seed)) for seed in (0, 1))
    for lay in (Tensor.clone, lambda x: distribute_tensor(x, mesh, [Shard(1)])):
        m = nn.Linear(192, 8, bias=False)
        m.weight, m.weight.grad = nn.Parameter(lay(weight)), lay(grad)
        runs.append((m, duotone.optim.AdamW(m.parameters(), lr=1e-2, moment_dtype=torch.float8_e4m3fn)))
        runs[-1][1].step()
        save(folder / f"inside-{len(runs)}", *runs[-1], group=group)
    (whole, of_whole), (cut, of_cut) = runs
    words = "ranks cut a parameter of shape (8, 192) inside of them"
    refused(lambda: load(folder / "inside-1", cut, of_cut, group=group), words)
    saved = of_whole.state_dict()
    saved["state"][0] = {
        key: distribute_tensor(value, mesh, [Shard(1)]) if value.dim() else value
        for key, value in saved["state"][0].items()
    }
    refused(lambda: of_cut.load_state_dict(saved), words)
    load(folder / "inside-2", whole, of_whole, group=group)
    same(of_whole.state[whole.weight]["exp_avg"], of_cut.state[cut.weight]["exp_avg"].full_tensor(), "exp_avg")


def gathered(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {key: part.full_tensor() if isinstance(part, DTensor) else part.clone() for key, part in state.items()}


@check
def a_save_in_the_background_holds_the_values_of_its_call(folder: Path) -> None:
    group = dist.new_group([0, 1], backend="gloo")
    if takes_part(2):
        run = pair("mxfp8", 2)
        steps(*run, 0)
        before = state(*run)
        saved = async_save(folder / "background" / "step-2", *run, group=group)
        steps(*run, 2)
        saved.result()
        load(folder / "background" / "step-2", *run, group=group)
        alike(state(*run), before)


@check
def what_cannot_be_loaded_is_one_line_on_all_ranks_and_changes_nothing(folder: Path) -> None:
    if not takes_part(2):
        return
    group, path = meshes()[2].get_group(), folder / "resumed" / "mxfp8" / "step-2"

    def refused(path: Path, recipe: str | tuple[nn.Module, torch.optim.Optimizer], text: str) -> None:
        run = pair(recipe, 2) if isinstance(recipe, str) else recipe
        before = state(*run)
        try:
            load(path, *run, group=group)
        except UserError as error:
            assert text in str(error) and "\n" not in str(error), error
        else:
            raise AssertionError(f"{path} was loaded")
        alike(state(*run), before)

    refused(path, "mxfp8-fwd-nvfp4-bwd", "another recipe or model: it has model.0.weight.columnwise.mxfp8_e4m3.codes")
    refused(path.with_name("step-9"), "mxfp8", "no finished checkpoint")
    m, adamw = pair("mxfp8", 2)
    adamw.add_param_group({"params": adamw.param_groups[0]["params"].pop()})
    refused(path, (m, adamw), "has 1 parameter groups, and this optimizer 2")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        load(path, m, torch.optim.SGD(m.parameters(), lr=1.0), group=group)
    assert [one for one in caught if "another optimizer than SGD: it has no dampening, " in str(one.message)], caught
    dist.barrier(group)
    for name, size, text in (("__1_0.distcp", 3000, "is damaged"), (".metadata", 100, ".metadata cannot be read")):
        damaged = folder / f"damaged{name}"
        if dist.get_rank() == 0:
            shutil.copytree(path, damaged)
            os.truncate(damaged / name, size)
        dist.barrier(group)
        refused(damaged, "mxfp8", text)
    try:
        save(path, *pair("mxfp8", 2), group=group)
    except UserError as error:
        assert "holds a checkpoint" in str(error), error
    else:
        raise AssertionError("a checkpoint was overwritten")


@check
def plain_weights_of_another_recipe_load_and_a_warning_names_both(folder: Path) -> None:
    if takes_part(2):
        group, path = meshes()[2].get_group(), folder / "resumed" / "nvfp4" / "step-2"
        m = network("nvfp4", 2, seed=1)
        duotone.convert(m, recipes.load("fp8-delayed"))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            load(path, m, group=group)
            load(path, network("nvfp4", 2), group=group)
        messages = [str(one.message) for one in caught if "goes on" in str(one.message)]
        assert len(messages) == 1 and "was saved under nvfp4 and goes on under fp8-delayed" in messages[0], messages
        want = network("nvfp4", 2, seed=1)
        load(path, want, group=group)
        for result, right in zip(m.parameters(), want.parameters(), strict=True):
            same(shard_of(result.detach()), shard_of(right.detach()))


@check
def all_values_are_plain_tensors(folder: Path) -> None:
    if dist.get_rank() == 0:
        stored = FileSystemReader(folder / "resumed" / "fp8-delayed" / "step-2").read_metadata().state_dict_metadata
        assert all(isinstance(value, TensorStorageMetadata) for value in stored.values())
        assert latest(folder / "resumed" / "mxfp8") == folder / "resumed" / "mxfp8" / "step-2"
        assert latest(folder / "nowhere") is None


if __name__ == "__main__":
    checks.main()

"""fully_shard over linears whose weights are DTensors: FSDP2 and tensor parallelism on a 2 x 2 mesh."""

import copy
import itertools
from pathlib import Path

import checks
import torch
from checks import check, same
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import duotone
from duotone import recipes
from duotone.distributed import load, save
from duotone.errors import UserError

NAMES = ("fp8-current", "mxfp8", "fp8-delayed", "nvfp4")


def mesh() -> DeviceMesh:
    return init_device_mesh(checks.DEVICE, (2, 2), mesh_dim_names=("data", "model"))


def network(name: str) -> nn.Sequential:
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)).bfloat16()
    return duotone.convert(m, recipes.load(name), rules=())


def cut(m: nn.Sequential, over: DeviceMesh) -> nn.Sequential:
    return parallelize_module(m, over["model"], {"0": ColwiseParallel(), "2": RowwiseParallel()})


def shard(m: nn.Sequential, over: DeviceMesh) -> nn.Sequential:
    for layer in (m[0], m[2]):
        fully_shard(layer, mesh=over["data"])
    return fully_shard(m, mesh=over["data"])


def train(m: nn.Module, shape: tuple[int, ...] = (32, 64)) -> list[Tensor]:
    """Three losses and the last weights. All ranks take the same batch, so that the average over data is exact."""
    torch.manual_seed(1)
    x, y = torch.randn(shape).bfloat16(), torch.randn(shape).bfloat16()
    optimizer, losses = torch.optim.SGD(m.parameters(), lr=0.5, foreach=False), []  # norms may be plain
    for _ in range(3):
        loss = ((m(x) - y).float() ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        assert all(p.grad.placements == p.placements for p in m.parameters() if isinstance(p, DTensor))
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach().full_tensor() if isinstance(p, DTensor) else p.detach() for p in m.parameters())]


@check
def sharded_data_changes_no_bit(folder: Path) -> None:
    over = mesh()
    for name in NAMES:
        split, both = cut(network(name), over), shard(cut(network(name), over), over)
        assert all(isinstance(p, DTensor) and p.device_mesh.ndim == 2 for p in both.parameters())
        for result, want in zip(train(both), train(split), strict=True):
            same(result, want, name)


@check
def a_state_dict_of_the_whole_model_goes_in_and_out(folder: Path) -> None:
    over, options = mesh(), StateDictOptions(full_state_dict=True)
    whole = network("mxfp8")
    both = shard(cut(copy.deepcopy(whole), over), over)
    with torch.no_grad():
        for p in both.parameters():
            p.zero_()
    set_model_state_dict(both, whole.state_dict(), options=options)
    for key, value in get_model_state_dict(both, options=options).items():
        same(value, whole.state_dict()[key], key)


LAYER = {"self_attention.layernorm_qkv": ColwiseParallel(), "self_attention.proj": RowwiseParallel()}
LAYER |= {"layernorm_mlp.fc1": ColwiseParallel(), "layernorm_mlp.fc2": RowwiseParallel()}


def layer(name: str) -> nn.Module:
    torch.manual_seed(0)
    options = {"num_gqa_groups": 2, "hidden_dropout": 0.0, "attention_dropout": 0.0, "recipe": recipes.load(name)}
    options |= {"activation": "swiglu", "split_gate": True, "params_dtype": torch.bfloat16}
    return duotone.TransformerLayer(64, 128, 4, attn_input_format="bshd", **options)


@check
def a_layer_of_pieces_is_cut_by_both_dimensions(folder: Path) -> None:
    """Bits are those of tensor parallelism alone. Whole state dicts go in and out, and checkpoints resume alone."""
    over, options = mesh(), StateDictOptions(full_state_dict=True)
    for name in NAMES[:3]:
        split, both = (parallelize_module(layer(name), over["model"], LAYER) for _ in range(2))
        fully_shard(both, mesh=over["data"])
        assert both.layernorm_mlp.fc1.gate_weight.device_mesh.ndim == 2
        for result, want in zip(train(both, (2, 16, 64)), train(split, (2, 16, 64)), strict=True):
            same(result, want, name)
        assert [row.reason for row in duotone.plan(both)] == [row.reason for row in duotone.plan(split)]
    again = fully_shard(parallelize_module(layer(name), over["model"], LAYER), mesh=over["data"])
    set_model_state_dict(again, get_model_state_dict(both, options=options), options=options)
    optimizer = torch.optim.SGD(both.parameters(), lr=0.5)
    save(folder / "layer", both, optimizer)
    single = layer(name)
    load(folder / "layer", single, torch.optim.SGD(single.parameters(), lr=0.5))
    for p, q, r in zip(both.parameters(), again.parameters(), single.parameters(), strict=True):
        same(q.full_tensor(), p.full_tensor(), "state dict")
        same(r, p.full_tensor(), "checkpoint")
    with torch.device("meta"):
        empty = layer("mxfp8")
    fully_shard(parallelize_module(empty, over["model"], LAYER), mesh=over["data"]).to_empty(device=checks.DEVICE)
    empty.reset_parameters()
    assert all(loss.isfinite() for loss in train(empty, (2, 16, 64))[:3])


WAYS = {"quantized": duotone.convert_parameters, "gathered": lambda m, _: duotone.gather_quantized(m)}


@check
def replicated_shards_give_the_bits_of_one_process(folder: Path) -> None:
    over = init_device_mesh(checks.DEVICE, (2, 2), mesh_dim_names=("replicate", "shard"))
    for name, (way, prepare) in itertools.product(("fp8-current", "mxfp8", "nvfp4"), WAYS.items()):
        recipe = recipes.load(name)
        single, both = network(name), prepare(network(name), recipe)
        if way == "quantized":
            duotone.convert_parameters(single, recipe)
        for layer in (both[0], both[2], both):
            fully_shard(layer, mesh=over)
        for result, want in zip(train(both), train(single), strict=True):
            same(result, want, f"{name}, {way}")


@check
def shards_that_one_rank_holds_alone_are_whole(folder: Path) -> None:
    over = init_device_mesh(checks.DEVICE, (4, 1), mesh_dim_names=("replicate", "shard"))
    for name, prepare in itertools.product(("fp8-current", "mxfp8"), WAYS.values()):
        single, both = network(name), prepare(network(name), recipes.load(name))
        if prepare is WAYS["quantized"]:
            duotone.convert_parameters(single, recipes.load(name))
        for layer in (both[0], both[2], both):
            fully_shard(layer, mesh=over)
        for result, want in zip(train(both), train(single), strict=True):
            same(result, want, name)


@check
def a_smaller_mesh_after_forward_is_refused_in_one_line(folder: Path) -> None:
    for prepare in WAYS.values():
        m = prepare(network("fp8-current"), recipes.load("fp8-current"))
        over = init_device_mesh(checks.DEVICE, (4,))
        for layer in (m[0], m[2]):
            fully_shard(layer, mesh=over, reshard_after_forward=2)
        fully_shard(m, mesh=over)
        try:
            train(m)
        except UserError as error:
            assert "reshard_after_forward=True or False" in str(error)
        else:
            raise AssertionError("torch keeps one buffer of a parameter after forward, and planes have two")


def refuses_to_save(both: nn.Module, folder: Path) -> None:
    """A checkpoint would take a rank's part of a weight for the whole."""
    try:
        save(folder / "refused", both, torch.optim.SGD(both.parameters()))
    except UserError as error:
        assert "which a checkpoint cannot place" in str(error)
    else:
        raise AssertionError("saved")


def parallel_pair(over: DeviceMesh, name: str, whole: list[Tensor]) -> nn.Sequential:
    """Modules that know their ranks, with quantized weights of this rank's part."""
    options = {"bias": False, "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    with duotone.quantized_model_init(recipe=recipes.load(name)):
        m = nn.Sequential(
            duotone.Linear(64, 128, parallel_mode="column", tp_group=over["model"].get_group(), **options),
            nn.ReLU(),
            duotone.Linear(128, 64, parallel_mode="row", tp_group=over["model"].get_group(), **options),
        )
    rank = over["model"].get_local_rank()
    with torch.no_grad():
        for layer, weight, dim in zip((m[0], m[2]), whole, (0, 1), strict=True):
            layer.weight.copy_(weight.chunk(2, dim)[rank])
    return m


@check
def quantized_weights_of_parallel_modules_shard_over_data(folder: Path) -> None:
    over = mesh()
    for name in ("fp8-current", "mxfp8", "fp8-rowwise"):
        whole = [layer.weight.detach().clone() for layer in (network(name)[0], network(name)[2])]
        for weight in whole:
            weight[: len(weight) // 4] *= 4  # the shards' own amaxes differ
        split, both = parallel_pair(over, name, whole), shard(parallel_pair(over, name, whole), over)
        for result, want in zip(train(both), train(split), strict=True):
            same(result, want, name)
        refuses_to_save(both, folder)
        single = network(name)
        with torch.no_grad():
            for layer, weight in zip((single[0], single[2]), whole, strict=True):
                layer.weight.copy_(weight)
                layer.bias.zero_()
                layer.bias.requires_grad_(False)
        duotone.convert_parameters(single, recipes.load(name))
        losses = train(parallel_pair(over, name, whole))[:3]
        torch.testing.assert_close(torch.stack(losses), torch.stack(train(single)[:3]), rtol=2.0**-5, atol=0)


@check
def quantized_weights_are_cut_by_both_dimensions(folder: Path) -> None:
    over = mesh()
    for name in ("mxfp8", "fp8-current", "fp8-rowwise"):
        recipe = recipes.load(name)
        single = duotone.convert_parameters(network(name), recipe)
        split, both = (duotone.convert_parameters(cut(network(name), over), recipe) for _ in range(2))
        for at, dim in ((0, 0), (2, 1)):
            want, result = single[at].weight.planes.rowwise, split[at].weight._local_tensor.planes.rowwise
            ranks = (over["model"].size(), over["model"].get_local_rank())
            same(result.dequantize(torch.float32), want.dequantize(torch.float32).chunk(ranks[0], dim)[ranks[1]], name)
        results = train(shard(both, over))
        assert type(both[0].weight._local_tensor) is duotone.QuantizedTensor
        for result, want in zip(results, train(split) if name != "fp8-rowwise" else (), strict=name != "fp8-rowwise"):
            same(result, want, name)
        for result, want in zip(results, train(single), strict=True):
            torch.testing.assert_close(
                result.float(),
                (want.dequantize() if isinstance(want, duotone.QuantizedTensor) else want).float(),
                rtol=2.0**-4,
                atol=2.0**-6,
            )
        refuses_to_save(both, folder)
    try:
        duotone.convert_parameters(cut(network("fp8-delayed"), over), recipes.load("fp8-delayed"))
    except UserError as error:
        assert "use current ones" in str(error)
    else:
        raise AssertionError("scales of a rank's own history would differ")


@check
def weights_that_tensor_parallelism_cuts_travel_as_planes(folder: Path) -> None:
    """The whole amax spans both dimensions of the mesh, those of rows and columns one each."""
    over = mesh()
    for name in ("fp8-current", "mxfp8", "fp8-rowwise", "nvfp4", "fp8-delayed"):
        split, both = (cut(network(name), over) for _ in range(2))
        shard(duotone.gather_quantized(both), over)
        for result, want in zip(train(both), train(split), strict=True):
            same(result, want, name)
        assert all(hasattr(both[at].weight._local_tensor, "fsdp_pre_all_gather") for at in (0, 2)), name


if __name__ == "__main__":
    checks.main()

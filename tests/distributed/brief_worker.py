"""Two ranks once through what ranks do: FSDP2, tensor parallelism, a checkpoint. The other workers have the rest."""

import copy
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check, same
from fsdp_models import model, split, steps
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

import duotone
from duotone import recipes
from duotone.distributed import load, save

RECIPES = ("mxfp8", "fp8-current", "fp8-delayed")


@check
def fsdp2_trains_as_one_process(folder: Path) -> None:
    """Quantized weights travel as planes; plain ones are encoded where they were gathered."""
    for name in RECIPES:
        for is_quantized in (True, False):
            single = model(recipes.load(name), is_quantized=is_quantized)
            sharded = copy.deepcopy(single)
            split(sharded, checks.mesh())
            for result, want in zip(steps(sharded, rate=0.02), steps(single, rate=0.02), strict=True):
                same(result, want, f"{name} {is_quantized}")


class Gathered(TorchDispatchMode):
    """The bytes that this rank gives to gathers."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is torch.ops.c10d._allgather_base_.default:
            self.bytes += args[1].nbytes
        return func(*args, **(kwargs or {}))


@check
def fsdp2_gathers_planes_of_plain_weights(folder: Path) -> None:
    """One byte an element and its scales, where bf16 has two, in forward and in backward."""
    m = duotone.gather_quantized(model(recipes.load("mxfp8"), is_quantized=False))
    of_bf16 = 2 * sum(p.nbytes for p in m.parameters()) / dist.get_world_size()
    split(m, checks.mesh())
    with Gathered() as gathered:
        m(torch.randn(32, 128).bfloat16()).sum().backward()
    assert 0.4 * of_bf16 < gathered.bytes < 0.6 * of_bf16, (gathered.bytes, of_bf16)


@check
def the_bias_of_a_linear_of_dtensors_is_added_once(folder: Path) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    whole = duotone.convert(nn.Sequential(nn.Linear(128, 96)), "mxfp8", rules=())
    with torch.no_grad():
        whole[0].bias.fill_(3)
    x = torch.randn(64, 128)
    want = whole(x)
    ways = (RowwiseParallel(), x.chunk(world, 1)[rank], want), (ColwiseParallel(), x, want.chunk(world, 1)[rank])
    for style, piece, expected in ways:
        cut = parallelize_module(copy.deepcopy(whole), checks.mesh(), {"0": style})
        y = cut(piece)
        assert (y - expected).norm() < 0.01 * expected.norm(), (y - expected).norm() / expected.norm()  # two parts


@check
def tensor_parallel_linears_have_the_output_of_a_whole_one(folder: Path) -> None:
    """Rows of the input are gathered as codes, and those of the output are summed and scattered."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for name in RECIPES:
        torch.manual_seed(3)
        x, up, down = torch.randn(64, 128), torch.randn(96, 128) / 12, torch.randn(128, 96) / 10
        options = {"bias": False, "tp_group": dist.group.WORLD, "sequence_parallel": True}
        first = duotone.Linear(128, 96, parallel_mode="column", **options)
        second = duotone.Linear(96, 128, parallel_mode="row", **options)
        with torch.no_grad():
            first.weight.copy_(up.chunk(world)[rank])
            second.weight.copy_(down.chunk(world, 1)[rank])
        leaf = x.chunk(world)[rank].clone().requires_grad_()
        with duotone.autocast(recipe=name, amax_reduction_group=dist.group.WORLD):
            y = second(first(leaf))
        y.backward(torch.ones_like(y))
        exact = x.clone().requires_grad_()
        want = exact @ up.T @ down.T
        want.backward(torch.ones_like(want))
        assert exact.grad is not None and leaf.grad is not None
        for result, whole in ((y, want), (leaf.grad, exact.grad)):
            piece = whole.chunk(world)[rank]
            assert (result - piece).norm() < 0.08 * piece.norm(), (
                name,
                (result - piece).norm() / piece.norm(),
            )  # 2.6 % of each of four operands in E4M3


@check
def a_checkpoint_resumes_with_the_bits_of_a_run_that_went_on(folder: Path) -> None:
    for name in ("nvfp4", "fp8-delayed"):
        run = pair(name, 0)
        train(*run, 0)
        save(folder / name / "step-2", *run)
        losses = train(*run, 2)
        resumed = pair(name, 1)
        load(folder / name / "step-2", *resumed)
        for result, want in zip(train(*resumed, 2), losses, strict=True):
            same(result, want, name)


def pair(recipe: str, seed: int) -> tuple[nn.Module, duotone.optim.AdamW]:
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 128, bias=False)).bfloat16()
    duotone.convert(m, recipe, rules=())
    if recipe == "fp8-delayed":
        duotone.convert_parameters(m, recipe)
    split(nn.Sequential(*m), checks.mesh())
    return m, duotone.optim.AdamW(m.parameters(), lr=1e-2)


def train(m: nn.Module, optimizer: duotone.optim.AdamW, first: int) -> list[Tensor]:
    losses = []
    for step in range(first, first + 2):
        loss = m(torch.randn(32, 128, generator=checks.seeded(step)).bfloat16()).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


if __name__ == "__main__":
    checks.main()

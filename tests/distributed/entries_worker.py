"""Entries of other libraries over two ranks against one process."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import checks
import torch
import torch.distributed as dist
from checks import check
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

sys.path.append(str(Path(__file__).parents[1] / "conversion"))
from causal import batch, llama

import duotone

EVEN = {"num_key_value_heads": 2, "intermediate_size": 128, "num_hidden_layers": 1}
"""Sizes whose parts on two ranks end on blocks."""


def close(result: Tensor, want: Tensor, what: str, within: float = 1e-5) -> None:
    """Equal up to the order of sums."""
    assert (result - want).norm() <= within * want.norm(), f"{what}: {(result - want).norm() / want.norm()}"


@functools.cache
def plain(folder: Path) -> Path:
    """The folder of a plain model, which the first rank writes."""
    path = folder / "plain"
    if dist.get_rank() == 0:
        llama(**EVEN).save_pretrained(path)
    dist.barrier()
    return path


@functools.cache
def pair(folder: Path, recipe: str, quantize: bool = False) -> tuple[nn.Module, nn.Module]:
    """A model under a tensor parallel plan of transformers, and that of one process."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    from duotone.integrations.transformers import DuotoneConfig

    options = {"quantization_config": DuotoneConfig(recipe, quantize_parameters=quantize)}
    plan = DistributedConfig(tp_size=2, tp_plan="auto")
    spread = AutoModelForCausalLM.from_pretrained(plain(folder), **options, distributed_config=plan)
    return spread.train(), AutoModelForCausalLM.from_pretrained(plain(folder), **options).train()


@check
def a_tensor_parallel_plan_of_transformers_gives_the_values_of_one_process(folder: Path) -> None:
    for recipe in ("mxfp8", "fp8-current", "fp8-delayed", "nvfp4"):
        spread, one = pair(folder, recipe)
        assert str(duotone.plan(spread)) == str(duotone.plan(one)), recipe
        for at in range(2):
            loss, want = (m(input_ids=batch(at), labels=batch(at)).loss for m in (spread, one))
            close(loss, want, recipe)
            loss.backward()
            want.backward()
        for (name, result), want in zip(spread.named_parameters(), one.parameters(), strict=True):
            if recipe != "nvfp4" and want.grad is not None:  # each rank rounds at random
                close(
                    getattr(result.grad, "full_tensor", lambda result=result: result.grad)(),
                    want.grad,
                    f"{recipe}, {name}",
                    2e-3,
                )
        with torch.no_grad():
            close(spread(batch(2)).logits, one(batch(2)).logits, recipe)


@check
def it_generates_is_saved_and_dequantized_as_in_one_process(folder: Path) -> None:
    spread, one = pair(folder, "mxfp8", True)
    tokens = [m.eval().generate(batch(2)[:, :8], max_new_tokens=4, do_sample=False) for m in (spread, one)]
    assert torch.equal(*tokens)
    spread.save_pretrained(folder / "saved")
    dist.barrier()
    saved = type(one).from_pretrained(folder / "saved")
    for (name, result), want in zip(saved.named_parameters(), one.parameters(), strict=True):
        checks.same(result, want.dequantize() if isinstance(want, duotone.QuantizedTensor) else want, name)
    assert type(spread.dequantize().model.layers[0].mlp.up_proj) is nn.Linear
    close(spread(batch(2)).logits, one.dequantize()(batch(2)).logits, "dequantized")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))


def rows(at: int) -> Tensor:
    """What both ranks see in one step."""
    return torch.randn(64, 64, generator=torch.Generator().manual_seed(at))


def batch_of_rank(at: int) -> Tensor:
    return rows(at).chunk(2)[dist.get_rank()]


@functools.cache
def losses_of_one_process(recipe: str) -> list[float]:
    """Of a plain loop over the rows of both ranks."""
    model = duotone.convert(layers(), recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return [step(model, optimizer, rows(at), torch.Tensor.backward) for at in range(3)]


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, backward: Callable[[Tensor], object]) -> float:
    optimizer.zero_grad()
    loss = (model(x) - x).square().mean()
    backward(loss)
    optimizer.step()
    return loss.item()


def assert_trains(losses: list[float], recipe: str) -> None:
    """The mean of the ranks is what one process computes: each row has its scales."""
    together = torch.tensor(losses)
    dist.all_reduce(together)
    close(together / 2, torch.tensor(losses_of_one_process(recipe)), recipe, 1e-3)


def as_under_torchrun() -> None:
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "TORCHELASTIC_RUN_ID": "entries"}


@check
def accelerate_trains_over_ranks_under_ddp(folder: Path) -> None:
    as_under_torchrun()
    from accelerate import Accelerator

    from duotone.integrations.accelerate import prepare

    accelerator, model = Accelerator(cpu=True), layers()
    model, optimizer = prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe="mxfp8")
    assert isinstance(model, nn.parallel.DistributedDataParallel)
    assert_trains([step(model, optimizer, batch_of_rank(at), accelerator.backward) for at in range(3)], "mxfp8")


@check
def accelerate_trains_over_ranks_under_fsdp2(folder: Path) -> None:
    as_under_torchrun()
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import AcceleratorState
    from accelerate.utils import DistributedType

    from duotone.integrations.accelerate import prepare

    AcceleratorState._reset_state()
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator, model = Accelerator(cpu=True), layers()
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin  # not for CPUs
    model, optimizer = prepare(accelerator, model, torch.optim.AdamW(model.parameters(), lr=1e-2), recipe="mxfp8")
    assert isinstance(model, FSDPModule)
    assert_trains([step(model, optimizer, batch_of_rank(at), accelerator.backward) for at in range(3)], "mxfp8")


@check
def fabric_trains_over_ranks_under_ddp_and_model_parallelism(folder: Path) -> None:
    as_under_torchrun()
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy

    from duotone.integrations.lightning import FabricDuotonePrecision

    def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
        return fully_shard(module, mesh=mesh["data_parallel"])

    for strategy in (DDPStrategy(), ModelParallelStrategy(parallelize, data_parallel_size=2, tensor_parallel_size=1)):
        plugin = FabricDuotonePrecision("mxfp8")
        fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy, plugins=plugin)
        fabric.launch()
        model = layers()
        if isinstance(strategy, DDPStrategy):
            model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
        else:
            model = fabric.setup(model)
            optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        assert_trains([step(model, optimizer, batch_of_rank(at), fabric.backward) for at in range(3)], "mxfp8")


if __name__ == "__main__":
    checks.main()

"""Entries of other libraries over two ranks against one process."""

import functools
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

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


def large(at: int) -> Tensor:
    """A batch whose values are 100 times larger on the second rank, so that its delayed scales are others."""
    return batch_of_rank(at) * (1, 100)[dist.get_rank()]


def assert_resumes(build: Callable[[], tuple[nn.Module, Callable[[int], float], Callable, Callable]]) -> None:
    """`build` gives a model, its step, and what saves and loads a run. A new run continues with the same losses."""
    model, train, save, _ = build()
    for at in range(2):
        train(at)
    save()
    dist.barrier()
    states = duotone.recipe_state(model)
    scales = torch.cat([state for name, state in states.items() if name.endswith("forward.scale")])
    others = [torch.empty_like(scales) for _ in range(2)]
    dist.all_gather(others, scales)
    assert not torch.equal(*others)
    losses = [train(at) for at in range(2, 4)]
    again, train, _, load = build()
    load()
    assert all(torch.equal(state, duotone.recipe_state(again)[name]) for name, state in states.items())
    assert [train(at) for at in range(2, 4)] == losses


@check
def accelerate_resumes_with_the_scales_of_each_rank(folder: Path) -> None:
    as_under_torchrun()
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    from duotone.integrations.accelerate import prepare

    def build():
        AcceleratorState._reset_state()
        accelerator, raw = Accelerator(cpu=True), layers()
        model, optimizer = prepare(accelerator, raw, torch.optim.AdamW(raw.parameters(), lr=1e-2), recipe="fp8-delayed")
        train = lambda at: step(model, optimizer, large(at), accelerator.backward)  # noqa: E731
        where = str(folder / "accelerate")
        return raw, train, lambda: accelerator.save_state(where), lambda: accelerator.load_state(where)

    assert_resumes(build)
    (folder / "accelerate" / f"duotone_0_{dist.get_rank()}.txt").unlink()
    *_, load = build()
    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        load()
    assert any("scales are those of another rank" in str(note.message) for note in notes)


@check
def fabric_resumes_with_the_scales_of_each_rank(folder: Path) -> None:
    as_under_torchrun()
    from lightning.fabric import Fabric

    from duotone.integrations.lightning import FabricDuotonePrecision

    def build():
        plugin, raw = FabricDuotonePrecision("fp8-delayed"), layers()
        fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=plugin)
        fabric.launch()
        model, optimizer = fabric.setup(raw, torch.optim.AdamW(raw.parameters(), lr=1e-2))
        state = {"model": model, "optimizer": optimizer, "precision": plugin}
        train = lambda at: step(model, optimizer, large(at), fabric.backward)  # noqa: E731
        where = folder / "fabric.ckpt"
        return raw, train, lambda: fabric.save(where, state), lambda: fabric.load(where, state)

    assert_resumes(build)


@check
def the_state_of_all_ranks_gives_each_its_own(folder: Path) -> None:
    """For Trainer and torchtitan, which keep it as a text. Another number of ranks gets what clips no value."""
    from duotone.integrations.run_state import load_packed_state, packed_state

    model = duotone.convert(layers(), "fp8-delayed")
    model(large(0)).sum().backward()
    states, text = duotone.recipe_state(model), packed_state(model, of_all_ranks=True)
    again = duotone.convert(layers(), "fp8-delayed")
    load_packed_state(again, text)
    assert all(torch.equal(state, duotone.recipe_state(again)[name]) for name, state in states.items())
    with mock.patch.object(dist, "get_world_size", return_value=3):
        load_packed_state(again, text)
    for name, state in states.items():
        extreme = state.clone()
        dist.all_reduce(extreme, dist.ReduceOp.MIN if name.endswith(".scale") else dist.ReduceOp.MAX)
        assert torch.equal(duotone.recipe_state(again)[name], extreme), name


if __name__ == "__main__":
    checks.main()

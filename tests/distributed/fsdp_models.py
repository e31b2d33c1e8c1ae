"""The model of the FSDP2 workers."""

import checks
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

import duotone
from duotone.recipes import Recipe, Rule, RuleRecipe

HYBRID = RuleRecipe(rules=(Rule(fprop="mxfp8_e4m3", dgrad="fp8_e4m3_tensor", wgrad="mxfp8_e4m3"),))


def model(recipe: Recipe, *, is_quantized: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    result = nn.Sequential(nn.Linear(128, 256, bias=False), nn.ReLU(), nn.Linear(256, 256)).bfloat16()
    with torch.no_grad():
        for layer in (result[0], result[2]):
            layer.weight[:128] *= 4  # the shards' own amaxes differ
    duotone.convert(result, recipe)
    if is_quantized:
        duotone.convert_parameters(result, recipe)
    return result


def split(m: nn.Sequential, mesh: DeviceMesh, **options: object) -> None:
    for layer in (m[0], m[2], m):
        fully_shard(layer, mesh=mesh, **options)


SLOW = 0.02
"""A rate at which no weight outgrows its delayed scale in one step. An evaluation would measure such a weight, but
planes that `gather_quantized` sends follow the history."""


def steps(m: nn.Module, microbatches: int = 2, rate: float = 0.5) -> list[Tensor]:
    """Losses and last weights. Ranks see the same batch; all microbatches but the last leave gradients unreduced."""
    torch.manual_seed(1)
    dtype = next(m.parameters()).dtype
    optimizer, results = torch.optim.SGD(m.parameters(), lr=rate), []
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
    for module in m.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [*results, *map(whole, m.parameters())]


def whole(parameter: nn.Parameter) -> Tensor:
    """Of all ranks, on the device of their group; FSDP2 may hold shards on the host."""
    p = parameter.detach()
    return p.to(checks.DEVICE).full_tensor() if isinstance(p, DTensor) else p


def once(m: nn.Module) -> Tensor:
    torch.manual_seed(5)
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    m(x).square().mean().backward()
    assert x.grad is not None
    return x.grad

"""On a CUDA device: a converted block of another library, fused, against float64 and against itself without fuse."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone.pipeline.autograd import RUNNER

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
DEVICE = "cuda"
RECIPES = ["bf16", "fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"]


class Block(nn.Module):
    """As Llama's: RMSNorm, q, k and v, a gated MLP."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.before, self.between = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        self.q, self.k, self.v, self.o = (nn.Linear(width, size, bias=False) for size in (width, 128, 128, width))
        self.mlp = GatedMLP(width, inner)

    def forward(self, x: Tensor) -> Tensor:
        h = self.before(x)
        q = self.q(h).unflatten(-1, (-1, 64)).transpose(1, 2)
        k = self.k(h).unflatten(-1, (-1, 64)).transpose(1, 2)
        v = self.v(h).unflatten(-1, (-1, 64)).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


BLOCKS = [{"before": ["q", "k", "v"], "between": "mlp"}]


class GatedMLP(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def results(m: nn.Module, x: Tensor) -> dict[str, Tensor]:
    m.zero_grad()
    x = x.detach().requires_grad_()
    y = m(x)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype, device=y.device)).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad.clone() for name, p in m.named_parameters()}


def error(results: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    return max(((results[n].double() - exact[n]).norm() / exact[n].norm()).item() for n in exact)


@pytest.fixture
def block() -> Block:
    torch.manual_seed(0)
    return Block(256, 384).to(DEVICE, torch.bfloat16)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 128, 256, generator=torch.Generator().manual_seed(1)).to(DEVICE, torch.bfloat16)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_fused_block_is_as_close_to_float64_as_without_fuse(recipe: str, block: Block, x: Tensor) -> None:
    exact = results(copy.deepcopy(block).double(), x.double())
    m = duotone.convert(block, recipe)
    unfused = error(results(m, x), exact)
    duotone.fuse(m, blocks=BLOCKS)
    count = 0

    def watch(apply, *arguments):
        nonlocal count
        count += 1
        return apply(*arguments)

    with RUNNER.watched(watch):
        fused = error(results(m, x), exact)
    assert count == (7 if recipe == "fp8-delayed" else 3) and fused < 1.25 * unfused + 0.01


def test_a_fused_block_has_the_same_bits_in_each_step_and_when_it_is_recomputed(block: Block, x: Tensor) -> None:
    m = duotone.fuse(duotone.convert(block, "mxfp8"), blocks=BLOCKS)
    first = results(m, x)
    again = results(m, x)
    assert all(torch.equal(first[name], again[name]) for name in first)
    m.zero_grad()
    leaf = x.detach().requires_grad_()
    y = checkpoint(m, leaf, use_reentrant=False)
    (y * torch.linspace(-1, 1, y.shape[-1], dtype=y.dtype, device=y.device)).sum().backward()
    assert torch.equal(leaf.grad, first["x"]) and torch.equal(m.mlp.up.weight.grad, first["mlp.up.weight"])

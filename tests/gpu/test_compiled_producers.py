"""On a CUDA device: compiled norms, activations and linears are rows, with eager's bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import duotone
from duotone import recipes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
KINDS = {"gelu": "LayerNorm", "swiglu": "RMSNorm"}


def mlp(name: str, activation: str, recompute: bool = False) -> duotone.LayerNormMLP:
    torch.manual_seed(0)
    recipe = replace(recipes.load(name), recompute_columnwise=recompute)
    options = {"normalization": KINDS[activation], "activation": activation, "recipe": recipe}
    return duotone.LayerNormMLP(256, 384, bias=False, device="cuda", params_dtype=torch.bfloat16, **options)


def steps(module: torch.nn.Module, call: object) -> list[Tensor]:
    """Outputs and gradients of three steps, whose delayed scales move."""
    x, results = torch.randn(2, 64, 256, device="cuda", generator=torch.Generator("cuda").manual_seed(1)), []
    for i in range(3):
        each = (x.bfloat16() * (1 + i)).requires_grad_()
        y = call(each)  # type: ignore[operator]
        results += [y.detach(), *torch.autograd.grad(y.square().sum(), [each, *module.parameters()])]
    return results


@pytest.mark.parametrize("activation", KINDS)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_compiled_mlp_gives_the_bits_of_eager(name: str, recompute: bool, activation: str) -> None:
    eager, traced = (mlp(name, activation, recompute) for _ in range(2))
    traced.load_state_dict(eager.state_dict(), strict=False)
    duotone.load_rng_state(traced, duotone.rng_state(eager))
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True, dynamic=False)
    for a, b in zip(steps(eager, eager), steps(traced, compiled), strict=True):
        assert torch.equal(a, b)


def test_inductor_calls_the_ops_and_stays_close_to_eager() -> None:
    eager, traced = (mlp("fp8-delayed", "swiglu") for _ in range(2))
    traced.load_state_dict(eager.state_dict(), strict=False)
    for a, b in zip(steps(eager, eager), steps(traced, torch.compile(traced, fullgraph=True)), strict=True):
        assert torch.equal(a, b)


class Around(torch.nn.Module):
    """A residual around a layer."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(x)


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-block", "nvfp4"])
def test_inductor_gives_a_row_the_pieces_of_a_weight(name: str) -> None:
    """The row has the bits that it has with the joined weight."""
    torch.manual_seed(0)
    options = {"bias": False, "device": "cuda", "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    split = {"normalization": "RMSNorm", "parameters_split": ("query", "key")}
    layer = duotone.LayerNormLinear(256, 256, **split, **options)
    eager, traced = Around(layer), Around(duotone.LayerNormLinear(256, 256, **split, **options))
    traced.load_state_dict(eager.state_dict(), strict=False)
    duotone.load_rng_state(traced, duotone.rng_state(eager))
    compiled = torch.compile(traced, fullgraph=True, dynamic=False)
    for a, b in zip(steps(eager, eager), steps(traced, compiled), strict=True):
        assert torch.equal(a, b)

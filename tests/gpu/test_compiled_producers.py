"""On a CUDA device: compiled norms and activations before a cast are eager's ops, with eager's bits."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.library import opcheck

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
def test_inductor_adds_in_the_kernel_of_a_norm_and_joins_no_weights(name: str) -> None:
    """The ops that `dispatch.graph_patterns` puts in have the bits of those that they stand for."""
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


@pytest.mark.parametrize("row", ["fp8_e4m3_tensor", "fp8_e4m3_1x128"])
def test_the_ops_are_what_their_schemas_say(row: str) -> None:
    x, z = (torch.randn(3, 32, count, device="cuda").bfloat16() for count in (256, 512))
    gamma, beta = (torch.randn(256, device="cuda").bfloat16() for _ in range(2))
    op, saved = torch.ops.duotone.produced_planes, []
    for what, inputs in {
        "LayerNorm": [x, gamma, beta],
        "RMSNorm": [x, gamma, None],
        "gelu": [x],
        "gated silu": [z],
        "gradient of gated silu": [x, z],
    }.items():
        opcheck(op.default, (what, inputs, 1e-5, row, row, True))
        saved.append(op(what, inputs, 1e-5, row, row, True))
    again = op("LayerNorm", [x, gamma, beta, *saved[0][:2]], 1e-5, "", row, True)
    assert torch.equal(again[0], op("LayerNorm", [x, gamma, beta], 1e-5, "", row, True)[2])
    norm_gradients = torch.ops.duotone.norm_gradients.default
    for needs in ([True, False, True], [True, True, True]):
        call = ("LayerNorm", x, x, gamma, beta, saved[0][:2], needs)
        opcheck(norm_gradients, call)
        opcheck(norm_gradients, (*call, x))
        alone, around = norm_gradients(*call), norm_gradients(*call, x)
        assert torch.equal(alone[0] + x, around[0])
        assert all(torch.equal(a, b) for a, b in zip(alone[1:], around[1:], strict=True))
    opcheck(op.default, ("rows", [z[0], z[1]], 0.0, row, row, True))

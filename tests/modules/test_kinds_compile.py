"""Each kind of module compiles whole, with the bits of eager code. test_compile.py has recipes and situations."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import ops

KINDS: dict[str, Callable[[], nn.Module]] = {
    "converted": lambda: duotone.convert(nn.Sequential(nn.Linear(64, 64)), "fp8-delayed", rules=()),
    "quantized": lambda: duotone.convert_parameters(
        duotone.convert(nn.Sequential(nn.Linear(64, 64)), "mxfp8", rules=()), "mxfp8"
    ),
    "linear": lambda: duotone.Linear(64, 64, recipe="nvfp4"),
    "layer norm linear": lambda: duotone.LayerNormLinear(64, 64, recipe="fp8-current"),
    "layer norm mlp": lambda: duotone.LayerNormMLP(64, 128, recipe="mxfp8", activation="swiglu"),
    "sequence of ops": lambda: ops.Sequential(
        ops.RMSNorm(64), ops.Linear(64, 128, recipe="fp8-current"), ops.GELU(), ops.Linear(128, 64, recipe="mxfp8")
    ),
    "attention": lambda: duotone.MultiheadAttention(64, 2, attention_dropout=0.0, recipe="fp8-current"),
}


def step(run: Callable[[Tensor], Tensor], m: nn.Module, x: Tensor) -> list[Tensor]:
    m.zero_grad()
    leaf = x.clone().requires_grad_()
    y = run(leaf)
    y.backward(torch.ones_like(y))
    gradients = [p.grad for p in m.parameters() if p.grad is not None]
    return [y.detach(), leaf.grad, *(each.clone() for each in gradients + list(m.buffers()))]


def assert_compiles(m: nn.Module, backend: str, *shape: int) -> None:
    """Two steps, which random seeds and delayed scales move."""
    compiled = copy.deepcopy(m)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    for _ in range(2):
        x = torch.randn(*shape).bfloat16()
        for result, want in zip(step(run, compiled, x), step(m, m, x), strict=True):
            assert torch.equal(result, want)


@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_module_compiles_whole_with_the_bits_of_eager_code(kind: str) -> None:
    assert_compiles(KINDS[kind]().bfloat16(), "aot_eager", 4, 32, 64)


def test_experts_compile_whole_with_the_bits_of_eager_code() -> None:
    m = duotone.GroupedLinear(2, 64, 64, recipe="mxfp8").bfloat16()
    compiled = copy.deepcopy(m)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x = torch.randn(96, 64).bfloat16()
    rows = torch.tensor([32, 64])
    for result, want in zip(step(lambda x: run(x, rows), compiled, x), step(lambda x: m(x, rows), m, x), strict=True):
        assert torch.equal(result, want)


def test_inductor_runs_a_converted_linear_with_the_bits_of_eager_code() -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(64, 32)).bfloat16(), "fp8-current", rules=())
    assert_compiles(m, "inductor", 32, 64)

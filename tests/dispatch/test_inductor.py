"""Code that inductor compiles for a CPU has eager's bits, also where a matrix ends inside of a block."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, recipes
from duotone.dispatch.compiler import compiler_reason
from duotone.dispatch.products import factors
from duotone.recipes.builtin import BUILTIN
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane_encoder import encode_plane

pytestmark = pytest.mark.skipif(bool(compiler_reason()), reason="inductor needs a C++ compiler: apt-get install g++")

RAGGED = 200, 72, 136
"""Rows, K and N, of which each cuts blocks of 16, of 32 and of 128."""
FAMILIES = ["fp8_e4m3_tensor", "fp8_e5m2_row", "fp8_e4m3_1x128_fp32", "fp8_e4m3_128x128", "mxfp8_e4m3"]
FAMILIES += ["mxfp8_e5m2_32x32", "mxfp6_e3m2", "mxfp4", "nvfp4_rht_sr", "nvfp4_16x16", "nvfp4_row", "nvfp4_4over6_mse"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def fresh_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Code that does not compile its casts either is the reference."""
    monkeypatch.setattr("duotone.dispatch.stages.COMPILE_FROM", 1 << 30)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def planes(x: Tensor, seed: Tensor, names: list[str]) -> list[Tensor]:
    """Everything that formats make of a matrix: parts, decoded values, operands of products, both directions."""
    outputs, ctx = [], QuantizeContext(seed=seed)
    for name in names:
        for side, matrix in (("row", x), ("col", x.t())):
            plane = encode_plane(formats.get(name), matrix, ctx, side)
            outputs += [*plane.parts.values(), factors(plane).values, plane.dequantize(torch.float32)]
        turned = plane.transposed()
        outputs += [] if turned is None else turned.parts.values()
    return outputs


def compare_planes(names: list[str], dtype: torch.dtype) -> None:
    x, seed = torch.randn(RAGGED[0], RAGGED[1]).to(dtype), torch.tensor([77])
    x[3], x[4, 5] = 0, 1e-7
    result = torch.compile(planes, fullgraph=True)(x, seed, names)
    for one, other in zip(result, planes(x, seed, names), strict=True):
        assert torch.equal(one, other)


TURNS = {
    torch.float32: ["nvfp4_rht_sr"],
    torch.bfloat16: ["mxfp8_e4m3"],
    torch.float16: ["fp8_e4m3_128x128"],
}
"""Scales in fp32, as powers of two, and on two levels with a rotation, which loses most where it starts from fp32.

The linears below meet the others in fp32.
"""


@pytest.mark.parametrize(("dtype", "names"), TURNS.items(), ids=str)
def test_planes_of_ragged_matrices_have_the_bits_of_eager(dtype: torch.dtype, names: list[str]) -> None:
    """One graph for all names of a dtype; the slow test has the cross."""
    compare_planes(names, dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_planes_of_every_family_have_the_bits_of_eager(dtype: torch.dtype) -> None:
    compare_planes(FAMILIES, dtype)


Case = tuple[str, tuple[int, int, int]]
"""A recipe, and rows, K and N."""


class Beside(nn.Module):
    """A linear for each case, with an input of its own."""

    def __init__(self, cases: list[Case], dtype: torch.dtype) -> None:
        super().__init__()
        linears = []
        for i, (recipe, (_, k, n)) in enumerate(cases):
            linears.append(duotone.Linear(k, n, params_dtype=dtype, recipe=recipes.load(recipe), name=str(i)))
        self.linears = nn.ModuleList(linears)

    def forward(self, inputs: list[Tensor]) -> list[Tensor]:
        return [linear(x) for linear, x in zip(self.linears, inputs, strict=True)]


def step(run: Any, m: nn.Module, inputs: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    inputs = [x.clone().requires_grad_() for x in inputs]
    outputs = run(inputs)
    torch.autograd.backward(outputs, gradients)
    results = {f"y {i}": y.detach() for i, y in enumerate(outputs)} | {f"dx {i}": x.grad for i, x in enumerate(inputs)}
    return results | {name: p.grad for name, p in m.named_parameters()}


def compare_linears(cases: list[Case], dtype: torch.dtype) -> None:
    """Outputs and the gradients of inputs and weights have equal bits; sums over rows are taken in another order."""
    eager = Beside(cases, dtype)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True)
    inputs = [torch.randn(rows, k).to(dtype) for _, (rows, k, _) in cases]
    gradients = [torch.randn(rows, n).to(dtype) for _, (rows, _, n) in cases]
    result = step(run, compiled, inputs, gradients)
    for name, want in step(eager, eager, inputs, gradients).items():
        if name.endswith("bias"):
            torch.testing.assert_close(result[name], want, rtol=torch.finfo(dtype).eps, atol=1e-4)
        else:
            assert torch.equal(result[name], want), name


def test_linears_of_ragged_sizes_in_fp32() -> None:
    compare_linears([("mxfp8", (64, 48, 64)), ("fp8-block", (200, 64, 32))], torch.float32)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", BUILTIN)
def test_every_recipe_at_ragged_sizes(name: str, dtype: torch.dtype) -> None:
    sizes = [RAGGED, (32, 48, 128), (32, 1000, 256), (100, 64, 64), (64, 96, 33)]
    compare_linears([(name, one) for one in sizes], dtype)


def test_scales_of_both_directions_compile_where_their_numbers_differ() -> None:
    """inductor of torch 2.13 ends in an assertion where it splits the loops of both by one number."""
    model = duotone.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), recipes.load("mxfp8"))
    x = torch.randn(32, 64)
    assert torch.equal(torch.compile(model)(x), model(x))


def test_casts_of_both_directions_compile_in_fp32() -> None:
    """inductor fuses those of a gradient whose sides differ, and ends in an assertion where it splits their loops."""
    eager = duotone.convert(nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)), recipes.load("mxfp8"), ())
    compiled = copy.deepcopy(eager)
    x, dy = torch.randn(256, 64, requires_grad=True), torch.randn(256, 64)
    result, want = (run(x) for run in (torch.compile(compiled), eager))
    assert torch.equal(result, want)
    result.backward(dy), want.backward(dy)
    for parameter, reference in zip(compiled.parameters(), eager.parameters(), strict=True):
        # Biases sum in another order.
        torch.testing.assert_close(parameter.grad, reference.grad, rtol=2**-23, atol=1e-4)

"""Ops that make a matrix and its planes: what compilers are told, and what runs where no kernel makes the matrix."""

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch import produced_ops
from duotone.dispatch.produced_ops import PRODUCERS, empty_produced, produced_planes
from duotone.formats import get

ROW, COLUMN = "fp8_e4m3_tensor", "fp8_e4m3_1x128"
LEAD, WIDTH = (3, 8), 256


def cast(x: Tensor, row: str, col: str, propagate: bool, *_: object) -> list[Tensor]:
    """`cast_planes` by stages, with what it was given at the end."""
    return [*get(row).encode(x).values(), *get(col).encode(x.t()).values(), x]


def inputs_of(what: str) -> list[Tensor | None]:
    """Those of norms are in fp32, as their statistics are on CUDA."""
    x = torch.randn(*LEAD, WIDTH)
    if what == "rows":
        return [x[0], x[1], x[2]]
    if what in ("LayerNorm", "RMSNorm"):
        return [x, torch.randn(WIDTH), torch.randn(WIDTH) if what == "LayerNorm" else None]
    dy = torch.randn(*LEAD, WIDTH // 2 if "gated" in what else WIDTH)
    return [dy.bfloat16(), x.bfloat16()] if what.startswith("gradient") else [x.bfloat16()]


def expected(what: str, inputs: Sequence[Tensor]) -> Tensor:
    """The matrix, from autograd where it is a gradient."""
    if what == "LayerNorm":
        return F.layer_norm(inputs[0], (WIDTH,), inputs[1], inputs[2])
    if what == "RMSNorm":
        return F.rms_norm(inputs[0], (WIDTH,), inputs[1], 1e-5)
    if what == "rows":
        return torch.cat([*inputs])
    *dy, x = inputs
    x = x.clone().requires_grad_()
    functions = {"gelu": lambda x: F.gelu(x, approximate="tanh"), "relu": F.relu, "silu": F.silu}
    functions["srelu"] = lambda x: F.relu(x).square()
    function = functions[what.split()[-1]]
    a, b = x.chunk(2, -1) if "gated" in what else (x, None)
    y = function(a) if b is None else function(a) * b
    return torch.autograd.grad(y, x, dy)[0] if dy else y


@pytest.mark.parametrize("what", PRODUCERS)
def test_an_op_gives_the_planes_of_the_matrix_and_what_compilers_expect(
    what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(produced_ops, "cast_planes", cast)
    inputs = inputs_of(what)
    *results, matrix = produced_planes(what, inputs, 1e-5, ROW, COLUMN, True)
    value = expected(what, inputs)  # type: ignore[arg-type]
    torch.testing.assert_close(matrix, value.reshape(-1, value.shape[-1]))
    promised = empty_produced(what, inputs, 1e-5, ROW, COLUMN)
    assert [(x.shape, x.dtype) for x in results] == [(x.shape, x.dtype) for x in promised]


@pytest.mark.parametrize("what", ["LayerNorm", "RMSNorm"])
def test_statistics_that_are_known_are_no_results(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No result of an op may share memory with its inputs."""
    monkeypatch.setattr(produced_ops, "cast_planes", cast)
    inputs = inputs_of(what)
    first = produced_planes(what, inputs, 1e-5, ROW, COLUMN, True)
    count = len(first) - len(produced_planes(what, [*inputs, *first[:2]], 1e-5, ROW, COLUMN, True))
    assert count == {"LayerNorm": 2, "RMSNorm": 1}[what]
    assert len(empty_produced(what, [*inputs, first[0]], 1e-5, ROW, COLUMN)) == len(first) - 1 - count


@pytest.mark.parametrize("needs", [[True, True, False], [True, False, False], [False, True, False]])
def test_a_tensor_is_added_to_the_gradient_of_the_input_alone(needs: list[bool]) -> None:
    x, gamma, _ = inputs_of("RMSNorm")
    dy, added, rstd = torch.randn(*LEAD, WIDTH), torch.randn(*LEAD, WIDTH), torch.rand(*LEAD, 1)
    call = ("RMSNorm", dy, x, gamma, None, [rstd], needs)
    alone, around = produced_ops.norm_gradients(*call), produced_ops.norm_gradients(*call, added)
    expected = [alone[0] + added, *alone[1:]] if needs[0] else alone
    assert all(torch.equal(a, b) for a, b in zip(around, expected, strict=True))

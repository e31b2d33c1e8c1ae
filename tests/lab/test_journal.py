"""The journal of sampled steps: sums of each step, and counts of magnitudes."""

import math

import numpy as np
import pytest
import torch

from duotone import Quantizer, formats
from duotone.recipes.roles import PLANES_OF_GEMM, QuantizerRole
from duotone_lab.training.journal import HIGHEST, LOWEST, Journal, count_magnitudes


def test_magnitudes_are_counted_as_numpy_does() -> None:
    x = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)) ** 5
    exponents = np.floor(np.log2(np.abs(x.numpy().astype(np.float64)))).clip(LOWEST, HIGHEST).astype(int)
    expected = [int((exponents == n).sum()) for n in range(LOWEST, HIGHEST + 1)]
    assert count_magnitudes(x).tolist() == expected and sum(expected) == x.numel()


def test_zeros_and_values_that_are_not_finite_do_not_count_and_extremes_count_at_the_ends() -> None:
    counts = count_magnitudes(torch.tensor([[0.0, math.inf, -math.inf, math.nan, 1e-30, -1e30, 1.0, -1.5]]))
    assert {LOWEST + place: count for place, count in enumerate(counts.tolist()) if count} == {LOWEST: 1, 0: 2, 24: 1}


def test_each_step_has_the_signal_to_noise_of_all_its_modules_together() -> None:
    fmt = formats.get("mxfp8_e4m3")
    draw, journal, expected = torch.Generator().manual_seed(0), Journal(), {}
    for step in (3, 7):
        journal.step, sums = step, [0.0, 0.0]
        for name in ("a", "b"):
            x = torch.randn(32, 64, generator=draw)
            planes = Quantizer(fmt, fmt).encode(x)
            journal.record(QuantizerRole("linear", "input", name), "rowwise", x, planes.rowwise)
            sums[0] += x.double().square().sum().item()
            sums[1] += (x.double() - planes.rowwise.dequantize(torch.float32).double()).square().sum().item()
        expected[step] = 10 * math.log10(sums[0] / sums[1])
    drift = journal.drift()
    assert [(entry["step"], entry["role"], entry["plane"]) for entry in drift] == [
        (3, "input", "rowwise"),
        (7, "input", "rowwise"),
    ]
    assert [entry["snr_db"] for entry in drift] == pytest.approx(list(expected.values()), abs=1e-6)
    (spread,) = journal.spreads()
    assert sum(spread["counts"]) == 4 * 32 * 64 and spread["lowest"] == LOWEST
    assert [row["samples"] for row in journal.rows()] == [2, 2]  # and the tap goes on as ever


def test_an_exact_plane_has_no_signal_to_noise() -> None:
    identity = formats.get("identity")
    journal, x = Journal(step=1), torch.ones(4, 4)
    planes = Quantizer(identity, identity).encode(x)
    journal.record(QuantizerRole("linear", "input", "a"), "rowwise", x, planes.rowwise)
    assert [entry["snr_db"] for entry in journal.drift()] == [None]


def test_products_have_the_errors_of_float64_and_independent_errors_have_ratio_one() -> None:
    fmt, draw, journal = formats.get("mxfp8_e4m3"), torch.Generator().manual_seed(0), Journal(step=2, last=2)
    x, w, dy = (torch.randn(*shape, generator=draw) for shape in ((64, 128), (96, 128), (64, 96)))
    decoded = {}
    for role, matrix in {"input": x, "weight": w, "grad_output": dy}.items():
        planes = Quantizer(fmt, fmt).encode(matrix)
        for direction, oriented, plane in (
            ("rowwise", matrix, planes.rowwise),
            ("columnwise", matrix.t(), planes.columnwise),
        ):
            journal.record(QuantizerRole("linear", role, "a"), direction, oriented, plane)
            decoded[role, direction] = plane.dequantize(torch.float32).double()
    exact = {"fprop": x.double() @ w.double().T, "dgrad": dy.double() @ w.double(), "wgrad": dy.double().T @ x.double()}
    entries = journal.products()
    assert [entry["gemm"] for entry in entries] == list(exact)
    for entry in entries:
        a, b = (decoded[side] for side in PLANES_OF_GEMM[entry["gemm"]])
        error = (a @ b.T - exact[entry["gemm"]]).norm() / exact[entry["gemm"]].norm()
        assert entry["error"] == pytest.approx(error.item(), rel=1e-4)
        assert 0.9 < entry["error"] / entry["expected"] < 1.1


def test_products_of_modules_that_encode_an_operand_twice_or_not_at_all_are_left_out() -> None:
    fmt, journal = formats.get("mxfp8_e4m3"), Journal(step=2, last=2)
    planes = Quantizer(fmt, fmt).encode(torch.ones(32, 32))
    for name, roles in {"twice": ("input", "input", "weight"), "half": ("input",)}.items():
        for role in roles:
            journal.record(QuantizerRole("linear", role, name), "rowwise", torch.ones(32, 32), planes.rowwise)
    assert journal.products() == []

"""The 16-point rotation: its matrix, its one rounding, its inverse, and products that do not change."""

from fractions import Fraction

import numpy as np
import pytest
import reference
import torch
from comparison import assert_same, tensor_of
from families import FAMILIES, make

from duotone.formats import get, hadamard

SIGN = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def exact_rotation(row: reference.Array) -> list[Fraction]:
    """One group of 16 in exact arithmetic."""
    u = [Fraction(float(value)) for value in row]
    return [sum(u[i] * SIGN[i] * (-1) ** (i & j).bit_count() / 4 for i in range(16)) for j in range(16)]


def test_matrix_is_signs_times_sylvester_over_four() -> None:
    assert np.array_equal(hadamard.rotation().numpy(), reference.rotation())
    assert hadamard.rotation()[:, 0].tolist() == [sign / 4 for sign in SIGN]
    assert hadamard.rotation()[15].tolist() == [-((-1) ** j.bit_count()) / 4 for j in range(16)]
    assert [i for i in range(16) if SIGN[i] < 0] == [i for i in range(16) if 0xD7E8 >> i & 1]
    assert hadamard.SIGN_MASK == 0xD7E8 and hadamard.SIZE == 16


def test_matrix_is_orthogonal() -> None:
    r = hadamard.rotation()
    assert torch.equal(r @ r.t(), torch.eye(16)) and torch.equal(r.t() @ r, torch.eye(16))


def test_rotation_is_the_exact_sum_rounded_once_where_fp32_holds_the_sum() -> None:
    """bf16 integers times powers of two within 8 bits: every partial sum fits 24 bits."""
    rng = np.random.default_rng(3)
    x = (rng.integers(-255, 256, (64, 16)) * np.exp2(rng.integers(-4, 4, (64, 1)))).astype(np.float32)
    exact = np.array([[float(v) for v in exact_rotation(row)] for row in x])  # 13 bits: float64 holds them
    want = reference.as_dtype(exact.astype(np.float32), "bfloat16")
    assert (want.astype(np.float64) != exact).mean() > 0.1, "nothing was rounded: the case shows nothing"
    assert_same(hadamard.rotate(torch.from_numpy(x).bfloat16()), want)


def test_rotation_of_normal_data_is_within_one_fp32_sum_of_the_exact_one() -> None:
    """15 additions each lose at most 2^-24 of the sum of magnitudes, and the rounding to bf16 half an ulp."""
    x = make("normal", (16, 64), "bfloat16")
    result = hadamard.rotate(tensor_of(x, "bfloat16")).double().numpy().reshape(-1, 16)
    for row, values in zip(x.reshape(-1, 16), result, strict=True):
        slack = 15 * 2.0**-24 * np.abs(row).sum() / 4
        for value, exact in zip(values, exact_rotation(row), strict=True):
            assert abs(value - float(exact)) <= slack + 2.0**-8 * (abs(float(exact)) + slack)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float16"])
def test_rotation_equals_the_reference_with_sums_in_order(family: str, dtype: str) -> None:
    for shape in ((5, 48), (3, 37), (1, 1)):
        x = make(family, shape, dtype)
        result = hadamard.rotate(tensor_of(x, dtype))
        assert result.dtype == torch.bfloat16
        assert_same(result, reference.rotate(x))


def test_fp32_input_is_rounded_to_bf16_before_it_is_rotated() -> None:
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 1 + 2.0**-9, -1.0
    assert float(hadamard.rotate(x)[0, 0]) == 0.0
    assert torch.equal(hadamard.rotate(x), hadamard.rotate(x.bfloat16()))


def test_a_ragged_group_is_filled_with_zeros_and_kept() -> None:
    x = make("normal", (4, 21), "bfloat16")
    padded = np.pad(x, ((0, 0), (0, 11)))
    result = hadamard.rotate(tensor_of(x, "bfloat16"))
    assert result.shape == (4, 32)
    assert torch.equal(result, hadamard.rotate(tensor_of(padded, "bfloat16")))


def test_unrotation_inverts_the_rotation_up_to_its_rounding() -> None:
    x = torch.from_numpy(make("normal", (8, 64), "bfloat16"))
    back = hadamard.unrotate(hadamard.rotate(x).float())
    assert (back - x).abs().max() <= 2.0**-8 * x.abs().amax() * 4
    whole = torch.from_numpy(make("grid", (8, 64)))  # half integers of three bits: nothing is rounded
    assert torch.equal(hadamard.unrotate(hadamard.rotate(whole).float()), whole)


def test_product_of_two_rotated_operands_is_the_product_of_the_plain_ones() -> None:
    a, b = (torch.from_numpy(make("grid", shape)) for shape in ((6, 48), (9, 48)))
    rotated = hadamard.rotate(a).double() @ hadamard.rotate(b).double().t()
    assert torch.equal(rotated, a.double() @ b.double().t())


@pytest.mark.parametrize("name", ["nvfp4_rht", "nvfp4_16x16_rht"])
def test_format_decodes_rotated_values_and_unrotates_to_the_original_columns(name: str) -> None:
    fmt, x = get(name), torch.from_numpy(make("normal", (32, 37), "bfloat16"))
    decoded = fmt.decode(fmt.encode(x), torch.float32)
    assert decoded.shape == (32, 48)
    assert (decoded - hadamard.rotate(x).float()).norm() < 0.15 * x.norm()
    plain = fmt.unrotate(decoded, 37)
    assert plain.shape == (32, 37) and plain.dtype == torch.float32
    assert (plain - x).norm() < 0.15 * x.norm()
    assert torch.equal(plain, hadamard.unrotate(decoded)[:, :37])

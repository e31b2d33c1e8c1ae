"""The steps that touch every element, one by one, as backends have to repeat them."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_same, tensor_of
from families import FAMILIES, make
from selection import DTYPES

from duotone.formats import elements

NAMES = ("e4m3", "e5m2", "e2m1", "e2m3", "e3m2")


@pytest.mark.parametrize("family", FAMILIES)
def test_block_amax_ignores_nan_and_keeps_infinity(family: str) -> None:
    for dtype in (*DTYPES, "float16"):
        x = make(family, (32, 48), dtype)
        blocks = reference.tiles(x, 16, 16)
        result = elements.block_amax(tensor_of(blocks.transpose(0, 2, 1, 3), dtype))
        assert_same(result, reference.amax_of(blocks, (2, 3)), dtype)


@pytest.mark.parametrize("shape", [(2, 0, 3, 16), (2, 16, 3, 0), (0, 16, 3, 16), (1, 0, 1, 0)])
def test_block_amax_of_empty_blocks_is_zero(shape: tuple[int, int, int, int]) -> None:
    result = elements.block_amax(torch.zeros(shape, dtype=torch.bfloat16))
    assert result.dtype == torch.float32 and result.shape == (shape[0], shape[2]) and not result.any()


@pytest.mark.parametrize("name", NAMES)
def test_cast_rounds_the_fp32_product_and_values_undo_it(name: str) -> None:
    element = elements.ELEMENTS[name]
    x = make("spread", (16, 32), "bfloat16").reshape(2, 8, 2, 16)
    multiplier = np.array([[3.7e3, 1e-7], [0.1, 1.0]], np.float32)[:, None, :, None]
    codes = elements.cast(tensor_of(x, "bfloat16"), torch.from_numpy(multiplier), element)
    with np.errstate(over="ignore"):
        want = reference.cast(x * multiplier, name)
    assert codes.dtype == element.stored_dtype
    assert_same(codes.view(torch.uint8), want)
    for dtype in ("float32", "bfloat16", "float16"):
        result = elements.values(codes, torch.from_numpy(multiplier), element, getattr(torch, dtype))
        assert_same(result, reference.as_dtype(reference.values_of(name)[want] * multiplier, dtype))


def test_stochastic_cast_takes_the_bits_in_place() -> None:
    x = make("normal", (16, 32), "bfloat16").reshape(1, 16, 2, 16)
    bits = np.random.default_rng(0).integers(0, 256, x.shape).astype(np.uint8)
    multiplier = torch.full((1, 1, 2, 1), 1.7)
    result = elements.cast_stochastic(tensor_of(x, "bfloat16"), multiplier, torch.from_numpy(bits), elements.E2M1)
    assert_same(result, reference.cast(reference.cast_stochastic(x * np.float32(1.7), bits), "e2m1"))


@pytest.mark.parametrize("name", NAMES)
def test_exponent_scale_covers_every_exponent_infinity_and_nan(name: str) -> None:
    bits = np.arange(0, 2**31, 2**31 // 65536, dtype=np.int64).astype(np.uint32)
    amax = np.concatenate([bits.view(np.float32), np.array([np.inf, np.nan], np.float32)])
    element = elements.ELEMENTS[name]
    code, multiplier = elements.exponent_scale(torch.from_numpy(amax), element.reciprocal.real)
    want = reference.e8m0(amax, reference.LARGEST[name])
    assert code[-2:].tolist() == [254, 255] and torch.isnan(multiplier[-1])
    assert_same(code, want)
    with np.errstate(invalid="ignore"):
        exact = np.where(want == 255, np.nan, np.exp2(127.0 - want.astype(np.float64)))
    assert_same(multiplier, exact.astype(np.float32))


def test_biased_exponents_make_powers_of_two() -> None:
    result = elements.power_of_two(torch.arange(-1, 256, dtype=torch.int32)).numpy()
    assert np.isnan(result[0]) and np.isnan(result[256])
    assert np.array_equal(result[1:256].astype(np.float64), np.exp2(np.arange(255) - 127.0))

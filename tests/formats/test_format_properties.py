"""Every registered format under inputs that hypothesis makes up."""

from typing import Any

import numpy as np
import reference
import torch
from comparison import assert_parts, assert_same, tensor_of
from families import FAMILIES, make
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from selection import DTYPES, NAMES, SEED, element_of, seed_of

from duotone.formats import get

PROPERTY = settings(derandomize=True, deadline=None, max_examples=150)
ANY_FLOAT = st.floats(width=32, allow_nan=False)


@PROPERTY
@given(st.sampled_from(NAMES), st.integers(1, 5), st.integers(1, 40), st.sampled_from(DTYPES), st.data())
def test_any_bit_patterns_equal_the_reference(name: str, rows: int, cols: int, dtype: str, data: Any) -> None:
    bits = data.draw(arrays.arrays(np.uint32, (rows, cols), elements=st.integers(0, 2**32 - 1)))
    x = reference.as_dtype(bits.view(np.float32), dtype)
    result = get(name).encode(tensor_of(x, dtype), seed=seed_of(name))
    want = reference.encode(name, x, dtype, seed=SEED)
    assert_parts(result, want)
    assert_same(get(name).decode(result, torch.float32), reference.decode_fp32(name, want))


@PROPERTY
@given(
    st.sampled_from(NAMES),
    st.sampled_from(sorted(FAMILIES)),
    st.tuples(st.integers(1, 40), st.integers(1, 140)),
    st.sampled_from(DTYPES),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from(["row", "col"]),
    st.booleans(),
)
def test_any_shape_seed_plane_and_layout_equal_the_reference(
    name: str, family: str, shape: tuple[int, int], dtype: str, seed: int, plane: str, transposed: bool
) -> None:
    x = make(family, shape, dtype, element_of(name))
    given_x = tensor_of(x, dtype)
    given_x = given_x.t().contiguous().t() if transposed else given_x
    result = get(name).encode(given_x, seed=seed, plane=plane)
    assert_parts(result, reference.encode(name, x, dtype, seed=seed, plane=plane))


@PROPERTY
@given(
    st.sampled_from(NAMES),
    arrays.arrays(np.float32, (3, 32), elements=st.floats(-1e4, 1e4, width=32)),
    st.integers(-10, 10),
)
def test_a_power_of_two_times_the_input_scales_the_values(name: str, x: np.ndarray, power: int) -> None:
    """Codes stay, decoded values move by the power, where nothing under- or overflows."""
    x = np.where(np.abs(x) < 1e-3, 0, x).astype(np.float32)
    fmt, factor = get(name), np.float32(2.0**power)
    one, two = (fmt.encode(torch.from_numpy(each), seed=seed_of(name)) for each in (x, x * factor))
    assert torch.equal(one["codes"], two["codes"])
    values, scaled = (fmt.decode(each, torch.float32) for each in (one, two))
    assert torch.equal(values * float(factor), scaled)


@PROPERTY
@given(st.sampled_from(NAMES), arrays.arrays(np.float32, (2, 48), elements=ANY_FLOAT))
def test_negation_flips_the_sign_of_every_code_and_nothing_else(name: str, x: np.ndarray) -> None:
    of, fmt = reference.meaning(name), get(name)
    one, two = (fmt.encode(torch.from_numpy(each), seed=seed_of(name)) for each in (x, -x))
    assert all(torch.equal(one[key], two[key]) for key in one if key != "codes")
    if of.hadamard:
        return  # infinities meet to NaN, and a sum of zero has one sign
    sign = 0x88 if of.element == "e2m1" else 1 << (reference.BITS[of.element] - 1)
    assert torch.equal(one["codes"] ^ sign, two["codes"])

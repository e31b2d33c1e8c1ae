"""A scale or an amax that the caller decides: delayed scaling, and amaxes that shards agreed on."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_equal_parts, assert_parts, assert_same, tensor_of
from families import make
from selection import PER_TENSOR_OR_ROW, SEED, TWO_LEVEL, seed_of

from duotone.formats import get


@pytest.mark.parametrize("family", ["normal", "nans", "infinities", "spread", "zeros"])
@pytest.mark.parametrize("name", PER_TENSOR_OR_ROW)
def test_a_given_scale_multiplies_and_its_inverse_is_stored(name: str, family: str) -> None:
    """Stale scales of delayed scaling: the input saturates where they are too large."""
    per_row = "row" in name
    for power in (-3.0, 0.0, 4.0, 9.5):
        x = make(family, (6, 40), "bfloat16")
        scale = np.exp2(power + np.arange(6 if per_row else 1)).astype(np.float32)
        if "pow2" in name:
            scale = np.exp2(np.floor(np.log2(scale))).astype(np.float32)
        given_scale = torch.from_numpy(scale).view(-1, 1) if per_row else torch.from_numpy(scale)
        result = get(name).encode(tensor_of(x, "bfloat16"), scale=given_scale)
        want = reference.encode(name, x, "bfloat16", scale=scale)
        assert_parts(result, want)
        assert_same(get(name).decode(result, torch.float32), reference.decode_fp32(name, want))


def test_a_given_scale_saturates_what_is_too_large() -> None:
    x = torch.tensor([[1000.0, -1e6, 1.0, torch.inf, torch.nan]])
    parts = get("fp8_e4m3_tensor").encode(x, scale=torch.tensor([1.0]))
    assert parts["codes"].tolist() == [[0x7E, 0xFE, 0x38, 0x7E, 0x7F]] and parts["scale"].tolist() == [1.0]


@pytest.mark.parametrize("name", PER_TENSOR_OR_ROW)
def test_a_given_amax_replaces_the_own(name: str) -> None:
    x = make("normal", (6, 40), "bfloat16")
    for value in (0.0, 1e-38, 0.3, 7.0, 3.4e38, np.inf):
        amax = (np.full(6, value) * np.exp2(-np.arange(6)) if "row" in name else np.array([value])).astype(np.float32)
        result = get(name).encode(tensor_of(x, "bfloat16"), amax=torch.from_numpy(amax))
        assert_parts(result, reference.encode(name, x, "bfloat16", amax=amax), str(value))


@pytest.mark.parametrize("name", TWO_LEVEL)
def test_a_given_global_amax_leaves_block_amaxes_alone(name: str) -> None:
    of = reference.meaning(name)
    x = make("normal", (17, 48), "bfloat16")
    for value in (0.0, 1e-38, 0.3, 5.0, 3.4e38, np.inf):
        amax = np.full(17 if of.per_row else 1, value, np.float32)
        result = get(name).encode(tensor_of(x, "bfloat16"), amax=torch.from_numpy(amax), seed=seed_of(name))
        want = reference.encode(name, x, "bfloat16", amax=amax, seed=SEED)
        assert_parts(result, want, str(value))
        assert_same(get(name).decode(result, torch.float32), reference.decode_fp32(name, want), str(value))


@pytest.mark.parametrize("name", [*PER_TENSOR_OR_ROW, *TWO_LEVEL])
def test_giving_the_own_amax_changes_nothing(name: str) -> None:
    of = reference.meaning(name)
    x = make("normal", (17, 48), "bfloat16")
    seen = reference.rotate(x) if of.hadamard else x
    amax = reference.amax_of(seen, (1,) if of.per_row or (of.rows == 1 and of.cols == 0) else (0, 1)).reshape(-1)
    fmt, given_x = get(name), tensor_of(x, "bfloat16")
    want = fmt.encode(given_x, seed=seed_of(name))
    assert_equal_parts(fmt.encode(given_x, amax=torch.from_numpy(amax), seed=seed_of(name)), want)

"""4-over-6: which candidate is taken, on ties, near ties and where the order of a sum decides."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_parts, tensor_of
from families import FAMILIES, make

from duotone.formats import get

NAMES = [name for name in reference.names() if "4over6" in name]


def blocks_at_a_tie(rows: int, cols: int, block_max: float) -> reference.Array:
    """Both candidates of a block make the same errors on other elements: rounding in the sum decides.

    The first block of a row makes S 1. The others have amax 12: steps of 1 under 6 and of 1.5 under 4. One
    row in eight holds pairs 1 + d and 1.5 + d, whose errors are (d, 0.5 - d) and (0.5 - d, d); others hold 3
    and a few 3 + d, which both candidates miss by d: a sum over 16 rows stays small and keeps its last bits.
    """
    rng = np.random.default_rng(1)
    shape = (rows, cols // 16)
    pairs = np.zeros((*shape, 16))
    offset = rng.integers(1, 2**20, (*shape, 7)) / 2.0**23
    pairs[..., 0:7], pairs[..., 7:14], pairs[..., 14] = 1 + offset, 1.5 + offset, 12
    common = 3 + rng.integers(0, 2**16, (*shape, 16)) / 2.0**22 * (rng.random((*shape, 16)) < 0.2)
    x = np.where(rng.random((*shape, 1)) < 0.125, pairs, common)
    x = rng.permuted(x, axis=-1) * rng.choice([-1.0, 1.0], x.shape)
    x[..., 0] = np.where(np.abs(x).max(axis=-1) < 12, 12, x[..., 0])
    x[:, 0] = 6 * block_max
    return x.reshape(rows, cols).astype(np.float32)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", ["grid", "few_values", "constant", "normal"])
def test_choices_on_many_blocks_equal_the_reference(name: str, family: str) -> None:
    for dtype in ("bfloat16", "float32"):
        x = make(family, (64, 256), dtype)
        assert_parts(get(name).encode(tensor_of(x, dtype)), reference.encode(name, x, dtype), dtype)


@pytest.mark.parametrize("name", NAMES)
def test_choices_left_to_rounding_equal_the_reference(name: str) -> None:
    x = blocks_at_a_tie(256, 128, reference.meaning(name).block_max)
    assert_parts(get(name).encode(torch.from_numpy(x)), reference.encode(name, x))


@pytest.mark.parametrize("name", NAMES)
def test_a_tie_stays_with_six(name: str) -> None:
    """Zeros and one magnitude, powers of two below 448: both candidates are exact, or err by the same."""
    x = torch.zeros(16, 32)
    x[:, ::3] = 2.0
    x[:, 16::3] = -2.0
    fmt = get(name)
    parts = fmt.encode(x)
    codes = torch.stack((parts["codes"] & 7, parts["codes"] >> 4 & 7), -1).flatten(1)
    assert set(codes.flatten().tolist()) == {0, 7}
    top = reference.cast(np.array([reference.meaning(name).block_max], np.float32), "e4m3")[0]
    assert (parts["scale"] == int(top)).all()


@pytest.mark.parametrize("name", ["nvfp4_4over6", "nvfp4_4over6_mse", "nvfp4_row_4over6", "nvfp4_16x16_4over6"])
def test_the_candidate_that_loses_less_is_taken(name: str) -> None:
    """6 among 4.5 is 4 among 3 under another scale; 6 among values of E2M1 stays 6."""
    x = torch.full((16, 32), 4.5)
    x[:, 0] = 6.0
    x[:, 16:] = torch.tensor([6.0, 3.0, 1.5, 0.5] * 4)
    parts = get(name).encode(x)
    codes = torch.stack((parts["codes"] & 7, parts["codes"] >> 4 & 7), -1).flatten(1)
    assert set(codes[:, :16].flatten().tolist()) == {6, 5} and codes[0, 0] == 6
    assert int(codes[:, 16:].max()) == 7
    decoded = get(name).decode(parts, torch.float32)
    assert (decoded - x).abs().max() < 0.01


@pytest.mark.parametrize("name", NAMES)
def test_error_is_no_more_than_that_of_either_candidate_alone(name: str) -> None:
    """In float64, up to the fp32 rounding of the errors that are compared."""
    of = reference.meaning(name)
    x = make("normal", (32, 64), "bfloat16")
    decoded = get(name).decode(get(name).encode(tensor_of(x, "bfloat16")), torch.float32).numpy()
    chosen = block_errors(decoded, x, of)
    base = reference.global_scale(reference.amax_of(x, (1,) if of.per_row else (0, 1)).reshape(-1, 1), of.block_max)
    amax = reference.amax_of(reference.tiles(x, of.rows, 16), (2, 3))
    rows = base if of.per_row else np.broadcast_to(base, (amax.shape[0], 1))
    for factor in (1.0, 1.5):
        code = reference.cast(np.minimum(amax / np.float32(6) * rows * np.float32(factor), np.float32(448)), "e4m3")
        q = reference.fp4_multiplier(code, np.broadcast_to(rows, code.shape))
        blocks = reference.tiles(x, of.rows, 16)
        value = reference.values_of("e2m1")[reference.cast(blocks * q[..., None, None], "e2m1")]
        alone = value.astype(np.float64) * (reference.e4m3_value(code) / rows.astype(np.float64))[..., None, None]
        alone = reference.untile(alone, *x.shape)
        assert (chosen <= block_errors(alone, x, of) * (1 + 1e-5) + 1e-9).all()


def block_errors(values: reference.Array, x: reference.Array, of: reference.Meaning) -> reference.Array:
    d = np.abs(values.astype(np.float64) - x)
    return reference.tiles(d**2 if of.squared else d, of.rows, 16).sum((2, 3))


def test_both_candidates_are_taken_and_errors_differ_in_their_choices() -> None:
    """The data above tells candidates, error measures, block maxima and geometries apart."""
    x = make("normal", (64, 256), "bfloat16")
    chosen = {}
    for name in NAMES:
        parts = get(name).encode(tensor_of(x, "bfloat16"))
        codes = torch.stack((parts["codes"] & 7, parts["codes"] >> 4 & 7), -1).view(64, 16, 16)
        largest = codes.amax(-1)
        assert 0.1 < (largest == 7).float().mean() < 0.95, name
        chosen[name] = tuple(parts["codes"].flatten().tolist())
    assert len(set(chosen.values())) == len(NAMES)


def choices(of: reference.Meaning, x: reference.Array, order: reference.Array) -> reference.Array:
    """Whether 4 is taken (grid) when the elements of a row are summed in another order."""
    blocks = reference.tiles(x, of.rows, 16)
    amax = reference.amax_of(blocks, (2, 3))
    g = np.broadcast_to(np.float32(6 * of.block_max), amax.shape)
    s = reference.global_scale(g, of.block_max)
    codes = (reference.cast(amax / np.float32(6) * np.float32(factor), "e4m3") for factor in (1.5, 1.0))
    four, six = (reference.candidate_error(blocks[..., order], code, g, s, of) for code in codes)
    return four < six


@pytest.mark.parametrize("name", [name for name in NAMES if "row" not in name])
def test_the_order_of_the_sum_decides_there(name: str) -> None:
    """So that equality with the reference above shows the order, too."""
    of = reference.meaning(name)
    x = blocks_at_a_tie(256, 128, of.block_max)
    forward, backward = (choices(of, x, order) for order in (np.arange(16), np.arange(15, -1, -1)))
    assert 0.01 < forward[:, 1:].mean() < 0.99
    assert (forward != backward).any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("family", [name for name in FAMILIES if "nan" in name or "infinit" in name])
def test_an_error_that_is_no_number_leaves_six(name: str, family: str) -> None:
    x = make(family, (32, 48))
    parts = get(name).encode(torch.from_numpy(x))
    assert_parts(parts, reference.encode(name, x))
    of = reference.meaning(name)
    bad = np.isnan(reference.tiles(x, of.rows, 16)).any((2, 3))
    amax = reference.amax_of(reference.tiles(x, of.rows, 16), (2, 3))
    g = reference.amax_of(x, (1,) if of.per_row else (0, 1)).reshape(-1, 1)
    s = reference.global_scale(g, of.block_max)
    with np.errstate(all="ignore"):
        six = reference.cast(np.fmin(amax / np.float32(6) * s, np.float32(448)), "e4m3")
    result = parts["scale"].numpy()[:: of.rows]
    assert bad.any() or family in ("one_infinity", "infinities")
    assert np.array_equal(result[bad], six[bad])


def test_amax_from_outside_moves_the_global_scale_only() -> None:
    x = make("normal", (32, 64), "bfloat16")
    for name in NAMES:
        of = reference.meaning(name)
        amax = reference.amax_of(x, (1,)) * 3 if of.per_row else np.array([9.5], np.float32)
        result = get(name).encode(tensor_of(x, "bfloat16"), amax=torch.from_numpy(amax))
        assert_parts(result, reference.encode(name, x, "bfloat16", amax=amax), name)

"""Stochastic rounding of whole formats: what a seed and a plane decide, and that the mean is right."""

import pytest
import reference
import torch
from comparison import assert_equal_parts, assert_parts, tensor_of
from families import make
from selection import NEAREST, STOCHASTIC

from duotone.formats import get


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_seed_repeats_bit_for_bit_and_seeds_and_planes_differ(name: str) -> None:
    fmt, x = get(name), torch.from_numpy(make("normal", (32, 64)))
    one = fmt.encode(x, seed=5, plane="row")
    assert_equal_parts(fmt.encode(x, seed=5), one)
    assert_equal_parts(fmt.encode(x, seed=torch.tensor([5])), one)
    assert_equal_parts(fmt.encode(x, seed=torch.tensor(5)), one)
    assert_equal_parts(fmt.encode(x, seed=5 - 2**64), one)
    for other in (fmt.encode(x, seed=6), fmt.encode(x, seed=5 + 2**32), fmt.encode(x, seed=5, plane="col")):
        assert 0.05 < (other["codes"] != one["codes"]).float().mean() < 0.95
        assert torch.equal(other["scale"], one["scale"]) and torch.equal(other["amax"], one["amax"])


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("plane", ["row", "col"])
def test_streams_of_both_planes_equal_the_reference(name: str, plane: str) -> None:
    for shape in ((32, 64), (7, 19), (33, 48)):
        x = make("normal", shape, "bfloat16")
        for seed in (0, 1, 2**63, 2**64 - 1, -(2**63)):
            result = get(name).encode(tensor_of(x, "bfloat16"), seed=seed, plane=plane)
            assert_parts(result, reference.encode(name, x, "bfloat16", seed=seed, plane=plane), f"{shape} {seed}")


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_seed_tensor_is_read_not_changed(name: str) -> None:
    seed = torch.tensor([41])
    get(name).encode(torch.ones(16, 16), seed=seed)
    assert seed.tolist() == [41]


@pytest.mark.parametrize("name", NEAREST)
def test_a_seed_means_nothing_to_a_format_that_rounds_to_nearest(name: str) -> None:
    x = torch.from_numpy(make("normal", (16, 48)))
    assert_equal_parts(get(name).encode(x, seed=9, plane="col"), get(name).encode(x))


def test_rounding_is_unbiased_up_to_the_256th_that_the_bits_leave() -> None:
    """v = 2.3 between 2 and 3: the mean is 2 + floor(256 * 0.3)/256 up to five deviations of 2^16 draws.

    One draw deviates by half a step at most, the mean of 240^2 of them by 1/480; the fraction rounded down to
    a 256th is a bias of -2^-9 on average and never beyond -2^-8.
    """
    x = torch.full((256, 256), 2.3)
    x[:, ::16] = 6.0
    total = 0.0
    for seed in (1, 2):
        parts = get("nvfp4_sr").encode(x, seed=seed, amax=torch.tensor([2688.0]))
        values = get("nvfp4_sr").decode(parts, torch.float32)[x != 6]
        assert sorted(set(values.tolist())) == [2.0, 3.0]
        mean = values.double().mean().item()
        assert abs(mean - (2 + int(256 * 0.3) / 256)) < 5 * 0.5 / 240
        total += mean
    assert 2.3 - 2**-8 - 0.01 < total / 2 < 2.3 + 0.01

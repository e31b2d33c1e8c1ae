"""Arguments of encode and derive that are refused, copied or rounded, never misread."""

import pytest
import torch

from duotone.errors import UserError
from duotone.formats import get

X = torch.randn(32, 32)


def refused(call) -> None:
    with pytest.raises(UserError) as error:
        call()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "name,size",
    [
        ("nvfp4", 32),
        ("nvfp4", 2),
        ("nvfp4_row", 1),
        ("nvfp4_row", 31),
        ("fp8_e4m3_tensor", 2),
        ("fp8_e4m3_row", 1),
    ],
)
def test_an_amax_of_the_wrong_size_is_refused(name, size):
    refused(lambda: get(name).encode(X, amax=torch.ones(size)))


@pytest.mark.parametrize("name,size", [("fp8_e4m3_tensor", 2), ("fp8_e4m3_row", 1), ("fp8_e4m3_1x128_fp32", 1)])
def test_a_scale_of_the_wrong_size_is_refused(name, size):
    refused(lambda: get(name).encode(X, scale=torch.ones(size)))


@pytest.mark.parametrize("seed", [1.5, torch.tensor([1.5]), torch.tensor([1, 2])])
def test_a_seed_that_is_no_integer_is_refused(seed):
    refused(lambda: get("nvfp4_sr").encode(X, seed=seed))


def test_a_given_amax_is_copied():
    amax = torch.tensor([4.0])
    parts = get("nvfp4").encode(X, amax=amax)
    amax.mul_(2)
    assert parts["amax"].item() == 4.0


def test_per_row_amaxes_span_no_rows():
    assert not get("nvfp4_row").spans_rows and not get("nvfp4_row_4over6").spans_rows


@pytest.mark.parametrize("cols", [17, 33, 1])
def test_derive_of_an_odd_width_is_the_transpose(cols):
    x = torch.randn(32, cols)
    want = get("nvfp4_16x16").encode(x.t())
    got = get("nvfp4_16x16").derive(get("nvfp4_16x16").encode(x), cols)
    assert all(torch.equal(got[k], want[k]) for k in want)


def test_a_given_scale_that_is_no_power_of_two_keeps_factors_equal_to_decode():
    fmt = get("fp8_e4m3_tensor_pow2")
    parts = fmt.encode(X, scale=torch.tensor([3.0]))
    assert torch.equal(fmt.factors(parts).inner.float(), fmt.decode(parts, torch.float32))


def test_identity_refuses_what_others_refuse():
    refused(lambda: get("identity").encode(torch.zeros(2, 2, 2)))
    refused(lambda: get("identity").encode(X, plane="zz"))


def test_a_name_that_is_no_string_is_refused():
    refused(lambda: get(None))

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
    assert not get("nvfp4_row").spans(0) and not get("nvfp4_row_4over6").spans(0)


@pytest.mark.parametrize("cols", [17, 33, 1])
def test_derive_of_an_odd_width_is_the_transpose(cols):
    x = torch.randn(32, cols)
    want = get("nvfp4_16x16").encode(x.t())
    result = get("nvfp4_16x16").derive(get("nvfp4_16x16").encode(x), cols)
    assert all(torch.equal(result[k], want[k]) for k in want)


def test_a_given_scale_that_is_no_power_of_two_keeps_factors_equal_to_decode():
    fmt = get("fp8_e4m3_tensor_pow2")
    parts = fmt.encode(X, scale=torch.tensor([3.0]))
    assert torch.equal(fmt.factors(parts).values.float(), fmt.decode(parts, torch.float32))


def test_identity_refuses_what_others_refuse():
    refused(lambda: get("identity").encode(torch.zeros(2, 2, 2)))
    refused(lambda: get("identity").encode(X, plane="zz"))


def test_a_name_that_is_no_string_is_refused():
    refused(lambda: get(None))


@pytest.mark.parametrize("bad", [float("nan"), -1.0, 0.0, float("inf")])
@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_delayed", "fp8_e4m3_row", "fp8_e4m3_1x128_fp32"])
def test_a_scale_that_is_none_is_refused(name, bad):
    scale = torch.ones(get(name).parts(*X.shape)["scale"].shape)
    scale.view(-1)[-1] = bad
    refused(lambda: get(name).encode(X, scale=scale))


@pytest.mark.parametrize("bad", [float("nan"), -1.0, float("-inf")])
@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_row", "nvfp4", "nvfp4_row"])
def test_an_amax_that_is_none_is_refused(name, bad):
    specs = get(name).parts(*X.shape)
    amax = torch.ones(specs.get("amax", specs["scale"]).shape)
    amax.view(-1)[-1] = bad
    refused(lambda: get(name).encode(X, amax=amax))
    assert get(name).encode(torch.zeros(32, 32), amax=torch.zeros_like(amax))["codes"].sum() == 0  # of zeros it is 0


@pytest.mark.parametrize("name", ["identity", "fp8_e4m3_tensor", "mxfp8_e4m3_32x32", "nvfp4_16x16", "nvfp4_rht"])
def test_parts_that_lack_one_are_refused(name):
    parts = get(name).encode(X)
    for lacking in parts:
        rest = {part: value for part, value in parts.items() if part != lacking}
        refused(lambda rest=rest: get(name).decode(rest, torch.float32))
        if get(name).is_derivable:
            refused(lambda rest=rest: get(name).derive(rest))


NO_MATRICES = {
    "list": lambda: [1.0],
    "none": lambda: None,
    "nested": lambda: torch.nested.nested_tensor([torch.ones(3, 32)]),
    "jagged": lambda: torch.nested.nested_tensor([torch.ones(3, 32)], layout=torch.jagged),
    "coo": lambda: torch.eye(32).to_sparse(),
    "csr": lambda: torch.eye(32).to_sparse_csr(),
    "0-d": lambda: torch.tensor(1.0),
}


@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of layouts in prototype
@pytest.mark.parametrize("make", NO_MATRICES.values(), ids=NO_MATRICES.keys())
@pytest.mark.parametrize("name", ["identity", "mxfp8_e4m3"])
def test_what_is_no_dense_matrix_is_refused(name, make):
    x = make()
    refused(lambda: get(name).encode(x))


@pytest.mark.parametrize(
    "name", ["fp8_e4m3_tensor", "fp8_e4m3_row", "fp8_e4m3_1x128", "mxfp8_e4m3", "mxfp4", "nvfp4", "nvfp4_row"]
)
def test_parts_of_the_wrong_size_are_refused(name):
    fmt = get(name)
    parts = fmt.encode(X)
    fmt.decode(parts, torch.float32)
    wrong = [{**parts, part: values.new_empty(0)} for part, values in parts.items()]
    wrong += [{**parts, part: values[..., None]} for part, values in parts.items()]
    wrong += [{**parts, part: torch.cat([values, values])} for part, values in parts.items() if part != "codes"]
    for one in wrong:
        refused(lambda one=one: fmt.decode(one, torch.float32))

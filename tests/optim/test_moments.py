"""How AdamW stores moments: for which parameters, what FP8 rounds, and steps whose numbers the device computes."""

import copy
import weakref
from unittest import mock

import pytest
import torch
from optim_cases import QUANTIZERS, RATES, all_same, everything, random_parameter
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.optim import AdamW
from duotone.optim.master import initial_master
from duotone.optim.moments import encoded, first_moment

FP8 = torch.float8_e4m3fn
DTYPES = [None, torch.float32, torch.bfloat16, FP8]


def parameters() -> list[nn.Parameter]:
    """Quantized, and plain of each dtype, of 1 to 3 dimensions, with rows that are no multiple of a block."""
    torch.manual_seed(0)
    plain = [torch.randn(9, 300), torch.randn(40, 130).bfloat16(), torch.randn(7).bfloat16(), torch.randn(3, 5, 129)]
    return [
        random_parameter(QUANTIZERS["mxfp8"]),
        *map(nn.Parameter, plain),
        nn.Parameter(torch.randn(4, 128).half()),
    ]


def run(optimizer: AdamW, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("moments", DTYPES[1:], ids=str)
def test_plain_parameters_follow_the_dtype_of_moments(dtype, moments) -> None:
    """The oracle is torch's AdamW in fp32, started anew from what is stored."""
    p, reference = nn.Parameter(torch.randn(40, 200).to(dtype)), nn.Parameter(torch.zeros(40, 200))
    optimizer, oracle = AdamW([p], **RATES, moment_dtype=moments), torch.optim.AdamW([reference], **RATES)
    for step in range(3):
        state = optimizer.state[p]
        with torch.no_grad():
            reference.copy_(p)
            for name in ("exp_avg", "exp_avg_sq") if step else ():
                oracle.state[reference][name].copy_(first_moment(state) if name == "exp_avg" else state[name])
        p.grad = torch.randn(p.shape).to(dtype)
        reference.grad = p.grad.float()
        optimizer.step(), oracle.step()
        want, atol = oracle.state[reference]["exp_avg"], 1e-7
        if moments == FP8:  # half a step of E4M3, of the largest of a block below its normal numbers
            atol = want.abs().max().item() * 2**-17
        rounding = {torch.float32: 2e-6, torch.bfloat16: 2**-8, FP8: 2**-4}[moments] * 1.001
        torch.testing.assert_close(first_moment(state).float(), want, rtol=rounding, atol=atol)
        torch.testing.assert_close(state["exp_avg_sq"], oracle.state[reference]["exp_avg_sq"], rtol=2e-6, atol=1e-7)
        assert state["exp_avg_sq"].dtype == torch.float32 and "master" not in state
        torch.testing.assert_close(p.float(), reference.to(dtype).float(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


def test_fp8_takes_a_byte_an_element_and_a_scale_for_128() -> None:
    p = nn.Parameter(torch.randn(6, 300))
    optimizer = AdamW([p, q := nn.Parameter(torch.randn(5))], moment_dtype=FP8)
    run(optimizer, range(1))
    state = optimizer.state[p]
    assert (state["exp_avg"].shape, state["exp_avg"].dtype) == ((6, 300), torch.uint8)
    assert (state["exp_avg_scale"].shape, state["exp_avg_scale"].dtype) == ((6, 3), torch.float32)
    assert optimizer.state[q]["exp_avg"].dtype == torch.float32 and "exp_avg_scale" not in optimizer.state[q]


def test_the_first_moment_in_fp8_falls_without_gradients() -> None:
    p = nn.Parameter(torch.randn(2, 256))
    optimizer = AdamW([p], moment_dtype=FP8)
    p.grad = torch.randn(2, 256)
    optimizer.step()
    before = first_moment(optimizer.state[p])
    p.grad = torch.zeros(2, 256)
    for _ in range(10):
        optimizer.step()
    torch.testing.assert_close(first_moment(optimizer.state[p]), before * 0.9**10, rtol=1e-5, atol=0)


@pytest.mark.parametrize("moments", DTYPES, ids=str)
def test_resuming_and_numbers_of_the_device_have_the_same_bits(moments) -> None:
    uninterrupted = AdamW(parameters(), **RATES, moment_dtype=moments)
    run(uninterrupted, range(3))
    saved, weights = copy.deepcopy(uninterrupted.state_dict()), copy.deepcopy(uninterrupted.param_groups[0]["params"])
    run(uninterrupted, range(3, 6))
    resumed = AdamW(weights)
    resumed.load_state_dict(saved)
    run(resumed, range(3, 6))
    assert all_same(everything(uninterrupted), everything(resumed))
    captured = AdamW(parameters(), **RATES, moment_dtype=moments, capturable=True)
    run(captured, range(6))
    assert all_same(everything(uninterrupted), everything(captured))
    with mock.patch("duotone.optim.adamw.is_capturing", return_value=True):  # which refuses others
        run(captured, range(6, 7))


@pytest.mark.parametrize("before", DTYPES, ids=str)
@pytest.mark.parametrize("after", DTYPES[1:], ids=str)
def test_a_group_may_change_its_dtype(before, after) -> None:
    optimizer = AdamW(parameters(), **RATES, moment_dtype=before)
    run(optimizer, range(2))
    optimizer.param_groups[0]["moment_dtype"] = str(after)
    run(optimizer, range(2, 4))
    for p in optimizer.param_groups[0]["params"]:
        state, want = optimizer.state[p], torch.uint8 if after == FP8 else after
        assert state["exp_avg"].dtype == (torch.float32 if after == FP8 and p.dim() == 1 else want)
        assert ("exp_avg_scale" in state) == (state["exp_avg"].dtype == torch.uint8)
        assert state["exp_avg_sq"].dtype == torch.float32 or p.dtype == torch.float32 == after


def test_without_masters_one_weight_is_decoded_at_a_time() -> None:
    parameters = [random_parameter(QUANTIZERS[name]) for name in ("mxfp8", "current", "nvfp4")]
    decoded: list[weakref.ref[Tensor]] = []

    def first_values(parameter: Tensor) -> Tensor:
        assert all(reference() is None for reference in decoded)
        values = initial_master(parameter)
        decoded.append(weakref.ref(values))
        return values

    with mock.patch("duotone.optim.adamw.initial_master", first_values):
        run(AdamW(parameters, master_dtype=None), range(2))
    assert len(decoded) == 6


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64], ids=str)
def test_parameters_that_fp32_would_round_refuse_a_dtype(dtype) -> None:
    p = nn.Parameter(torch.ones(3, dtype=dtype))
    p.grad = torch.ones_like(p)
    optimizer = AdamW([p], moment_dtype=torch.bfloat16)
    with pytest.raises(UserError, match="a group with moment_dtype=None") as raised:
        optimizer.step()
    assert "\n" not in str(raised.value) and torch.equal(p, torch.ones_like(p))


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s.update(exp_avg_scale=s["exp_avg_scale"][:, :2]),
        lambda s: s.update(exp_avg_scale=[1.0]),
        lambda s: s.pop("exp_avg_scale"),
    ],
)
def test_codes_without_their_scales_are_refused(change) -> None:
    """A kernel would read past them."""
    optimizer = AdamW([nn.Parameter(torch.randn(6, 300))], moment_dtype=FP8)
    run(optimizer, range(1))
    bad = copy.deepcopy(optimizer.state_dict())
    change(bad["state"][0])
    before = everything(optimizer)
    with pytest.raises(UserError, match="a saved exp_avg"):
        optimizer.load_state_dict(bad)
    assert all_same(everything(optimizer), before)


def test_values_that_are_not_finite_stay_visible() -> None:
    values = torch.tensor([[1.0, float("nan"), float("inf"), -2.0]])
    codes, scale = encoded(values)
    decoded: Tensor = first_moment({"exp_avg": codes, "exp_avg_scale": scale})
    assert not decoded[0, 1:3].isfinite().any()


@pytest.mark.parametrize("shape", [(0, 200), (40, 0), (2, 0, 130)], ids=str)
def test_a_parameter_without_elements_steps(shape) -> None:
    """As a rank has it that gets no rows of a short weight."""
    p = nn.Parameter(torch.zeros(shape))
    optimizer = AdamW([p], **RATES, moment_dtype=FP8)
    run(optimizer, range(2))
    assert first_moment(optimizer.state[p]).shape == shape
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    run(optimizer, range(2, 3))

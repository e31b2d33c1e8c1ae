"""On a CUDA device: activations made by kernels, alone or on the way of a cast, have the bits of torch's."""

import pytest
import torch
from torch import Tensor

from duotone import formats
from duotone.dispatch.activations import ACTIVATIONS, EXACT
from duotone.tensor import Quantizer
from duotone.tensor.context import LOCAL
from duotone.tensor.plane import BOTH, encode_once

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
NAMES = [name for name, activation in ACTIVATIONS.items() if activation.kernel]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def inputs_of(name: str, dtype: torch.dtype, rows: int, width: int) -> tuple[Tensor, Tensor]:
    """An input over the whole range where the function bends, and a gradient."""
    columns = 2 * width if ACTIVATIONS[name].gated else width
    x = torch.randn(rows, columns, device="cuda") * 4
    x[0, :8] = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 80.0, -80.0, 3e4, -3e4], device="cuda")[:8]
    return x.to(dtype), torch.randn(rows, width, device="cuda").to(dtype)


def ulps(a: Tensor, b: Tensor) -> Tensor:
    """Distance in steps of the dtype."""
    kind = torch.int32 if a.dtype is torch.float32 else torch.int16
    first, second = a.contiguous().view(kind).int(), b.contiguous().view(kind).int()
    low = torch.iinfo(kind).min
    first, second = (torch.where(t < 0, low - t, t) for t in (first, second))
    return (first - second).abs()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(64, 256), (33, 72), (5, 1000)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_compute_what_torch_does(name, shape, dtype) -> None:
    from duotone.kernels.activations import materialize

    act = ACTIVATIONS[name]
    x, dy = inputs_of(name, dtype, *shape)
    value, gradient = materialize(act.produced(x)), materialize(act.produced_gradient(dy, x))
    want, slope = act.value(x), act.gradient(dy, x)
    for result, right in ((value, want), (gradient, slope)):
        assert result.shape == right.shape and result.dtype is right.dtype
        assert not result.isnan().any()
        if act.kernel in EXACT:
            assert torch.equal(result, right)
            continue
        far = ulps(result, right)
        # GELU's approximate exponential and torch's own cancellation in 1 + tanh: absolute errors of some 2^-22 of the
        # factors, relative ones of 2^-20. A narrow result next to a tie then rounds to the other neighbour.
        scale = (dy if result is gradient else x).float().abs().max().item()
        scale *= x.float().abs().max().item() if result is gradient and act.gated else 1.0  # dy b is the factor
        rtol = 2.0**-18 + 2 * torch.finfo(dtype).eps  # a factor and the product may each round the other way
        torch.testing.assert_close(result, right, rtol=rtol, atol=scale * 2.0**-20)
        if dtype is torch.bfloat16:
            big = right.float().abs() > 2.0**-4
            assert (far[big] > 0).float().mean().item() < 2e-3


@pytest.mark.parametrize("fmt", ["fp8_e4m3_1x128", "fp8_e5m2_128x128", "mxfp8_e4m3", "fp8_e4m3_tensor", "fp8_e4m3_row"])
@pytest.mark.parametrize("shape", [(128, 256), (130, 384), (33, 72)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_a_cast_on_the_way_has_the_bits_of_a_cast_after(name, shape, fmt) -> None:
    from duotone.kernels.activations import materialize

    act = ACTIVATIONS[name]
    x, dy = inputs_of(name, torch.bfloat16, *shape)
    quantizer = Quantizer(formats.get(fmt), formats.get(fmt))
    for result in (act.produced(x), act.produced_gradient(dy, x)):
        after = encode_once(quantizer.rowwise, quantizer.columnwise, materialize(result), LOCAL)
        on_the_way = quantizer.encode_produced(result, BOTH, LOCAL)
        assert after is not None and on_the_way is not None
        for a, b in zip(after, on_the_way, strict=True):
            for part in a.parts:
                assert torch.equal(a.parts[part], b.parts[part]), part


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_silu_has_the_bits_of_torch_for_every_narrow_value(dtype) -> None:
    """All 2^16 inputs, infinities and NaN among them; gradients under ones, values at random and extremes."""
    from duotone.kernels.activations import materialize

    x = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).view(256, 256)
    random = torch.randn_like(x) * torch.exp2(torch.randint(-8, 8, x.shape, device="cuda").to(dtype))
    other, silu, swiglu = torch.randn_like(x), ACTIVATIONS["silu"], ACTIVATIONS["swiglu"]
    both = torch.cat([x, other], 1)
    pairs = [(silu.produced(x), silu.value(x)), (swiglu.produced(both), swiglu.value(both))]
    for dy in (torch.ones_like(x), random, torch.full_like(x, torch.finfo(dtype).tiny)):
        pairs.append((silu.produced_gradient(dy, x), silu.gradient(dy, x)))
        pairs.append((swiglu.produced_gradient(dy, both), swiglu.gradient(dy, both)))
    for result, want in pairs:
        output, kind = materialize(result), torch.int16
        equal = (output.view(kind) == want.view(kind)) | (output.isnan() & want.isnan())
        assert equal.all(), (output[~equal][:4], want[~equal][:4])


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
def test_gelu_is_finite_wherever_that_of_torch_is(dtype) -> None:
    """All 2^16 inputs: no intermediate overflows first, and NaN stays NaN."""
    from duotone.kernels.activations import materialize

    x = torch.arange(1 << 16, dtype=torch.int32, device="cuda").to(torch.int16).view(dtype).view(256, 256)
    dy, gelu = torch.ones_like(x), ACTIVATIONS["gelu"]
    pairs = (
        (materialize(gelu.produced(x)), gelu.value(x)),
        (materialize(gelu.produced_gradient(dy, x)), gelu.gradient(dy, x)),
    )
    for result, want in pairs:
        assert (result.isfinite() | ~want.isfinite()).all() and (result.isnan() == x.isnan())[want.isfinite()].all()
        finite = want.isfinite()
        far = (result[finite].float() - want[finite].float()).abs()
        assert (far <= 2.0**-6 * want[finite].float().abs() + 1e-5).all()

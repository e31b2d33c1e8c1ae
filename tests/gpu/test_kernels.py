"""On a CUDA device: planes have the bits of the CPU's, the FP8 product the values of its operands."""

import pytest
import torch
from comparing import bits
from torch import Tensor

from duotone import formats
from duotone.comm import ShardContext
from duotone.dispatch import gemms
from duotone.dispatch.target import target
from duotone.formats import ScaleCodec
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane_encoder import encode_plane

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)


def matrices(awkward: Tensor) -> list[Tensor]:
    """Odd sizes, transposed and strided views, one row, one column, and larger than any tile."""
    wide = torch.randn(300, 700)
    wide[::7, ::5] = 0
    return [awkward, awkward.t(), awkward[1:, :150], awkward[::2, ::3], awkward[:1], awkward[:, :1], wide, wide.t()]


class Twice(ShardContext):
    """A matrix that is one of two shards; the other has twice the amaxes."""

    def max(self, amax: Tensor) -> Tensor:
        return 2 * amax


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shard", [None, Twice("", 0), Twice("", 1)], ids=["whole", "rows", "columns"])
@pytest.mark.parametrize("name", formats.names())
def test_planes_on_cuda_have_the_bits_of_the_cpu(name, shard, dtype, awkward) -> None:
    """Also of shards, whose amaxes come from outside of the kernel."""
    fmt, seed = formats.get(name), torch.tensor([5])
    # A cast marks what is not finite. NVFP4 codes under a mark may differ between devices: decision 0028.
    marks = fmt.scale_codec is not ScaleCodec.TWO_LEVEL
    for x in matrices(awkward):
        x = x.to(dtype)
        for plane in ("row", "col"):
            cpu, cuda = (
                encode_plane(fmt, one, QuantizeContext(shard, seed=seed.to(one.device), propagate=marks), plane)
                for one in (x, x.cuda())
            )
            for part, value in cpu.parts.items():
                assert torch.equal(bits(cuda.parts[part]), bits(value)), (part, tuple(x.shape), x.stride())
            for out_dtype in (torch.float32, torch.bfloat16):
                assert torch.equal(bits(cuda.values(out_dtype)), bits(cpu.values(out_dtype)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(128, 256, 512), (17, 40, 100), (1, 16, 16), (0, 16, 32), (33, 520, 1032)], ids=str)
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
        ("fp8_e5m2_tensor", "fp8_e4m3_tensor"),
        ("fp8_e4m3_row", "fp8_e4m3_row"),
        ("fp8_e4m3_row", "fp8_e4m3_tensor"),
    ],
)
def test_the_fp8_product_is_that_of_the_decoded_operands(first, second, shape, dtype, bias) -> None:
    """Positive values: an accumulator that truncates would lose a part of the sum that grows with it."""
    m, n, k = shape
    a = encode_plane(formats.get(first), torch.rand(m, k, device="cuda").to(dtype))
    b = encode_plane(formats.get(second), torch.rand(n, k, device="cuda").to(dtype))
    rule, _ = gemms.choose(gemms.GemmProblem(a.format, b.format, target("cuda"), dtype))
    assert rule.native
    add = torch.randn(n, device="cuda", dtype=dtype) if bias else None
    y = rule.run(a, b, dtype, add)
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    want = want if add is None else want + add.double()
    assert y.dtype is dtype and y.shape == (m, n)
    # half an ulp of the result, and what Hopper's FP8 products lose in their sums: 9.3e-4 measured on positive values
    bound = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype] + 2.0**-10
    error = (y.double() - want).abs() / (want.abs() + 1)
    assert error.numel() == 0 or error.max().item() <= bound


def test_what_cublas_refuses_is_emulated_and_says_why() -> None:
    for first, second in (("fp8_e5m2_tensor", "fp8_e5m2_tensor"), ("mxfp8_e4m3", "mxfp8_e4m3")):
        rule, reason = gemms.choose(
            gemms.GemmProblem(formats.get(first), formats.get(second), target("cuda"), torch.bfloat16)
        )
        assert not rule.native and "no native rule" in reason

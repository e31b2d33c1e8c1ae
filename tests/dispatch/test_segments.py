"""Products of row segments by a rule: the same as those of each segment alone."""

import pytest
import torch
from torch import Tensor

from duotone import formats
from duotone.dispatch import segment_products
from duotone.dispatch import segments as segments_of_rows
from duotone.dispatch.rule import JoinedOperand, JoinedWeights
from duotone.dispatch.scaled import ScaledProduct
from duotone.tensor.plane_encoder import encode_plane

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
from duotone.kernels.segment_cast import Segments

COUNTS = (17, 0, 48, 3)
N, K = 32, 64
RULE = ScaledProduct("cuBLAS FP8 product", fast=False)


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch) -> None:
    """torch's product of codes, in fp64, as a CPU may have none."""

    def scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, out_dtype, out=None, bias=None, **_: object):
        y = a.double() @ b.double() * scale_a.double() * scale_b.double()
        y = (y if bias is None else y + bias.double()).to(out_dtype)
        return y if out is None else out.copy_(y)

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    monkeypatch.setattr(segment_products, "dtype_of_product", lambda dtype, *_: dtype)


def segments() -> Segments:
    wide = [-(-n // 16) * 16 for n in COUNTS]
    ends = torch.tensor([*COUNTS, *wide]).view(2, -1).cumsum(1).int().view(-1)
    return Segments(ends, len(COUNTS), sum(COUNTS), sum(wide), False, COUNTS)


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_row"])
def test_joined_operands_give_the_products_of_each_segment(name) -> None:
    fmt, lines = formats.get(name), name.endswith("row")
    torch.manual_seed(0)
    xs, ws = [torch.randn(n, K) for n in COUNTS], torch.randn(len(COUNTS), N, K)
    planes, weights = ([encode_plane(fmt, one) for one in many] for many in (xs, ws))
    exact = [
        x.dequantize(torch.float32) @ w.dequantize(torch.float32).t() for x, w in zip(planes, weights, strict=True)
    ]
    exact = [y + i for i, y in enumerate(exact)]
    biases = [torch.full((N,), float(i)) for i in range(len(COUNTS))]

    codes = torch.cat([plane.parts["codes"] for plane in planes]).view(fmt.code_dtype)
    if not lines:
        scale = torch.stack([plane.parts["scale"] for plane in planes])
    else:  # as columns of codes lie
        scale = torch.cat([torch.nn.functional.pad(p.parts["scale"].view(-1), (0, -p.shape[0] % 16)) for p in planes])
    row = JoinedOperand(fmt, codes, scale)
    each = [w.parts["codes"].view(fmt.code_dtype) for w in weights], [w.parts["scale"].view(-1) for w in weights]
    for joined in (JoinedWeights(fmt, *each), JoinedWeights(fmt, torch.stack(each[0]), torch.stack(each[1]))):
        y = RULE.run_segments(row, joined, segments(), torch.float32, biases)
        assert torch.allclose(y, torch.cat(exact), atol=1e-4)
        assert torch.equal(joined.stacked()[0].float(), torch.stack(each[0]).float())


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "fp8_e4m3_row"])
def test_columns_of_segments_give_the_gradients_of_each(name) -> None:
    """As lazy products: computed, written over a result, added to one."""
    fmt = formats.get(name)
    torch.manual_seed(1)
    dys, xs = ([torch.randn(size, n) for n in COUNTS] for size in (N, K))
    planes = [[encode_plane(fmt, one) for one in many] for many in (dys, xs)]
    exact = [a.dequantize(torch.float32) @ b.dequantize(torch.float32).t() for a, b in zip(*planes, strict=True)]
    joined = []
    for many in planes:
        padded = [torch.nn.functional.pad(p.parts["codes"], (0, -p.shape[1] % 16)) for p in many]
        codes = torch.cat([one.reshape(-1) for one in padded]).view(fmt.code_dtype)
        joined.append(JoinedOperand(fmt, codes, torch.stack([p.parts["scale"].view(-1) for p in many])))
    for product, want in zip(RULE.segment_products(*joined, segments()), exact, strict=True):
        assert torch.allclose(product.compute(torch.float32, torch.float32), want, atol=1e-4)
        out = torch.ones(N, K)
        product.compute_into(out, True, torch.float32)
        assert torch.allclose(out, want + 1, atol=1e-4)


def test_matrices_that_lie_apart_are_one_operand_with_steps_between_them(monkeypatch) -> None:
    """In any order of addresses; none if they share no step of 16 bytes."""
    monkeypatch.setattr(
        segments_of_rows, "_remembered", lambda values, dtype, device: torch.tensor(values, dtype=dtype)
    )
    memory, scales = torch.arange(4096, dtype=torch.int32).to(torch.uint8), torch.arange(12.0)
    codes = [memory[at : at + 512].view(16, 32) for at in (1536, 0, 2304)]
    apart = segments_of_rows.scattered(codes, [scales[at:] for at in (4, 0, 8)])
    assert apart.codes.data_ptr() == memory.data_ptr() and apart.places[3:].tolist() == [0, -4, 4]
    whole = torch.as_strided(apart.codes, (apart.count, 16, 32), (apart.step, 32, 1))
    assert all(torch.equal(whole[n], one) for n, one in zip(apart.places[:3].tolist(), codes, strict=True))
    assert segments_of_rows.scattered([codes[0], memory[8:520].view(16, 32)], [scales] * 2) is None
    assert segments_of_rows.scattered(codes[:1], [scales]).places.tolist() == [0, 0]

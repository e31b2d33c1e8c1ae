"""On a CUDA device: casts of both planes in one read, decoding in one kernel and the roll have the bits of the CPU."""

import itertools

import pytest
import torch
from comparing import awkward_matrix, bits, same
from torch import Tensor

from duotone import formats
from duotone.dispatch import casts, gemms, stages
from duotone.dispatch.products import factors
from duotone.dispatch.target import target
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.rolling import roll_all
from duotone.tensor import Quantizer
from duotone.tensor.context import QuantizeContext
from duotone.tensor.history import History
from duotone.tensor.plane import Plane, Usage
from duotone.tensor.plane_encoder import encode_plane

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)

ONE_READ = [
    "fp8_e4m3_tensor",
    "fp8_e5m2_tensor",
    "fp8_e4m3_tensor_pow2",
    "fp8_e4m3_row",
    "fp8_e5m2_row",
    "fp8_e4m3_1x128",
    "fp8_e4m3_1x128_fp32",
    "fp8_e5m2_1x128",
    "fp8_e4m3_128x128",
    "fp8_e4m3_128x128_fp32",
    "mxfp8_e4m3",
    "mxfp8_e5m2",
    "mxfp8_e4m3_32x32",
    "mxfp6_e2m3",
    "mxfp6_e3m2",
    "mxfp4",
]
MIXED = [
    ("fp8_e4m3_1x128", "fp8_e4m3_128x128"),
    ("fp8_e4m3_row", "fp8_e5m2_tensor"),
    ("mxfp8_e4m3", "fp8_e5m2_1x128_fp32"),
    ("fp8_e4m3_tensor", "mxfp8_e5m2"),
    ("mxfp4", "mxfp6_e3m2"),
    ("mxfp8_e4m3", "mxfp4"),
]
SHAPES = [(128, 256), (1, 16), (17, 1), (130, 257), (256, 384), (64, 128), (512, 96)]
USAGES = [Usage(True, True), Usage(True, False), Usage(False, True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", [*((n, n) for n in ONE_READ), *MIXED], ids=str)
def test_one_read_has_the_bits_of_the_stages(pair, shape, dtype) -> None:
    x = awkward_matrix(*shape, dtype)
    quantizer = Quantizer(formats.get(pair[0]), formats.get(pair[1]))
    assert casts.one_read(quantizer.rowwise, quantizer.columnwise, x.cuda(), True) is not None
    for propagate in (True, False):
        cpu = plain(quantizer, x, propagate)
        for usage in USAGES if propagate else USAGES[:1]:
            cuda = quantizer.encode(x.cuda(), usage, QuantizeContext(propagate=propagate))
            same(cpu[0] if usage.rowwise else None, cuda.rowwise)
            same(cpu[1] if usage.columnwise else None, cuda.columnwise)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
def test_one_launch_has_the_amaxes_of_many(dtype) -> None:
    from duotone.kernels import amax

    many = [awkward_matrix(rows, 64, dtype).cuda() for rows in (1, 3, 128, 130, 4096, 28672)]
    many.append(torch.full((8, 8), float("nan"), device="cuda", dtype=dtype))
    want = torch.cat([stages.amax_of(x) for x in many])
    for _ in range(2):  # the second finds the table of addresses
        assert torch.equal(amax.amaxes(many), want)
    shifted = [x.flatten()[1:] for x in many]
    assert torch.equal(torch.cat(stages.amaxes_of(shifted)), torch.cat([stages.amax_of(x) for x in shifted]))


def plain(quantizer: Quantizer, x: Tensor, propagate: bool = True) -> tuple[Plane, Plane]:
    """Both planes by the formats' plain stages."""
    row, col = quantizer.rowwise, quantizer.columnwise
    assert row is not None and col is not None
    m, k = x.shape
    parts = col.encode(
        x if col.is_derivable else x.t(), plane="row" if col.is_derivable else "col", propagate=propagate
    )
    parts = col.derive(parts) if col.is_derivable else parts
    assert parts is not None
    return Plane(row, row.encode(x, propagate=propagate), (m, k)), Plane(col, parts, (k, m))


def test_inputs_that_are_not_contiguous_or_misaligned() -> None:
    x = awkward_matrix(130, 512, torch.bfloat16)
    cuda = x.cuda()
    flat = torch.zeros(130 * 512 + 1, dtype=torch.bfloat16, device="cuda")
    flat[1:] = cuda.view(-1)
    misaligned = flat[1:].view(130, 512)
    assert misaligned.data_ptr() % 16
    views = [(x.t(), cuda.t()), (x[::2, ::3], cuda[::2, ::3]), (x[1:2].expand(8, 512), cuda[1:2].expand(8, 512))]
    for a, b in [*views, (x, misaligned)]:
        for name in ONE_READ:
            quantizer = Quantizer(formats.get(name), formats.get(name))
            cpu, tensor = plain(quantizer, a), quantizer.encode(b)
            same(cpu[0], tensor.rowwise)
            same(cpu[1], tensor.columnwise)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ONE_READ)
def test_decoding_in_one_kernel_has_the_bits_of_the_stages(name, shape) -> None:
    x = awkward_matrix(*shape, torch.float32)
    quantizer = Quantizer(formats.get(name), formats.get(name))
    cpu, cuda = plain(quantizer, x), quantizer.encode(x.cuda())
    for a, b in zip(cpu, cuda, strict=True):
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            assert torch.equal(bits(b.values(dtype)), bits(a.format.decode(a.parts, dtype))), dtype
        assert torch.equal(bits(factors(b).values), bits(a.format.factors(a.parts).values))


@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
@pytest.mark.parametrize("usage", USAGES, ids=str)
def test_delayed_casts_record_the_amax_and_use_the_scale(element, usage) -> None:
    fmt = formats.get(f"fp8_{element}_delayed")
    quantizer = Quantizer(fmt, fmt, history=History())
    x = torch.randn(130, 257)
    x[5, 7] = torch.nan
    results = []
    for device in ("cpu", "cuda"):
        state = DelayedState(4, History(amax_history_len=8), device)
        state.largest = [fmt.largest] * 4
        state.scale.copy_(torch.tensor([1.0, 3.0, 5.0, 7.0]))
        context = QuantizeContext(slots=(DelayedSlot(state.number, 2), None))
        planes = quantizer.encode(x.to(device), usage, context)
        for _ in range(3):
            roll_all([state])
            quantizer.encode(x.to(device) * 2, usage, context)
        results.append((planes, state))
    same(results[0][0].rowwise, results[1][0].rowwise)
    same(results[0][0].columnwise, results[1][0].columnwise)
    assert torch.equal(bits(results[0][1].amax_history), bits(results[1][1].amax_history))
    assert torch.equal(bits(results[0][1].scale), bits(results[1][1].scale))
    assert results[1][1].amax_history[0, 2] > 0


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize(("length", "margin"), [(1, 0), (2, 3), (5, 0), (1024, 0), (1000, 1)])
@pytest.mark.parametrize(("skip", "spike"), [(False, 0), (True, 16.0)])
def test_the_roll_in_one_kernel_has_the_bits_of_the_plain_one(length, margin, algorithm, skip, spike) -> None:
    """Two states of 7 and 2 slots roll in one launch."""
    rule = {"skip_nonfinite_amax": skip, "spike_factor": spike}
    parameters = History(margin=margin, amax_history_len=length, amax_compute_algo=algorithm, **rule)
    live = [torch.tensor([0.0, 1e-44, torch.inf, 3.0, 1e30, 7.0, torch.nan]), torch.tensor([2.0, 0.0])]
    pairs = []
    for amaxes in live:
        cpu, cuda = (DelayedState(len(amaxes), parameters, device) for device in ("cpu", "cuda"))
        cpu.largest = cuda.largest = [448.0, 448.0, 57344.0, 57344.0, 448.0, 0.0, 448.0][: len(amaxes)]
        cpu.amax_history.copy_(torch.rand(length, len(amaxes)) * 100)
        cpu.amax_history[0] = amaxes
        cpu.scale.copy_(torch.rand(len(amaxes)) + 1)
        cuda.load_state_dict(cpu.state_dict())
        pairs.append((cpu, cuda))
    for _ in range(3):
        roll_all([cuda for _, cuda in pairs])
        for cpu, cuda in pairs:
            before = cpu.scale.clone()
            cpu.roll()
            assert torch.equal(cuda.step.before.past.cpu(), before)
            for name in ("amax_history", "events", "scale"):
                assert torch.equal(bits(getattr(cuda, name)), bits(getattr(cpu, name))), name
            cpu.amax_history[0], cuda.amax_history[0] = 5.0, 5.0


PAIRS = [("1x128", "128x128"), ("1x128", "1x128"), ("128x128", "1x128")]


@pytest.mark.parametrize("suffix", ["", "_fp32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(256, 384, 512), (17, 48, 640), (130, 40, 100), (0, 16, 32), (128, 520, 1152)], ids=str
)
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_the_block_product_is_that_of_the_decoded_operands(pair, shape, bias, dtype, suffix) -> None:
    """Positive values, so that an accumulator that truncates would lose a part of the sum that grows with it."""
    torch.manual_seed(1)
    m, n, k = shape
    first, second = (formats.get(f"fp8_e4m3_{block}{suffix}") for block in pair)
    a = encode_plane(first, torch.rand(m, k, device="cuda").to(dtype))
    b = encode_plane(second, torch.rand(n, k, device="cuda").to(dtype))
    rule, _ = gemms.choose(gemms.GemmProblem(first, second, target("cuda"), dtype))
    assert rule.native and "block" in rule.name
    add = torch.randn(n, device="cuda", dtype=dtype) if bias else None
    y = rule.run(a, b, dtype, add)
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    want = want if add is None else want + add.double()
    assert y.dtype is dtype and y.shape == (m, n)
    # Half an ulp of the result, and what Hopper loses within a block of 128: before a step of 32 products is added,
    # each product is cut to 13 bits below the exponent of the sum. Positive values lose 2^-11 on average, and 1.33e-3
    # at most in 12 seeds of each shape (bench/results/2026-11-22-h200-block-products.txt).
    bound = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 0.0}[dtype] + 2.0**-9
    error = (y.double() - want).abs() / (want.abs() + 1)
    assert error.numel() == 0 or (error.max().item() <= bound and error.mean().item() <= bound / 2)


def test_a_sum_of_positive_values_shrinks_only_where_fast_accumulation_is_allowed() -> None:
    fmt = formats.get("fp8_e4m3_tensor")
    a = encode_plane(fmt, torch.rand(128, 16384, device="cuda"))
    b = encode_plane(fmt, torch.rand(128, 16384, device="cuda"))
    want = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    lost = {}
    for fast in (False, True):
        rule, _ = gemms.choose(gemms.GemmProblem(fmt, fmt, target("cuda"), torch.float32, fast))
        lost[fast] = (1 - rule.run(a, b, torch.float32).double() / want).mean().item()
    assert abs(lost[False]) < 2.0**-9 < 2.0**-6 < lost[True]


def test_every_pair_of_simple_formats_has_a_cast() -> None:
    x = torch.ones(4, 4, device="cuda")
    for a, b in itertools.product(ONE_READ, ONE_READ):
        assert casts.one_read(formats.get(a), formats.get(b), x, True) is not None
    for name in ("mxfp4", "mxfp6_e2m3"):
        assert casts.one_read(formats.get(name), None, x, True) is not None

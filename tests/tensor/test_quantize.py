"""quantize: values, shapes and dtypes of every kind of quantizer, and input of every kind."""

import pytest
import torch
from tensor_cases import (
    BOTH,
    COLUMN,
    DTYPES,
    QUANTIZERS,
    Slot,
    every_dtype,
    every_quantizer,
    every_usage,
    get,
    pair,
    parts_of,
    planes_of,
    same,
    same_bits,
    same_parts,
    snapshot,
    values_of,
)
from torch._subclasses import FakeTensorMode

from duotone import formats
from duotone.comm import ShardContext
from duotone.compat import QuantizerHandle
from duotone.compat.quantizers import Float8CurrentScalingQuantizer, MXFP8Quantizer
from duotone.errors import UserError
from duotone.tensor import LOCAL, QuantizeContext, QuantizedTensor, Quantizer, Usage

SHAPE = (48, 80)
HIDDEN = QuantizeContext(propagate=False)


@every_quantizer
@every_usage
@every_dtype
def test_planes_are_those_of_the_formats(q, usage, dtype) -> None:
    """core 1, 26; hybrid 10."""
    x = torch.randn(SHAPE).to(dtype)
    t = q.quantize(x, usage=usage)
    assert type(t) is QuantizedTensor and (t.shape, t.dtype, t.device) == (x.shape, dtype, x.device)
    assert t.get_usages() == usage._asdict() and t.quantizer == q
    assert same_parts(parts_of(t), planes_of(q, x, usage))


@every_quantizer
@every_usage
def test_quantize_into_a_tensor(q, usage) -> None:
    """core 2, 6: out= is returned, keeps its class, and holds the bytes of a new one."""

    class Subclass(QuantizedTensor):
        pass

    x = torch.randn(SHAPE)
    out = q.quantize(torch.randn(SHAPE), usage=usage)
    out.__class__ = Subclass
    assert q.quantize(x, usage=usage, out=out) is out and type(out) is Subclass
    out.__class__ = QuantizedTensor
    assert same(out, q.quantize(x, usage=usage))
    tensor = q.make_empty(SHAPE, usage=usage)
    assert same(q.quantize(x, usage=usage, out=tensor), out)


@every_quantizer
@every_dtype
def test_strided_sliced_and_n_d_input(q, dtype) -> None:
    """core 3."""
    base = torch.randn(160, 96).to(dtype)
    for x in (
        base.t(),
        base[::2, 8:88],
        base[8:56].unflatten(0, (3, 16)),
        base[:48, :80].view(48, 80).expand(2, 48, 80),
    ):
        before = x.clone()
        t = q.quantize(x)
        assert same(t, q.quantize(before.contiguous())) and t.shape == x.shape
        assert same_parts(parts_of(t), planes_of(q, before.reshape(-1, x.shape[-1])))
        assert same_bits(x, before)


@every_quantizer
@every_usage
def test_empty_tensors_keep_their_shape(q, usage) -> None:
    """core 4."""
    for shape in ((0, 64), (48, 0), (0,), (2, 0, 16)):
        t = q.quantize(torch.empty(shape).bfloat16(), usage=usage)
        assert t.shape == shape and t.dequantize().shape == shape and t.dequantize().dtype == torch.bfloat16
        t.quantize_(torch.empty(shape))
        assert t.clone().shape == t.view(shape).shape == t.add_(1).shape == torch.Size(shape)


@every_quantizer
@every_usage
def test_any_rank_and_size(q, usage) -> None:
    """core 5: every format takes ragged blocks, so 0-d, 1-d and odd sizes are no error in any."""
    for shape in ((), (1,), (7,), (64,), (1, 1), (17, 33)):
        x = torch.randn(shape)
        matrix = x.reshape(1, -1) if x.dim() < 2 else x
        t = q.quantize(x, usage=usage)
        assert t.shape == x.shape and same_parts(parts_of(t), planes_of(q, matrix, usage))
        assert t.dequantize().shape == x.shape


@pytest.mark.parametrize(
    ("name", "fits", "cuts"),
    [
        ("identity", (3, 5), None),
        ("fp8", (3, 5), None),
        ("fp8_delayed", (7,), None),
        ("mxfp8", (32, 64), (16, 64)),
        ("mxfp8", (2, 16, 32), (64,)),
        ("1x128", (128, 256), (128, 64)),
        ("128x128", (128, 128), (64, 128)),
        ("nvfp4", (16, 32), (16, 8)),
        ("nvfp4_16x16", (16, 32), (8, 32)),
    ],
)
def test_is_quantizable(name, fits, cuts) -> None:
    """core 5: whether a shard ends on block boundaries in both directions."""
    handle = QuantizerHandle(QUANTIZERS[name])
    assert handle.is_quantizable(torch.empty(fits))
    assert cuts is None or not handle.is_quantizable(torch.empty(cuts))


@every_quantizer
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.uint8, torch.complex64], ids=str)
def test_other_dtypes_are_one_clear_error(q, dtype) -> None:
    """core 1; issue, bad input: nothing is recorded and nothing written before the error."""
    x, slot = torch.ones(SHAPE).to(dtype), Slot()
    ctx = QuantizeContext(slots=(slot, None))
    t = q.quantize(torch.randn(SHAPE))
    before = snapshot(t)
    for call in (lambda: q.quantize(x, ctx=ctx), lambda: q.quantize(x, out=t, ctx=ctx), lambda: setattr(t, "data", x)):
        with pytest.raises(UserError, match=f"bf16, fp16 and fp32; got {dtype}") as error:
            call()
        assert "\n" not in str(error.value)
    assert same_parts(parts_of(t), before) and slot.recorded == []


@every_quantizer
@every_usage
def test_a_noop_flag_keeps_every_byte_and_amax(q, usage) -> None:
    """core 7; hybrid 16: 1 keeps every byte and amax, 0 writes, also from a quantized source."""
    x, y, slot = torch.randn(SHAPE), 9 * torch.randn(SHAPE), Slot(4.0)
    ctx = QuantizeContext(slots=(slot, None) if any(q.delayed) else (None, None))
    t = q.quantize(x, usage=usage, ctx=ctx)
    before, recorded = snapshot(t), max(slot.recorded, default=0.0)
    for source in (y, q.quantize(y)):
        q.quantize(source, usage=usage, out=t, noop_flag=torch.ones(1), ctx=ctx)
        assert same_parts(parts_of(t), before)
    assert max(slot.recorded, default=0.0) == recorded
    q.quantize(y, usage=usage, out=t, noop_flag=torch.zeros(1), ctx=ctx)
    assert same(t, q.quantize(y, usage=usage, ctx=ctx))


@pytest.mark.parametrize("name", ["identity", "fp8", "mxfp8", "nvfp4", "nvfp4_rht", "128x128"])
def test_noop_flag_is_read_on_the_device(name) -> None:
    """core 7: no value is looked at by the host, or a fake tensor would raise."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        t = QUANTIZERS[name].quantize(torch.empty(SHAPE))
        t.quantize_(torch.empty(SHAPE), noop_flag=torch.empty(1))
        assert t.dequantize().shape == SHAPE


def test_a_bad_noop_flag_is_refused_and_changes_nothing() -> None:
    """core 7; issue, bad input."""
    q, x = QUANTIZERS["mxfp8"], torch.randn(SHAPE)
    t = q.quantize(x)
    before = snapshot(t)
    with pytest.raises(UserError, match=r"one element; got shape \(2,\)"):
        t.quantize_(2 * x, noop_flag=torch.zeros(2))
    with pytest.raises(UserError, match="no `out` was given"):
        q.quantize(x, noop_flag=torch.zeros(1))
    assert same_parts(parts_of(t), before)


@every_quantizer
@every_usage
@every_dtype
def test_make_empty_is_what_quantize_makes(q, usage, dtype) -> None:
    """core 10, 11; hybrid 14: class, planes, buffers, shapes, dtypes, memory order, and the gradient flag."""
    for shape in (SHAPE, (2, 24, 80), (17, 33)):
        tensor = q.make_empty(shape, usage=usage, dtype=dtype, requires_grad=True)
        real = q.quantize(torch.randn(shape).to(dtype), usage=usage)
        assert tensor.requires_grad and tensor.is_leaf and (tensor.shape, tensor.dtype) == (real.shape, dtype)
        assert tensor.__tensor_flatten__()[0] == real.__tensor_flatten__()[0]
        for empty, filled in zip(parts_of(tensor), parts_of(real), strict=True):
            assert (empty is None) == (filled is None)
            for name in empty or ():
                assert (empty[name].shape, empty[name].dtype) == (filled[name].shape, filled[name].dtype)


@every_quantizer
def test_buffers_are_those_that_the_format_declares(q) -> None:
    """core 11, 15: names, order, shapes and dtypes; there is no padding in any of them."""
    for shape in ((48, 80), (17, 33), (1, 1), (130, 5)):
        x = torch.randn(shape).bfloat16()
        t = q.quantize(x)
        for plane in t.planes:
            specs = plane.format.parts(*plane.shape)
            assert list(plane.parts) == list(specs)
            for name, spec in specs.items():
                part = plane.parts[name]
                assert (tuple(part.shape), part.dtype) == (spec.shape, spec.dtype or torch.bfloat16)


SHAPES_OF_PARTS = {
    "fp8": ([(48, 80), (1,)], [(80, 48), (1,)]),
    "mxfp8": ([(48, 80), (48, 3)], [(80, 48), (80, 2)]),
    "1x128": ([(48, 80), (48, 1)], [(80, 48), (80, 1)]),
    "128x128": ([(48, 80), (1, 1)], [(80, 48), (1, 1)]),
    "nvfp4": ([(48, 40), (48, 5), (1,)], [(80, 24), (80, 3), (1,)]),
    "nvfp4_row": ([(48, 40), (48, 5), (48,)], [(80, 24), (80, 3), (80,)]),
}


@pytest.mark.parametrize("name", SHAPES_OF_PARTS)
def test_shapes_of_codes_and_scales(name) -> None:
    """core 15."""
    t = QUANTIZERS[name].quantize(torch.randn(48, 80))
    for plane, expected in zip(t.planes, SHAPES_OF_PARTS[name], strict=True):
        assert [tuple(part.shape) for part in plane.parts.values()] == expected


def test_multi_quantize_is_the_loop() -> None:
    """core 12."""
    for handle in (MXFP8Quantizer(columnwise=False), Float8CurrentScalingQuantizer()):
        tensors = [torch.randn(n, 32) for n in (1, 0, 64)]
        for result, x in zip(handle.multi_quantize(tensors), tensors, strict=True):
            assert same(result, handle(x))


@pytest.mark.parametrize(
    ("values", "scale"),
    [
        ([0.0, -0.0], 1.0),
        ([float("nan"), 2.0], 224.0),
        ([1e-40, 0.0], torch.finfo(torch.float32).max),
        ([-3.0, 1.0], 448.0 / 3.0),
    ],
)
def test_scale_of_current_scaling(values, scale) -> None:
    """core 14: amax 0 gives 1, NaN is ignored, an overflowing scale is the largest fp32."""
    t = Float8CurrentScalingQuantizer()(torch.tensor([values]))
    expected = 1 / torch.tensor([scale], dtype=torch.float32)
    assert torch.equal(t.rowwise_scale, expected) and torch.equal(t.columnwise_scale, expected)


def test_an_infinite_amax_is_a_scale_of_one_that_is_stored_as_nan() -> None:
    """core 14: codes as under the scale 1; only a context that hides non-finite values stores that scale."""
    x, quantizer = torch.tensor([[float("inf"), 1.0]]), Float8CurrentScalingQuantizer()
    t, hidden = quantizer(x), quantizer.value.quantize(x, ctx=HIDDEN)
    assert t.rowwise_scale.isnan() and t.columnwise_scale.isnan()
    assert hidden.rowwise_scale == 1 and torch.equal(hidden.rowwise_codes, t.rowwise_codes)


def test_powers_of_two_round_down() -> None:
    """core 14."""
    t = Float8CurrentScalingQuantizer(force_pow_2_scales=True)(torch.tensor([[3.0]]))
    assert t.rowwise_scale.item() == 1 / 128


@every_quantizer
@every_usage
def test_awkward_values_give_what_the_format_gives(q, usage, awkward) -> None:
    """core 14: zeros, denormals, NaN and infinities; every plane and the dequantized values, bit for bit."""
    t = q.quantize(awkward, usage=usage, ctx=HIDDEN)
    row, col = planes_of(q, awkward, usage)
    assert same_parts(parts_of(t), (row, col))
    use_row = row is not None and (col is None or q.rowwise.precision >= q.columnwise.precision)
    if use_row:
        expected = values_of(q.rowwise, row, awkward)
    else:
        expected = values_of(q.columnwise, col, awkward.t()).t()
    result = t.dequantize()
    assert torch.equal(result.isnan(), expected.isnan())
    assert same_bits(result.nan_to_num(0.0), expected.nan_to_num(0.0))


@every_quantizer
@every_usage
def test_what_is_not_finite_decodes_to_what_is_not_finite(q, usage, awkward) -> None:
    """Every plane keeps it, unless an Identity plane does; blocks with finite values alone have the bits of encode."""
    t, hidden = q.quantize(awkward, usage=usage), q.quantize(awkward, usage=usage, ctx=HIDDEN)
    for plane, plain, source in zip(t.planes, hidden.planes, (awkward, awkward.t()), strict=True):
        if plane is None:
            continue
        values = plane.dequantize(torch.float32)
        assert not values[~source.isfinite()].isfinite().any()
        saved = values.isfinite()
        assert torch.equal(values[saved], plain.dequantize(torch.float32)[saved])


def test_stochastic_rounding_needs_repeats_and_varies_with_its_seed() -> None:
    """core 16."""
    q, x = pair("nvfp4_sr"), torch.rand(64, 64)
    with pytest.raises(UserError, match="needs a seed"):
        q.quantize(x)

    def at(seed: int) -> QuantizedTensor:
        return q.quantize(x, ctx=QuantizeContext(seed=torch.tensor([seed])))

    assert same(at(5), at(5)) and not same(at(5), at(6))
    assert not torch.equal(at(5).dequantize(), at(5).planes.columnwise.dequantize(torch.float32).t())
    below = x < x.reshape(64, 4, 16).amax(2, keepdim=True).expand(64, 4, 16).reshape(64, 64)  # a scale may cut the rest
    mean = torch.stack([at(seed).dequantize() for seed in range(64)]).mean(0)
    assert abs(float((mean - x)[below & (x < 0.8)].mean())) < 1e-3
    t = at(1)
    assert same(q.quantize(x, out=t, ctx=QuantizeContext(seed=torch.tensor([9]))), at(9))
    assert same(QuantizerHandle(q).quantize(x, out=t, seed=torch.tensor([7])), at(7))


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_delayed_planes_use_and_record_their_slots(source) -> None:
    """core 2, 13; hybrid 11: also where an existing tensor is written."""
    x, y = torch.randn(32, 64), 5 * torch.randn(32, 64)
    q = pair("fp8_e4m3_delayed", "mxfp8_e4m3", source)
    slot = Slot(8.0)
    ctx = QuantizeContext(slots=(slot, None))
    t = q.quantize(x, ctx=ctx)
    expected = get("fp8_e4m3_delayed").encode(x, scale=torch.tensor([8.0]))
    assert same_bits(t.rowwise_codes, expected["codes"]) and slot.recorded == [float(x.abs().max())]
    slot.scale = torch.tensor([4.0])
    q.quantize(y, out=t, ctx=ctx)
    assert slot.recorded[1:] == [float(y.abs().max())]
    assert same(t, q.quantize(y, ctx=QuantizeContext(slots=(Slot(4.0), None))))
    # Column only: the row is encoded once for its values, or not at all.
    slot.recorded.clear()
    q.quantize(x, usage=COLUMN, ctx=ctx)
    assert len(slot.recorded) == (source != "original")


def test_delayed_planes_without_a_slot_keep_their_scale() -> None:
    """core 34: a write outside of any module, hybrids with one delayed side included."""
    for q in (QUANTIZERS["fp8_delayed"], QUANTIZERS["delayed|mxfp8"], pair("fp8_e4m3_delayed", "identity")):
        for make in (lambda t: t, lambda t: t.new_zeros(32, 64), torch.empty_like):
            x = torch.randn(32, 64)
            t = make(q.quantize(x.clone(), ctx=QuantizeContext(slots=(Slot(1.0), None))))
            t.copy_(x * 3)
            assert t.rowwise_scale.item() == 1.0
            assert same(t, q.quantize(x * 3, ctx=QuantizeContext(slots=(Slot(1.0), None))))
    t = pair("fp8_e4m3_delayed").quantize(torch.randn(8, 8), ctx=QuantizeContext(slots=(Slot(3.0), None)))
    copy_before = t.rowwise_scale.clone()
    assert torch.equal(t.mul_(2).rowwise_scale, copy_before)


def test_two_delayed_directions_have_two_scales() -> None:
    """core 2; hybrid 18."""
    x = torch.randn(16, 16)
    ctx = QuantizeContext(slots=(Slot(2.0), Slot(16.0)))
    q = pair("fp8_e4m3_delayed")
    t = q.quantize(x, ctx=ctx)
    assert (t.rowwise_scale.item(), t.columnwise_scale.item()) == (1 / 2, 1 / 16)
    assert same(q.quantize(2 * x, out=t, ctx=ctx), q.quantize(2 * x, ctx=ctx))
    expected = get("fp8_e4m3_delayed").encode(2 * x, scale=torch.tensor([16.0]))["codes"].t()
    assert torch.equal(t.columnwise_codes, expected)


@pytest.mark.parametrize("name", [n for n in formats.names() if not get(n).is_stochastic])
def test_every_registered_format_round_trips(name) -> None:
    """core 1."""
    x = torch.randn(33, 40).bfloat16()
    fmt = get(name)
    t = pair(name).quantize(x, usage=Usage(True, False))
    assert same_bits(t.dequantize(torch.float32), values_of(fmt, fmt.encode(x), x.float()))


class Pair(ShardContext):
    """One of two shards; the other one's amaxes are all 10."""

    def max(self, amax: torch.Tensor) -> torch.Tensor:
        return amax.clamp(min=10.0)


@pytest.mark.parametrize("dim", [0, 1])
def test_scales_that_span_the_sharded_dimension_agree(dim) -> None:
    """core 22: one scale per row of x, and per row of its transpose: shards agree on just one of the two."""
    x = torch.rand(16, 32)
    t = pair("fp8_e4m3_row").quantize(x, ctx=QuantizeContext(shard=Pair("", dim)))
    local = x.amax(1 - dim) / 448
    planes = t.planes if dim == 0 else t.planes[::-1]
    assert torch.allclose(planes[0].parts["scale"].flatten(), local)
    assert torch.allclose(planes[1].parts["scale"].flatten(), torch.full((x.shape[1 - dim],), 10 / 448))


@pytest.mark.parametrize("col", ["fp8_e4m3_128x128", "mxfp8_e4m3_32x32", "fp8_e5m2_tensor", "nvfp4"])
@pytest.mark.parametrize("row", ["fp8_e4m3_tensor", "fp8_e4m3_row", "nvfp4", "mxfp8_e4m3"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_plane_gets_no_amax_of_the_other_one(row: str, col: str, dim: int) -> None:
    """A shard whose amaxes are those of all shards has the planes of a whole tensor."""
    x = torch.rand(128, 256)

    class Largest(ShardContext):
        def max(self, amax: torch.Tensor) -> torch.Tensor:
            return amax

    quantizer = Quantizer(formats.get(row), formats.get(col))
    shard, whole = quantizer.quantize(x, ctx=QuantizeContext(shard=Largest("", dim))), quantizer.quantize(x)
    for one, other in zip(shard.planes.buffers, whole.planes.buffers, strict=True):
        assert torch.equal(one, other)


def test_inference_and_no_grad() -> None:
    """core 1, 49: what is made under inference_mode is read and written there and outside."""
    x, q = torch.randn(64, 64, requires_grad=True), QUANTIZERS["mxfp8"]
    with torch.no_grad():
        assert not q.quantize(x).requires_grad
    with torch.inference_mode():
        t = q.quantize(x)
        assert t.is_inference() and same(t, q.quantize(x.detach()))
        assert same(t.add_(1), q.quantize(q.quantize(x.detach()).dequantize() + 1))
        for result in (
            t.chunk(2)[0],
            t.narrow(0, 0, 32),
            t.flatten(),
            t.contiguous(),
            t.expand_as(t),
            t.cpu(),
            t.float(),
        ):
            assert isinstance(result, QuantizedTensor)
        assert torch.equal(torch.nn.functional.linear(x, t), torch.nn.functional.linear(x, t.dequantize()))
    assert torch.equal((t + 1), t.dequantize() + 1)


def test_default_context_is_local_and_dtypes_are_three() -> None:
    """core 22: nothing in the default context names a group, a slot or a seed."""
    assert LOCAL == QuantizeContext(None, (None, None), None) and len(DTYPES) == 3 and BOTH == (True, True)

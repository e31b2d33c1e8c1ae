"""Handles and quantizers: values, usages, slots, construction, and nothing live inside."""

import copy
import dataclasses
import pickle

import pytest
import torch
from tensor_cases import BOTH, COLUMN, QUANTIZERS, ROW, Slot, every_quantizer, get, pair, same, same_parts, snapshot

from duotone import Quantizer, formats
from duotone.compat import QuantizerHandle
from duotone.compat.quantizers import (
    Float8BlockQuantizer,
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    HybridQuantizer,
    IdentityQuantizer,
    MXFP8Quantizer,
    NVFP4Quantizer,
)
from duotone.errors import RecipeError, UserError
from duotone.recipes.delayed import DelayedScalingRequest
from duotone.tensor import LOCAL, QuantizeContext, Usage, plane_encoder
from duotone.tensor.history import History


def delayed(scale: float = 2.0) -> Float8Quantizer:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1))


LEAVES = {
    "identity": IdentityQuantizer,
    "delayed": delayed,
    "fp8": Float8CurrentScalingQuantizer,
    "block": Float8BlockQuantizer,
    "mxfp8": MXFP8Quantizer,
    "nvfp4": NVFP4Quantizer,
    "nvfp4_rht": lambda: NVFP4Quantizer(with_rht=True),
}


def hybrid(row, col, **options) -> HybridQuantizer:
    return HybridQuantizer(rowwise_quantizer=row, columnwise_quantizer=col, **options)


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_usages_of_a_handle(make) -> None:
    """core 8: set_usage takes keywords, None keeps, and no existing tensor changes."""
    handle, x = make(), torch.randn(32, 64)
    t = handle(x)
    before = snapshot(t)
    handle.set_usage(rowwise=False)
    handle.set_usage()
    assert handle.get_usages() == {"rowwise": False, "columnwise": True} == handle(x).get_usages()
    handle.set_usage(rowwise=None, columnwise=False)
    assert handle(x).get_usages() == {"rowwise": False, "columnwise": False}
    assert t.get_usages() == {"rowwise": True, "columnwise": True} and same_parts(snapshot(t), before)
    with pytest.raises(TypeError):
        handle.set_usage(True)


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_copies_of_a_handle(make) -> None:
    """core 9; hybrid 7: equal in value and usages, independent in usages, and the slot is shared."""
    handle = make()
    handle.set_usage(columnwise=False)
    twin = handle.copy()
    assert type(twin) is type(handle) and twin.value is handle.value and twin.get_usages() == handle.get_usages()
    twin.set_usage(columnwise=True, rowwise=False)
    assert handle.get_usages() == {"rowwise": True, "columnwise": False}
    assert twin.slots is handle.slots
    both = hybrid(make(), MXFP8Quantizer(), columnwise_source="rowwise_dequantized")
    assert both.copy().value == both.value and both.copy().slots == both.slots


def test_copies_alias_scale_and_amax() -> None:
    """core 9."""
    handle = delayed()
    twin = handle.copy()
    twin(torch.full((2, 2), 7.0))
    handle(torch.full((2, 2), -3.0))
    assert handle.amax is twin.amax and handle.amax.item() == 7.0 and handle.scale is twin.scale


def test_destinations_must_be_quantized_tensors() -> None:
    """core 6; hybrid 17."""
    handle, x = MXFP8Quantizer(), torch.randn(32, 64)
    for call in (
        lambda: handle.update_quantized(x, torch.zeros(32, 64)),
        lambda: handle.quantize(x, out=torch.zeros(32, 64)),
        lambda: handle.value.quantize(x, out=torch.zeros(32, 64)),
    ):
        with pytest.raises(TypeError, match="writes a QuantizedTensor; got Tensor"):
            call()


@pytest.mark.parametrize("usage", [BOTH, ROW, COLUMN])
def test_destinations_must_hold_the_formats(usage) -> None:
    """core 6: checked before an amax is recorded or a byte written."""
    handle, t = delayed(), MXFP8Quantizer()(torch.randn(32, 64))
    handle.set_usage(**usage._asdict())
    before = snapshot(t)
    with pytest.raises(UserError, match="makes fp8_e4m3_delayed where the tensor holds mxfp8_e4m3; convert"):
        handle.quantize(torch.randn(32, 64), out=t)
    with pytest.raises(UserError, match=r"cannot write shape \(64, 32\) into \(32, 64\)"):
        MXFP8Quantizer().quantize(torch.randn(64, 32), out=t)
    assert same_parts(snapshot(t), before) and handle.amax.item() == 0


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_calibrate_records_the_amax_under_delayed_scaling_alone(make) -> None:
    """core 13: delayed scaling records the largest magnitude, everything else does nothing."""
    handle = make()
    assert handle.calibrate(torch.tensor([[1.0, -5.0]])) is None
    if isinstance(handle, Float8Quantizer):
        assert handle.amax.item() == 5.0 and handle.scale.item() == 2.0


def test_delayed_handle_quantizes_with_its_scale() -> None:
    """core 2, 13: quantize, quantize into a tensor and update_quantized use the slot and record."""
    handle, x = delayed(4.0), torch.randn(16, 16)
    t = handle(x)
    assert t.rowwise_scale.item() == 0.25 and handle.amax.item() == float(x.abs().max())
    handle.scale.fill_(8.0)
    handle.amax.zero_()
    handle.quantize(2 * x, out=t)
    assert t.rowwise_scale.item() == 0.125 and handle.amax.item() == float((2 * x).abs().max())
    handle.amax.zero_()
    handle.update_quantized(3 * x, t, noop_flag=torch.ones(1))
    assert handle.amax.item() == 0 and t.rowwise_scale.item() == 0.125


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, with_rht=True), UserError, "with_rht"),
        (lambda: NVFP4Quantizer(nvfp4_use_4over6=True, stochastic_rounding=True), UserError, "stochastic_rounding"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_rht=True), UserError, "row_scaled_nvfp4 allows no"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, with_2d_quantization=True), UserError, "allows no"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, stochastic_rounding=True), UserError, "allows no"),
        (lambda: NVFP4Quantizer(row_scaled_nvfp4=True, rowwise=False), UserError, "rowwise=False"),
        (lambda: NVFP4Quantizer(nvfp4_e4m3_max=300), UserError, "448 or 256"),
        (lambda: NVFP4Quantizer(nvfp4_4over6_err_mode="L1"), UserError, "MAE or MSE"),
        (lambda: Float8BlockQuantizer(block_scaling_dim=3), UserError, "1x128"),
        (lambda: Float8CurrentScalingQuantizer("e3m4"), RecipeError, "is unknown"),
        (lambda: Quantizer("mxfp8_e4m3"), UserError, "takes formats"),
        (lambda: pair("nvfp4", "nvfp4", "both"), UserError, "columnwise_source 'both'"),
        (lambda: hybrid("nvfp4", MXFP8Quantizer()), TypeError, "rowwise_quantizer must be a quantizer; got str"),
        (lambda: hybrid(MXFP8Quantizer(), None), TypeError, "columnwise_quantizer must be a quantizer; got NoneType"),
        (lambda: hybrid(MXFP8Quantizer(), DelayedScalingRequest()), TypeError, "only as a top-level slot"),
        (lambda: hybrid(*[MXFP8Quantizer()] * 2), ValueError, "the same object"),
        (lambda: hybrid(MXFP8Quantizer(), NVFP4Quantizer(), columnwise_source="row"), ValueError, "'row' is unknown"),
    ],
)
def test_a_bad_argument_is_one_line(make, error, text) -> None:
    """core 17, 18; hybrid 1, 2, 3, 4."""
    with pytest.raises(error, match=text) as caught:
        make()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "row", "col"),
    [
        ({}, "nvfp4", "nvfp4"),
        ({"row_scaled_nvfp4": True}, "nvfp4_row", "nvfp4_row"),
        ({"nvfp4_use_4over6": True}, "nvfp4_4over6_448", "nvfp4_4over6_448"),
        (
            {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "MSE"},
            "nvfp4_4over6_mse",
            "nvfp4_4over6_mse",
        ),
        ({"nvfp4_use_4over6": True, "with_2d_quantization": True}, "nvfp4_16x16_4over6_448", "nvfp4_16x16_4over6_448"),
        ({"row_scaled_nvfp4": True, "nvfp4_use_4over6": True}, "nvfp4_row_4over6_448", "nvfp4_row_4over6_448"),
        ({"with_2d_quantization": True, "with_rht": True}, "nvfp4_16x16", "nvfp4_16x16_rht"),
    ],
)
def test_options_of_nvfp4_name_their_formats(options, row, col) -> None:
    """core 17."""
    value = NVFP4Quantizer(**options).value
    assert (value.rowwise.name, value.columnwise.name) == (row, col)


def test_children_of_a_hybrid_are_values() -> None:
    """core 18; hybrid 5, 6, 13: the parent makes both planes, whatever the children's usages are or become."""
    row, col = MXFP8Quantizer(columnwise=False), NVFP4Quantizer(rowwise=False)
    both, x = hybrid(row, col), torch.randn(32, 64)
    assert both.get_usages() == {"rowwise": True, "columnwise": True}
    t = both(x)
    before = snapshot(t)
    row.set_usage(rowwise=False)
    both.set_usage(rowwise=False)
    assert row.get_usages() == {"rowwise": False, "columnwise": False} and col.get_usages()["columnwise"]
    assert same_parts(snapshot(t), before) and t.quantizer == both.value
    both.set_usage(rowwise=True)
    assert same(both(x), t)


@pytest.mark.parametrize("name", LEAVES)
def test_hybrid_of_one_format_is_that_format(name) -> None:
    """core 19: each direction, bit for bit."""
    x, make = torch.randn(48, 80).bfloat16(), LEAVES[name]
    for usage in (BOTH, ROW, COLUMN):
        single, both = make(), hybrid(make(), make())
        for handle in (single, both):
            handle.set_usage(**usage._asdict())
        assert same(single(x), both(x))


@dataclasses.dataclass(frozen=True)
class Halving(Quantizer):
    """Encodes half of what it is given."""

    factor: float = 0.5

    def encode(self, x, usage=BOTH, ctx=LOCAL):
        return super().encode(x * self.factor, usage, ctx)


def test_children_of_a_hybrid_may_be_values() -> None:
    """hybrid 1: values and handles give the same value, and one value may serve both directions."""
    mx, nv = QUANTIZERS["mxfp8"], QUANTIZERS["nvfp4_rht"]
    want = hybrid(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True))
    for row, col in ((mx, nv), (mx, NVFP4Quantizer(with_rht=True)), (MXFP8Quantizer(), nv)):
        assert hybrid(row, col) == want and type(hybrid(row, col).value) is Quantizer
    assert hybrid(mx, mx) == MXFP8Quantizer()


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_children_of_a_hybrid_encode_in_their_own_way(source) -> None:
    """hybrid 1: a subclass keeps its encode, in whichever direction it stands, through writes and pickles too."""
    mx, x = QUANTIZERS["mxfp8"], torch.randn(32, 64, generator=torch.Generator().manual_seed(6))
    half, nv = Halving(mx.rowwise, mx.columnwise), QUANTIZERS["nvfp4"]
    for row, col in ((half, nv), (nv, half), (half, half)):
        q = hybrid(row, col, columnwise_source=source)
        of_row = row.encode(x, ROW)
        follows = x if source == "original" else of_row.rowwise.dequantize(torch.float32)
        want = of_row.rowwise.parts, col.encode(follows, COLUMN).columnwise.parts
        t = q(x)
        assert same_parts(snapshot(t), want)
        assert same_parts(snapshot(q.quantize(torch.zeros(32, 64)).copy_(x)), want)
        result = pickle.loads(pickle.dumps(t))
        assert result.quantizer == t.quantizer and same_parts(snapshot(result.zero_().copy_(x)), want)
        assert len({q.value, hybrid(row, col, columnwise_source=source).value}) == 1
        for usage in (ROW, COLUMN):
            assert same(q.value.quantize(x, usage=usage), keep(t, usage))


def keep(t, usage: Usage):
    result = t.detach()
    result.update_usage(*usage)
    return result


def count(monkeypatch) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []
    original = plane_encoder.encode_plane

    def counting(fmt, x, ctx=LOCAL, plane="row", stages=None):
        calls.append((fmt.name, plane))
        return original(fmt, x, ctx, plane, stages)

    monkeypatch.setattr(plane_encoder, "encode_plane", counting)
    return calls


def test_each_direction_calls_its_format_alone(monkeypatch) -> None:
    """hybrid 8, 9, 11."""
    calls, x = count(monkeypatch), torch.randn(32, 64)
    both = hybrid(MXFP8Quantizer(), NVFP4Quantizer(with_rht=True))
    follows = hybrid(MXFP8Quantizer(), NVFP4Quantizer(), columnwise_source="rowwise_dequantized")
    for handle, usage, expected in (
        (both, ROW, [("mxfp8_e4m3", "row")]),
        (both, COLUMN, [("nvfp4_rht", "col")]),
        (both, Usage(False, False), []),
        (follows, ROW, [("mxfp8_e4m3", "row")]),
        (follows, COLUMN, [("mxfp8_e4m3", "row"), ("nvfp4", "col")]),
    ):
        handle.set_usage(**usage._asdict())
        calls.clear()
        t = handle(x)
        assert calls == expected and t.get_usages() == usage._asdict()


@every_quantizer
@pytest.mark.parametrize("usage", [BOTH, ROW, COLUMN, Usage(False, False)], ids=["both", "row", "col", "none"])
def test_update_refreshes_what_is_asked_and_held(q, usage) -> None:
    """hybrid 15: other bytes, the objects and all addresses stay."""
    x, y = torch.randn(32, 64), torch.randn(32, 64)
    t = q.quantize(x.clone())
    before, row, col = snapshot(t), *t.planes
    aliased = t.planes.aliased
    handle = QuantizerHandle(q)
    handle.set_usage(**usage._asdict())
    assert handle.update_quantized(y, t) is t
    assert t.planes.rowwise is row and t.planes.columnwise is col
    fresh = snapshot(q.quantize(y))
    updated = snapshot(t)
    # Planes that are one memory are written together.
    wrote = [usage.rowwise or (aliased and usage.columnwise), usage.columnwise or (aliased and usage.rowwise)]
    for i in range(2):
        assert same_parts((updated[i], None), ((fresh if wrote[i] else before)[i], None))


@pytest.mark.parametrize(
    ("row", "col", "source", "safe"),
    [
        ("mxfp8", "mxfp8", "original", (True, True, True)),
        ("fp8", "block", "rowwise_dequantized", (True, True, True)),
        ("identity", "nvfp4_rht", "original", (True, True, True)),
        ("nvfp4_sr", "mxfp8", "original", (False, True, False)),
        ("nvfp4_sr", "mxfp8", "rowwise_dequantized", (False, False, False)),
        ("mxfp8", "nvfp4_sr", "original", (True, False, False)),
        ("delayed", "mxfp8", "original", (False, True, False)),
        ("delayed", "mxfp8", "rowwise_dequantized", (False, False, False)),
        ("mxfp8", "delayed", "original", (True, False, False)),
        ("delayed", "delayed", "original", (False, False, False)),
    ],
)
def test_is_requantization_safe(row, col, source, safe) -> None:
    """hybrid 20: of the rowwise plane, of the columnwise plane, of both."""
    leaves = {**LEAVES, "nvfp4_sr": lambda: NVFP4Quantizer(stochastic_rounding=True)}
    handle = hybrid(leaves[row](), leaves[col](), columnwise_source=source)
    results = []
    for usage in (ROW, COLUMN, BOTH):
        handle.set_usage(**usage._asdict())
        results.append(handle.is_requantization_safe())
    assert tuple(results) == safe


def test_equality_is_by_value() -> None:
    """core 20: every field counts, usages of a handle do not; a bound handle is itself alone."""
    base = Quantizer(get("mxfp8_e4m3"), get("nvfp4"), "original", None)
    assert base == Quantizer(get("mxfp8_e4m3"), get("nvfp4")) and hash(base) == hash(copy.deepcopy(base))
    for change in (
        {"rowwise": get("mxfp8_e5m2")},
        {"columnwise": None},
        {"columnwise_source": "rowwise_dequantized"},
        {"history": History()},
    ):
        assert dataclasses.replace(base, **change) != base
    assert QuantizerHandle(base, rowwise=False) == QuantizerHandle(base) and len({base, base}) == 1
    assert MXFP8Quantizer() == QuantizerHandle(pair("mxfp8_e4m3")) != NVFP4Quantizer()
    one, other = delayed(), delayed()
    unbound = QuantizerHandle(one.value)
    assert one != unbound and unbound != one
    assert one == one and one != other and one != one.copy() and len({one, other}) == 2

    class Subclass(Quantizer):
        pass

    assert Subclass(get("mxfp8_e4m3"), get("nvfp4")) != base
    with pytest.raises(dataclasses.FrozenInstanceError):
        base.rowwise = None
    assert base.with_usage(rowwise=False) == Quantizer(None, get("nvfp4")) and base.rowwise is not None


@pytest.mark.parametrize("name", formats.names())
def test_a_rebuilt_quantizer_behaves_the_same(name) -> None:
    """core 21, 23: by pickle and deepcopy, sign masks and all; formats come back as the registered object."""
    q, x = pair(name), torch.randn(16, 32)
    ctx = QuantizeContext(seed=torch.tensor([3]))
    for result in (pickle.loads(pickle.dumps(q)), copy.deepcopy(q)):
        assert result == q and hash(result) == hash(q) and result.rowwise is q.rowwise
        assert same(result.quantize(x, ctx=ctx), q.quantize(x, ctx=ctx))


@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_handles_pickle(make) -> None:
    """core 21, 23."""
    handle, x = make(), torch.randn(32, 64)
    handle.set_usage(rowwise=False)
    result = pickle.loads(pickle.dumps(handle))
    assert result.get_usages() == handle.get_usages() and result.value == handle.value and same(result(x), handle(x))


def test_nothing_live_stays_in_a_tensor_or_its_pickle() -> None:
    """core 22, 23; hybrid 18: seed and slots are arguments, and a pickle names none of them."""
    slot = Slot()
    ctx = QuantizeContext(slots=(slot, None), seed=torch.tensor([1]))
    t = pair("fp8_e4m3_delayed", "nvfp4_sr").quantize(torch.randn(16, 16), ctx=ctx)
    assert t.context == LOCAL and {f.name for f in dataclasses.fields(t.quantizer)} == {
        "rowwise",
        "columnwise",
        "columnwise_source",
        "history",
    }
    t.context = ctx
    for result in (pickle.loads(pickle.dumps(t)), copy.deepcopy(t)):
        assert result.context == LOCAL


def test_history_is_checked() -> None:
    """core 17."""
    for options, text in (
        ({"margin": 0.5}, "margin is 0.5"),
        ({"amax_history_len": 0}, "at least 1"),
        ({"amax_compute_algo": "mean"}, "'mean' is unknown"),
    ):
        with pytest.raises(UserError, match=text):
            History(**options)


def test_names_of_formats_and_handles() -> None:
    """core 45."""
    assert "rowwise=mxfp8_e4m3" in repr(MXFP8Quantizer()) and "nvfp4_rht" in repr(NVFP4Quantizer(with_rht=True))
    assert set(QUANTIZERS) and "HybridQuantizer(" in repr(hybrid(MXFP8Quantizer(), NVFP4Quantizer()))


@pytest.mark.parametrize(("dtype", "element"), [(torch.float8_e4m3fn, "e4m3"), (torch.float8_e5m2, "e5m2")])
def test_dtypes_of_torch_name_the_element(dtype, element) -> None:
    for make in (Float8CurrentScalingQuantizer, Float8BlockQuantizer, MXFP8Quantizer):
        assert make(dtype) == make(element) == make(fp8_dtype=dtype)
    scale, amax = torch.ones(1), torch.zeros(1)
    assert Float8Quantizer(scale, amax, dtype).value == Float8Quantizer(scale, amax, element).value
    with pytest.raises(RecipeError, match=r"fp8_dtype torch\.int8 is unknown; allowed are 'e4m3', 'e5m2', torch"):
        MXFP8Quantizer(torch.int8)


def test_usages_are_attributes_too() -> None:
    handle = MXFP8Quantizer(columnwise=False)
    assert (handle.rowwise_usage, handle.columnwise_usage) == (True, False)
    handle.rowwise_usage, handle.columnwise_usage = False, True
    assert handle.get_usages() == {"rowwise": False, "columnwise": True}
    assert handle(torch.randn(32, 32)).get_usages() == {"rowwise": False, "columnwise": True}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NVFP4Quantizer(fp4_dtype="e2m1"), "NVFP4Quantizer has no fp4_dtype; NVFP4 has one element"),
        (lambda: Float8CurrentScalingQuantizer(device="cuda"), "has no device; results are on the device of what"),
        (lambda: MXFP8Quantizer(colwise=True), "MXFP8Quantizer has no colwise; its usages are rowwise and columnwise"),
    ],
)
def test_an_argument_that_a_quantizer_does_not_have_is_one_line(make, message) -> None:
    with pytest.raises(UserError, match=message):
        make()


@pytest.mark.parametrize(
    "scale,amax",
    [
        *((torch.tensor([bad]), torch.zeros(1)) for bad in (0.0, -1.0, float("nan"), float("inf"))),
        *((torch.ones(1), torch.tensor([bad])) for bad in (-1.0, float("nan"))),
        (torch.ones(2), torch.zeros(1)),
        (torch.ones(1), torch.zeros(2)),
        (1.0, torch.zeros(1)),
    ],
)
def test_a_delayed_handle_over_what_is_no_scale_or_amax_is_refused(scale, amax) -> None:
    with pytest.raises(UserError, match="Float8Quantizer takes") as error:
        Float8Quantizer(scale, amax)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["rowwise_usge", "columnwise", "internal", "amax_reduction_group"])
@pytest.mark.parametrize("make", LEAVES.values(), ids=LEAVES.keys())
def test_an_attribute_that_no_handle_has_cannot_be_set(make, name) -> None:
    handle = make()
    with pytest.raises(UserError, match=f"^{name} of {type(handle).__name__} cannot be set; ") as error:
        setattr(handle, name, True)
    assert "\n" not in str(error.value)
    handle.rowwise_usage = False
    assert handle.get_usages() == {"rowwise": False, "columnwise": True}


def test_the_scale_of_a_handle_is_written_in_place() -> None:
    """Another tensor would not reach its slot."""
    handle = delayed(2.0)
    with pytest.raises(UserError, match="scale of Float8Quantizer cannot be set; write into the tensor in place"):
        handle.scale = torch.tensor([4.0])
    handle.scale.fill_(4.0)
    assert handle(torch.ones(16, 16)).planes.rowwise.parts["scale"].item() == 0.25


def test_a_subclass_of_a_handle_has_attributes_of_its_own() -> None:
    class Subclass(MXFP8Quantizer):
        def __init__(self) -> None:
            super().__init__()
            self.note = "mine"

    assert Subclass().note == "mine"

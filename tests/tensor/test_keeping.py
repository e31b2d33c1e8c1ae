"""Pickle, copy, saving for backward, clear and the flatten protocol: bytes survive, and nothing executes."""

import copy
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from tensor_cases import QUANTIZERS, addresses, every_quantizer, every_usage, get, same, same_parts, snapshot
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from duotone.errors import MissingPlaneError, RecipeError, UserError
from duotone.tensor import (
    BOTH,
    LOCAL,
    Planes,
    QuantizeContext,
    QuantizedTensor,
    Quantizer,
    Usage,
    clear,
    prepare_for_saving,
    restore_from_saved,
)
from duotone.tensor.history import History
from duotone.tensor.pickling import rebuild


@dataclass(frozen=True)
class Clipping(Quantizer):
    """A quantizer of a user's own."""

    limit: float = 1.0

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        return super().encode(x.clamp(-self.limit, self.limit), usage, ctx)


def saved(value: object) -> object:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


WAYS = {"pickle": lambda t: pickle.loads(pickle.dumps(t)), "deepcopy": copy.deepcopy, "save": saved}


@every_quantizer
@every_usage
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_round_trip_keeps_bytes_formats_and_quantizer(q, usage, way) -> None:
    """core 40; hybrid 36: bytes, formats, quantizer, shape, dtype; then it is written and read as ever."""
    x = torch.randn(2, 16, 64).bfloat16()
    t = q.quantize(x, usage=usage)
    result = way(t)
    assert same(result, t) and result.quantizer == q and not set(addresses(result)) & set(addresses(t))
    assert result.planes.aliased == t.planes.aliased and not result.requires_grad
    y = torch.randn(2, 16, 64).bfloat16()
    assert same(result.quantize_(y), q.quantize(y.clone(), usage=usage)) and same(t, q.quantize(x, usage=usage))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("shape", [(), (0, 64), (48, 0), (17, 33)], ids=str)
def test_round_trips_of_odd_shapes(shape, way) -> None:
    """core 4, 40."""
    for name in ("identity", "fp8", "mxfp8", "nvfp4_rht", "nvfp4_16x16"):
        t = QUANTIZERS[name].quantize(torch.randn(shape))
        assert same(way(t), t)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_round_trips_of_parameters_views_and_pieces(way) -> None:
    """core 40."""
    for q in (QUANTIZERS["fp8"], QUANTIZERS["mxfp8"], QUANTIZERS["identity"]):
        for grad in (True, False):
            w = torch.nn.Parameter(q.quantize(torch.randn(64, 64)), requires_grad=grad)
            result = way(w)
            assert isinstance(result, torch.nn.Parameter) and result.requires_grad == grad
            assert same(result.detach(), w.detach())
        t = q.quantize(torch.randn(64, 64))
        for part in (t.view(-1), t[32:], t[:, 32:], t.view(2, 32, 64)[1]):
            assert same(way(part), part)
        shell = q.quantize(torch.randn(2, 2), usage=Usage(False, False))
        assert way(shell).shape == (2, 2) and way(shell).planes == (None, None)


@pytest.mark.parametrize("is_parameter", [False, True])
def test_deepcopy_takes_along_what_torch_would(is_parameter: bool) -> None:
    """hybrid 36: attributes, and one copy of a tensor that is held twice. Parameters leave their gradient behind."""
    w = QUANTIZERS["mxfp8"].quantize(torch.randn(32, 64)).requires_grad_()
    w, like = (torch.nn.Parameter(w), torch.nn.Parameter(torch.ones(2))) if is_parameter else (w, torch.ones(2))
    w.grad, w.mark, like.requires_grad_().grad = torch.randn(32, 64), ["tag"], torch.ones(2)
    a, b = copy.deepcopy([w, w])
    assert a is b and a.mark == ["tag"] and a.mark is not w.mark
    assert (a.grad is None) is (copy.deepcopy(like).grad is None) is is_parameter
    assert is_parameter or (torch.equal(a.grad, w.grad) and a.grad is not w.grad)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
@pytest.mark.parametrize("col", ["mxfp8_e4m3", "identity", "nvfp4_rht"])
def test_a_quantizer_of_ones_own_survives(way, col) -> None:
    """core 40; issue: a subclass of Quantizer loads under weights_only, with its fields."""
    q = Clipping(get("fp8_e4m3_tensor"), get(col), limit=0.5)
    result = way(q.quantize(torch.randn(32, 64)))
    assert type(result.quantizer) is Clipping and result.quantizer == q and result.quantizer.limit == 0.5
    result.copy_(torch.full((32, 64), 3.0))
    assert torch.allclose(result.dequantize(), torch.full((32, 64), 0.5), rtol=0.1)


def test_history_survives() -> None:
    """core 40."""
    q = Quantizer(get("fp8_e4m3_delayed"), get("fp8_e4m3_delayed"), history=History(margin=2, amax_history_len=4))
    assert saved(q.quantize(torch.randn(4, 4))).quantizer == q


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS.keys())
def test_a_high_precision_plane_that_overlaps_itself_survives(way) -> None:
    """It aliases what was quantized, such as an expanded tensor."""
    row = torch.arange(32.0)
    t = Quantizer().quantize(row.expand(4, 32))
    assert torch.equal(way(t).dequantize(), row.expand(4, 32))


def test_pickles_of_other_versions_and_of_unknown_formats() -> None:
    """issue, bad input: one clear line, whatever else the other version wrote."""
    for fields in ((), (None,) * 6, (1, 2, 3, 4, 5, 6, 7, 8)):
        with pytest.raises(UserError, match="pickle version 7; this release reads 1") as error:
            rebuild(7, *fields)
        assert "\n" not in str(error.value)
    plane = ("mxfp9", (2, 2), {"codes": torch.zeros(2, 2)})
    with pytest.raises(RecipeError, match="'mxfp9' is unknown"):
        rebuild(1, plane, None, (None, None, "original", None), (2, 2), torch.float32, None)


@pytest.mark.parametrize(
    "parts",
    [
        {"codes": torch.zeros(4, 32, dtype=torch.uint8)},
        {"codes": torch.zeros(4, 32, dtype=torch.uint8), "scale": torch.zeros(4, 2, dtype=torch.uint8)},
        {"codes": torch.zeros(4, 32, dtype=torch.int8), "scale": torch.zeros(4, 1, dtype=torch.uint8)},
        {"codes": torch.zeros(4, 31, dtype=torch.uint8), "scale": torch.zeros(4, 1, dtype=torch.uint8)},
    ],
)
def test_pickles_with_buffers_that_do_not_fit(parts) -> None:
    """issue, bad input."""
    with pytest.raises(UserError, match="not those of a"):
        rebuild(
            1, ("mxfp8_e4m3", (4, 32), parts), None, ("mxfp8_e4m3",) * 2 + ("original", None), (4, 32), torch.half, None
        )


PLANE = ("mxfp8_e4m3", (4, 32), {"codes": torch.zeros(4, 32, dtype=torch.uint8),
                                 "scale": torch.zeros(4, 1, dtype=torch.uint8)})  # fmt: skip
TURNED = ("mxfp8_e4m3", (32, 4), {"codes": torch.zeros(32, 4, dtype=torch.uint8),
                                  "scale": torch.zeros(32, 1, dtype=torch.uint8)})  # fmt: skip
NAMES = ("mxfp8_e4m3", "mxfp8_e4m3", "original", None)
FORGED = {
    "larger shape": (PLANE, None, NAMES, (8, 32), torch.float32, None),
    "smaller shape": (PLANE, TURNED, NAMES, (), torch.float32, None),
    "other columns": (PLANE, PLANE, NAMES, (4, 32), torch.float32, None),
    "columns of more": (None, TURNED, NAMES, (4, 33), torch.float32, None),
    "derived of nothing": (None, "derived", NAMES, (4, 32), torch.float32, None),
    "derived of what has none": (PLANE, "derived", NAMES, (4, 32), torch.float32, None),
    "negative": (PLANE, None, NAMES, (-4, -32), torch.float32, None),
    "fractional": (PLANE, None, NAMES, (4.0, 32), torch.float32, None),
    "no shape": (PLANE, None, NAMES, 128, torch.float32, None),
    "dtype": (PLANE, None, NAMES, (4, 32), torch.int8, None),
    "no dtype": (PLANE, None, NAMES, (4, 32), "float32", None),
    "requires_grad": (PLANE, None, NAMES, (4, 32), torch.float32, "yes"),
    "three extents": ((PLANE[0], (4, 32, 1), PLANE[2]), None, NAMES, (4, 32), torch.float32, None),
    "buffers": ((PLANE[0], (4, 32), [1, 2]), None, NAMES, (4, 32), torch.float32, None),
    "a buffer": ((PLANE[0], (4, 32), {**PLANE[2], "scale": 1}), None, NAMES, (4, 32), torch.float32, None),
    "no plane": (7, None, NAMES, (4, 32), torch.float32, None),
    "integers": (("identity", (4, 32), {"codes": torch.ones(4, 32).int()}), None, NAMES, (4, 32), torch.half, None),
    "no codes": (("identity", (4, 32), {}), None, NAMES, (4, 32), torch.half, None),
    "sparse": (("identity", (2, 2), {"codes": torch.eye(2).to_sparse()}), None, NAMES, (2, 2), torch.half, None),
    "devices": ((PLANE[0], (4, 32), {**PLANE[2], "scale": PLANE[2]["scale"].to("meta")}), None, NAMES, (4, 32),
                torch.float32, None),
    "quantizer": (PLANE, None, ("mxfp8_e4m3", "mxfp8_e4m3"), (4, 32), torch.float32, None),
    "history": (PLANE, None, (*NAMES[:3], 3), (4, 32), torch.float32, None),
    "source": (PLANE, None, (*NAMES[:2], "elsewhere", None), (4, 32), torch.float32, None),
    "fields": (PLANE, None, NAMES, (4, 32)),
}  # fmt: skip


@pytest.mark.parametrize("fields", FORGED.values(), ids=FORGED.keys())
def test_pickles_whose_fields_do_not_fit_together(fields) -> None:
    """A forged file would have kernels read and write past the buffers."""
    with pytest.raises(UserError) as error:
        rebuild(1, *fields)
    assert "\n" not in str(error.value)
    good = rebuild(1, PLANE, TURNED, NAMES, [2, 2, 32], torch.float32, True)
    assert good.shape == (2, 2, 32) and good.requires_grad


@every_quantizer
@every_usage
def test_prepare_and_restore(q, usage) -> None:
    """core 41; hybrid 24, 25: rowwise before columnwise, leftovers come back, other tensors are untouched."""
    t = q.quantize(torch.randn(32, 64), usage=usage)
    saved, copied = snapshot(t), t.detach()
    names = [
        f"{side}_{p}"
        for side, plane in zip(("rowwise", "columnwise"), t.planes, strict=True)
        if plane
        for p in plane.parts
    ]
    expected = [getattr(t, name) for name in names]
    tensors = prepare_for_saving(t)
    assert all(a is b for a, b in zip(tensors, expected, strict=True))
    assert t.planes == (None, None) and t.shape == (32, 64) and "no planes" in repr(t)
    assert same_parts(snapshot(copied), saved)
    other = torch.ones(1)
    remaining = restore_from_saved(t, [*tensors, other])
    assert len(remaining) == 1 and remaining[0] is other and same_parts(snapshot(t), saved)
    assert t.planes.aliased == copied.planes.aliased


def test_prepare_and_restore_several() -> None:
    """core 41: one flat list, consumed in order."""
    tensors = [q.quantize(torch.randn(16, 32)) for q in QUANTIZERS.values()]
    before = [snapshot(t) for t in tensors]
    flat = [part for t in tensors for part in prepare_for_saving(t)]
    for t in tensors:
        flat = restore_from_saved(t, flat)
    assert flat == [] and all(same_parts(snapshot(t), b) for t, b in zip(tensors, before, strict=True))


def test_prepare_and_restore_out_of_turn() -> None:
    """core 41: an error, and nothing lost."""
    t = QUANTIZERS["mxfp8"].quantize(torch.randn(32, 64))
    before = snapshot(t)
    with pytest.raises(MissingPlaneError, match="prepare_for_saving first"):
        restore_from_saved(t, [])
    tensors = prepare_for_saving(t)
    with pytest.raises(MissingPlaneError, match="taken out already"):
        prepare_for_saving(t)
    with pytest.raises(UserError, match="needs its 4 buffers back; got 3"):
        restore_from_saved(t, tensors[:3])
    assert restore_from_saved(t, tensors) == [] and same_parts(snapshot(t), before)


@every_quantizer
@every_usage
def test_clear_frees_memory_and_keeps_the_shape(q, usage) -> None:
    """core 42; hybrid 26: memory goes at once though others hold the buffers; again is no error; the shape stays."""
    t = q.quantize(torch.randn(32, 64), usage=usage)
    copy = t.detach()
    clear(t)
    clear(t)
    assert t.shape == (32, 64) and not any(t.get_usages().values()) and "no planes" in repr(t)
    for plane in copy.planes:
        for part in plane.parts.values() if plane else ():
            assert part.numel() == part.untyped_storage().nbytes() == 0


@every_quantizer
@every_usage
def test_flatten_and_unflatten(q, usage) -> None:
    """core 11, 44: names in the declared order, without the views; eager and fake."""
    t = q.quantize(torch.randn(2, 16, 64), usage=usage)
    assert is_traceable_wrapper_subclass(t)
    names, context = t.__tensor_flatten__()
    declared = [
        f"{side}_{part}"
        for side, plane in zip(("rowwise", "columnwise"), t.planes, strict=True)
        if plane is not None and not (side == "columnwise" and t.planes.aliased)
        for part in plane.format.parts(*plane.shape)
    ]
    assert names == declared
    result = QuantizedTensor.__tensor_unflatten__({n: getattr(t, n) for n in names}, context, t.shape, t.stride())
    assert same(result, t) and result.quantizer == q and result.planes.aliased == t.planes.aliased
    mode = FakeTensorMode()
    fake = mode.from_tensor(t)
    assert isinstance(fake, QuantizedTensor) and fake.shape == t.shape and fake.__tensor_flatten__()[0] == names
    with mode:
        assert fake.dequantize().shape == t.shape
        assert fake.clone().__tensor_flatten__()[0] == names


def test_flattening_keeps_what_a_piece_is() -> None:
    """core 44."""
    t = QUANTIZERS["fp8"].quantize(torch.randn(64, 64))[:32]
    names, context = t.__tensor_flatten__()
    result = QuantizedTensor.__tensor_unflatten__({n: getattr(t, n) for n in names}, context, t.shape, t.stride())
    with pytest.raises(MissingPlaneError, match="shares its scale"):
        result.zero_()


def test_repr_never_raises() -> None:
    """core 45."""
    t = QUANTIZERS["nvfp4|mxfp8"].quantize(torch.randn(4, 4))
    assert repr(t) == "QuantizedTensor(shape=(4, 4), dtype=torch.float32, rowwise=nvfp4, columnwise=mxfp8_e4m3)"
    t.update_usage(rowwise=False, columnwise=False)
    assert repr(t) == "QuantizedTensor(shape=(4, 4), dtype=torch.float32, no planes)"
    assert repr(torch.nn.Parameter(QUANTIZERS["mxfp8"].make_empty((0, 4)))).startswith("QuantizedTensor(")


def test_a_pickled_buffer_whose_elements_share_memory_is_refused() -> None:
    """A write into it would meet itself."""
    t = QUANTIZERS["fp8"].quantize(torch.randn(32, 64))
    assert t.planes.rowwise is not None
    t.planes.rowwise.parts["codes"] = torch.zeros(1, dtype=torch.uint8).expand(32, 64)
    with pytest.raises(UserError, match="save it again"):
        pickle.loads(pickle.dumps(t))

"""Views, pieces and copies: what shares buffers, what stays quantized, and exact values everywhere."""

import copy

import pytest
import torch
import torch.nn.functional as F
from tensor_cases import (
    BOTH,
    COLUMN,
    QUANTIZERS,
    ROW,
    addresses,
    every_quantizer,
    every_usage,
    pair,
    planes_of,
    same,
    same_bits,
    same_parts,
    snapshot,
)

import duotone
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor import QuantizedTensor

MX, FP8, HYBRID = QUANTIZERS["mxfp8"], QUANTIZERS["fp8"], QUANTIZERS["nvfp4|mxfp8"]
PLAIN_OPS = {
    "t": lambda t: t.t(),
    "transpose": lambda t: t.transpose(0, 1),
    "permute": lambda t: t.permute(1, 0),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.squeeze(),
    "step": lambda t: t[::2],
    "cut": lambda t: t[3:40, 3:40],
    "cut end": lambda t: t[:40, :40],
    "select": lambda t: t[5, 3:9],
    "column": lambda t: t[:, 7],
    "mask": lambda t: t[torch.arange(64) > 8],
    "diagonal": lambda t: t.diagonal(),
    "expand": lambda t: t.expand(2, 64, 64),
    "strided": lambda t: t.as_strided((32, 64), (64, 1), 16),
    "steps": lambda t: t.as_strided((32, 32), (128, 2), 1),
    "view dtype": lambda t: t.view(torch.int32),
    "half": lambda t: t.half(),
    "double": lambda t: t.to(torch.float64),
    "zeros": lambda t: torch.zeros_like(t),
    "ones": lambda t: t.new_ones(3),
    "cat": lambda t: torch.cat([t, t]),
    "mm": lambda t: t @ t.t(),
    "sum": lambda t: t.sum(),
    "exp": lambda t: t.exp(),
    "where": lambda t: torch.where(t > 0, t, 0.0),
}


@pytest.mark.parametrize("op", PLAIN_OPS.values(), ids=PLAIN_OPS.keys())
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4|mxfp8", "128x128", "nvfp4_rht"])
@every_usage
def test_what_gives_a_plain_tensor(op, name, usage) -> None:
    """core 32, 33; hybrid 30: the values of the operation on the dequantized tensor, bit for bit."""
    t = QUANTIZERS[name].quantize(torch.randn(64, 64), usage=usage)
    result = op(t)
    assert not isinstance(result, QuantizedTensor) and same_bits(result.clone(), op(t.dequantize()))


@every_quantizer
@every_usage
def test_views_share_the_planes(q, usage) -> None:
    """core 32; hybrid 27: any shape; the planes are the same objects, and writes go both ways."""
    for shape in ((32, 64), (-1,), (2, -1, 64), (32, 32, 2), (1, 2048)):
        t = q.quantize(torch.randn(2, 16, 64), usage=usage)
        for v in (t.view(shape), t.reshape(shape), t.view(shape).view(2, 16, 64).reshape(shape)):
            assert isinstance(v, QuantizedTensor) and all(a is b for a, b in zip(v.planes, t.planes, strict=True))
            assert same_bits(v.dequantize(), t.dequantize().view(shape)) and v.shape == t.dequantize().view(shape).shape
        x = torch.randn(2, 16, 64)
        t.view(shape).copy_(x.view(shape))
        assert same(t, q.quantize(x, usage=usage))
        assert same_bits(t.view(shape).clone().dequantize(), t.dequantize().view(shape))
        with pytest.raises(RuntimeError):
            t.view(7, 9)


@every_quantizer
@every_usage
def test_pieces_on_block_boundaries(q, usage) -> None:
    """core 33; hybrid 28: pieces stay quantized under logical shapes, columnwise-only ones too, and share memory."""
    x = torch.randn(256, 256)
    t = q.quantize(x, usage=usage)
    values = t.dequantize()
    for cut in (
        lambda t: t[128:],
        lambda t: t[:, :128],
        lambda t: t.split(128)[1],
        lambda t: t.split([128, 128], 1)[1],
        lambda t: t.chunk(2)[0],
        lambda t: t.narrow(1, 128, 128),
        lambda t: t.as_strided((128, 256), (256, 1), 128 * 256),
        lambda t: t.view(2, 128, 256)[1],
        lambda t: t.view(2, 128, 256).select(0, 0),
        lambda t: t.hsplit(2)[1],
        lambda t: t[128:][:, 128:],
    ):
        piece = cut(t)
        assert isinstance(piece, QuantizedTensor) and piece.get_usages() == usage._asdict()
        assert same_bits(piece.dequantize(), cut(values).contiguous()) and piece.is_contiguous()
        assert same_bits(piece.clone().dequantize(), piece.dequantize()) and piece.matrix_shape == piece.shape


@every_quantizer
@every_usage
def test_a_piece_writes_through_or_not_at_all(q, usage) -> None:
    """core 33, 25: blocks are written through to the whole; a shared scale refuses, before any byte."""
    x, y = torch.randn(256, 256), 50 * torch.randn(128, 256)
    t = q.quantize(x.clone(), usage=usage)
    before, piece = snapshot(t), t[128:]
    if any(p is not None and (p.spans(0) or p.spans(1)) for p in t.planes):
        for write in (
            lambda: piece.copy_(y),
            lambda: piece.copy_(q.quantize(y, usage=usage)),
            lambda: piece.zero_(),
            lambda: torch._foreach_add_([piece], 1.0),
            lambda: torch.add(y, 1, out=piece),
            lambda: piece.quantize_(y, noop_flag=torch.zeros(1)),
        ):
            with pytest.raises(MissingPlaneError, match="shares its scale"):
                write()
        assert same_parts(snapshot(t), before)
        assert same(piece.clone().copy_(y), q.quantize(y, usage=usage))
        assert same(copy.deepcopy(piece).copy_(y), q.quantize(y, usage=usage))
    else:
        piece.copy_(y)
        assert same_parts(snapshot(t), planes_of(q, torch.cat([x[:128], y]), usage))


def test_data_of_a_piece_stays_a_piece() -> None:
    """core 38."""
    t, other = FP8.quantize(torch.randn(64, 64)), FP8.quantize(torch.randn(32, 64))
    before = snapshot(t)
    other.data = t[:32]
    with pytest.raises(MissingPlaneError, match="shares its scale"):
        other.zero_()
    assert same_parts(snapshot(t), before)
    other.data = torch.ones(32, 64)
    assert not other.zero_().dequantize().any() and same_parts(snapshot(t), before)


@pytest.mark.parametrize("name", ["nvfp4_rht", "nvfp4", "mxfp8", "nvfp4_16x16", "1x128"])
@pytest.mark.parametrize("shape", [(40, 40), (33, 49)], ids=str)
def test_the_last_piece_may_be_ragged(name, shape) -> None:
    """core 33: also where the stored length is padded or two codes share a byte."""
    q = pair(QUANTIZERS[name].columnwise.name)
    t = q.quantize(torch.randn(shape))
    step = max(q.rowwise.alignment[1], q.rowwise.alignment[0])
    for piece, values in ((t[step:], t.dequantize()[step:]), (t[:, step:], t.dequantize()[:, step:])):
        assert same_bits(piece.dequantize(), values.contiguous())
        assert isinstance(piece, QuantizedTensor) == (step < min(shape)) or piece.numel() == 0


@pytest.mark.parametrize(
    ("shape", "size", "step"), [((64, 64), 16, 32), ((8, 16, 64), 1, 2), ((64, 64), [40, 24], 32)], ids=str
)
def test_a_split_that_cuts_blocks_says_where_to_split(shape, size, step) -> None:
    """hybrid 29."""
    t = MX.quantize(torch.randn(shape))
    with pytest.raises(MissingPlaneError, match=f"cut the blocks of mxfp8_e4m3.*multiples of {step} rows"):
        t.split(size)
    assert all(isinstance(p, QuantizedTensor) for p in t.split(step))
    for pieces in (t.split(20, -1), t.split(1, -1)):
        assert not any(isinstance(p, QuantizedTensor) for p in pieces)


def test_bad_indices_raise_as_torch_does() -> None:
    """core 33."""
    t, x = MX.quantize(torch.randn(64, 64)), torch.randn(64, 64)
    for call in (
        lambda t: t.split(-1),
        lambda t: t.split([1, 2]),
        lambda t: t.split(0),
        lambda t: t[70],
        lambda t: t.select(2, 0),
        lambda t: t.narrow(0, 60, 9),
        lambda t: t.chunk(0),
    ):
        with pytest.raises((RuntimeError, IndexError)) as expected:
            call(x)
        with pytest.raises(expected.type):
            call(t)


@every_usage
def test_slices_that_take_all(usage) -> None:
    """hybrid 30: an exact no-op keeps type and planes in every rank; anything else is looked at."""
    for shape in ((40, 72), (72,), (2, 20, 72)):
        t = HYBRID.quantize(torch.randn(shape), usage=usage)
        for result in (
            t[:],
            t[0 : shape[0]],
            t[..., :100],
            t.as_strided(t.shape, t.stride()),
            t.narrow(0, 0, shape[0]),
        ):
            assert isinstance(result, QuantizedTensor) and addresses(result) == addresses(t) and not result.is_piece
    assert not isinstance(t[:, ::2], QuantizedTensor)
    for offset in (1440, 720):
        args = (1, 20, 72), (1440, 72, 1), offset
        assert same_bits(t.as_strided(*args) * 1, t.dequantize().as_strided(*args))


@every_quantizer
@every_usage
def test_detach_shares_and_clone_does_not(q, usage) -> None:
    """core 30, 31; hybrid 37: all buffers, scales included; Parameter keeps the class."""
    x = torch.randn(32, 64, requires_grad=True)
    t = q.quantize(x, usage=usage)
    detached = t.detach()
    assert type(detached) is QuantizedTensor and not detached.requires_grad and addresses(detached) == addresses(t)
    parameter = torch.nn.Parameter(detached)
    assert isinstance(parameter, QuantizedTensor) and parameter.requires_grad and addresses(parameter) == addresses(t)
    clone = t.clone()
    assert clone.requires_grad and same(clone, t) and not set(addresses(clone)) & set(addresses(t))
    clone.sum().backward()
    assert torch.equal(x.grad, torch.ones(32, 64))
    for one, other in ((t.detach(), clone.detach()), (clone.detach(), t.detach())):
        for plane in one.planes:
            for part in plane.parts.values() if plane else ():
                saved = snapshot(other)
                poison = part.clone()
                part.add_(1)
                assert same_parts(snapshot(other), saved)
                part.copy_(poison)


def test_a_subclass_survives() -> None:
    """core 6, 30."""

    class Subclass(QuantizedTensor):
        pass

    t = MX.quantize(torch.randn(64, 64))
    t.__class__ = Subclass
    for result in (
        t.detach(),
        t.clone(),
        t.view(-1),
        t[:32],
        copy.deepcopy(t),
        torch.empty_like(t),
        torch.nn.Parameter(t),
    ):
        assert type(result) is Subclass


@every_quantizer
@every_usage
def test_a_move_keeps_bytes_and_another_dtype_gives_a_plain_tensor(q, usage) -> None:
    """core 37; hybrid 35: a move keeps class, formats and bytes; another dtype gives a plain tensor."""
    t = q.quantize(torch.randn(32, 64).bfloat16(), usage=usage)
    assert t.cpu() is t and t.to(torch.bfloat16) is t and t.contiguous() is t
    copied = t.to("cpu", copy=True)
    assert same(copied, t) and not set(addresses(copied)) & set(addresses(t))
    assert copied.planes.aliased == t.planes.aliased
    on_meta = t.to("meta")
    assert isinstance(on_meta, QuantizedTensor) and on_meta.device.type == "meta"
    assert on_meta.__tensor_flatten__()[0] == t.__tensor_flatten__()[0]
    for result in (t.float(), t.to(torch.float32), t.half(), t.type(torch.float64)):  # never by way of bf16
        values = t.dequantize(torch.float16 if result.dtype is torch.float16 else torch.float32)
        assert type(result) is torch.Tensor and same_bits(result, values.to(result.dtype))
    assert t.is_pinned() is False and t.share_memory_() is t
    expanded = t.expand_as(t)
    assert isinstance(expanded, QuantizedTensor) and addresses(expanded) == addresses(t)


@every_quantizer
@every_usage
def test_tensors_like_it(q, usage) -> None:
    """core 39; hybrid 31: usages of the tensor, not of its quantizer; zeros in every plane; no random numbers used."""
    t = q.quantize(torch.randn(32, 64), usage=usage)
    before, state = snapshot(t), torch.get_rng_state()
    zeros = t.new_zeros((2, 8, 32), dtype=torch.bfloat16)
    assert (zeros.shape, zeros.dtype, zeros.quantizer) == ((2, 8, 32), torch.bfloat16, t.quantizer)
    for plane in zeros.planes:
        assert plane is None or not plane.dequantize(torch.float32).any()
    for result in (zeros, t.new_empty(17, 33), torch.empty_like(t), t.new_empty((0, 64)), t.new_zeros(5)):
        assert isinstance(result, QuantizedTensor) and result.get_usages() == usage._asdict()
        x = torch.randn(result.shape).to(result.dtype)
        with torch.random.fork_rng():
            assert same(result.copy_(x), q.quantize(x.clone(), usage=usage))
    torch.set_rng_state(state)
    t.new_zeros(8, 8)
    assert torch.equal(torch.get_rng_state(), state)
    for dtype in (torch.float64, torch.int64):
        result = t.new_zeros((4, 4), dtype=dtype)
        assert type(result) is torch.Tensor and result.dtype == dtype and not result.any()
    with pytest.raises(RuntimeError):
        t.new_empty((-1, 4))
    assert same_parts(snapshot(t), before) and t.quantizer == q


@pytest.mark.parametrize("op", [
    lambda x: F.dropout(x, 0.3),
    lambda x: F.alpha_dropout(x, 0.3, training=True),
    lambda x: F.dropout2d(x.view(4, 8, 8, 8), 0.3),
    lambda x: F.hinge_embedding_loss(x, torch.ones(32, 64).neg(), margin=0.7, reduction="none"),
    lambda x: F.gumbel_softmax(x),
    lambda x: torch.empty_like(x).fill_(1 / 3).mul_(0.7),
    lambda x: torch.mul(x, 0.7, out=x.new_empty(x.shape)),
    lambda x: F.pad(x, (2, 3), mode="circular"),
    lambda x: F.pad(x.view(4, 8, 64), (32, 32, 2, 1), mode="circular"),
    lambda x: F.pad(x, (1, -1), mode="circular"),
    lambda x: (y := torch.empty_like(x), y.t().copy_(x.t()))[0],
], ids="dropout alpha_dropout dropout2d hinge gumbel fill out circular circular3d shifted turned".split())  # fmt: skip
@pytest.mark.parametrize("name", ["fp8", "mxfp8", "nvfp4|mxfp8", "fp8_delayed"])
def test_what_torch_computes_in_a_tensor_like_it_is_not_rounded(op, name) -> None:
    """torch's own functions write masks, constants such as 1 / (1 - p) and parts into `empty_like` of their input."""
    t = QUANTIZERS[name].quantize(torch.randn(32, 64))
    torch.manual_seed(0)
    expected = op(t.dequantize())
    torch.manual_seed(0)
    result = op(t)
    assert torch.equal(result.dequantize() if isinstance(result, QuantizedTensor) else result, expected)


def test_a_tensor_like_it_stays_quantized_if_another_one_shares_its_planes() -> None:
    like = torch.empty_like(MX.quantize(torch.randn(32, 64)))
    other = like.detach()
    like.fill_(1 / 3)
    assert same(like, other) and torch.equal(other.dequantize(), torch.full((32, 64), 0.34375))  # E4M3 and 2^-9


@pytest.mark.parametrize("read", [
    torch.from_dlpack, lambda t: t.apply_(abs), lambda t: t.map_(t, max), lambda t: t.data_ptr(),
], ids=["dlpack", "apply_", "map_", "data_ptr"])  # fmt: skip
def test_what_reads_memory_at_an_address_is_refused(read) -> None:
    """There is none: torch would end the process, or give a tensor at address 0."""
    with pytest.raises(UserError, match="has no address of values"):
        read(MX.quantize(torch.randn(32, 64)))


def test_a_view_has_tensors_like_it() -> None:
    """core 39: empty_like of a view copies byte for byte."""
    t = MX.quantize(torch.randn(32, 64)).view(-1)
    assert same(torch.empty_like(t).copy_(t), t)


def test_writing_a_view_of_a_hybrid_never_sets_its_planes_apart() -> None:
    """core 33: an Identity plane is not written without the plane that encodes the same values."""
    q = pair("identity", "mxfp8_e4m3")
    for usage in (BOTH, ROW):
        for view in (lambda t: t[::2], lambda t: t[3, 4:], lambda t: t.as_strided((4,), (1,), 3), lambda t: t.t()):
            x = torch.randn(32, 64)
            t = q.quantize(x, usage=usage)
            view(t).fill_(3.0)
            view(x).fill_(3.0)
            assert same(t, q.quantize(x, usage=usage))


@pytest.mark.parametrize("view", [
    lambda t: t[:, 2:3], lambda t: t[:, 2:6:2], lambda t: t.transpose(0, 1), lambda t: t[:, 3], lambda t: t[..., None],
    lambda t: t.expand(1, 4, 8, 9)[0, 1],
], ids=["slice", "steps", "transpose", "select", "unsqueeze", "expand"])  # fmt: skip
def test_views_of_a_piece_of_columns_of_an_identity_tensor_write_it(view) -> None:
    x = torch.randn(4, 8, 12)
    t = QUANTIZERS["identity"].quantize(x.clone())
    for each in (t, x):
        view(each[..., 1:10]).mul_(3.0)
    assert torch.equal(t.dequantize(), x)


def test_attributes_that_torch_reads() -> None:
    """core 29: what has no host memory says so."""
    t = MX.quantize(torch.randn(32, 64))
    for call in (t.numpy, t.tolist):
        with pytest.raises(RuntimeError, match="not supported for tensor subclasses"):
            call()
    assert MX.quantize(torch.full((1, 1), 2.0)).item() == 2.0 and bool(MX.quantize(torch.ones(1)))
    with pytest.raises(UserError, match="cannot write shape"):
        t.resize_(2, 2)
    assert COLUMN.columnwise


def test_unbind_gives_the_views_that_select_gives() -> None:
    t = MX.quantize(torch.randn(3, 64, 32))
    for i, member in enumerate(t.unbind(0)):
        assert isinstance(member, QuantizedTensor)
        for plane, other in zip(member.planes, t[i].planes, strict=True):
            for name, part in plane.parts.items():
                assert part.data_ptr() == other.parts[name].data_ptr() and torch.equal(part, other.parts[name])


INFERENCE_VIEWS = {
    "detach": lambda t: t.detach(),
    "data": lambda t: t.data,
    "view": lambda t: t.view(-1),
    "alias": lambda t: torch.ops.aten.alias(t),
    "slice": lambda t: t[:32],
    "slice that cuts": lambda t: t[:5],
    "select": lambda t: t[3],
    "narrow": lambda t: t.narrow(0, 32, 32),
    "chunk": lambda t: t.chunk(2)[1],
    "split": lambda t: t.split(32)[0],
    "unbind": lambda t: t.unbind(0)[2],
    "t": lambda t: t.t(),
    "mT": lambda t: t.mT,
    "permute": lambda t: t.permute(1, 0),
    "expand": lambda t: t.expand(64, 64),
    "expand wider": lambda t: t.expand(2, 64, 64),
    "as_strided": lambda t: t.as_strided((64, 64), (64, 1)),
    "unsqueeze": lambda t: t.unsqueeze(0),
    "squeeze": lambda t: t.squeeze(),
    "diagonal": lambda t: t.diagonal(),
    "flatten": lambda t: t.flatten(),
    "unflatten": lambda t: t.unflatten(0, (2, 32)),
    "index": lambda t: t[torch.tensor([1, 2])],
    "none": lambda t: t[:, None],
}


@pytest.mark.parametrize("view", INFERENCE_VIEWS.values(), ids=INFERENCE_VIEWS.keys())
@pytest.mark.parametrize("name", ["mxfp8", "fp8", "identity", "mxfp8|identity", "nvfp4"])
def test_views_in_inference_mode_are_those_outside_of_it(name, view) -> None:
    """Of parameters and of tensors from inside; a parameter can be trained and its views written after."""
    q, x = QUANTIZERS[name], torch.randn(64, 64, generator=torch.Generator().manual_seed(1))
    outside = view(q.quantize(x.clone()))
    for parameter in (True, False):
        w = torch.nn.Parameter(q.quantize(x.clone()))
        with torch.inference_mode():
            result = view(w if parameter else q.quantize(x.clone()))
            values = result.dequantize().clone() if isinstance(result, QuantizedTensor) else result.clone()
            plain = view(torch.nn.Parameter(x) if parameter else x.clone())
        expected = outside.dequantize() if isinstance(outside, QuantizedTensor) else outside
        assert type(result) is type(outside) and same_bits(values, expected)
        assert result.is_inference() == plain.is_inference()
    with torch.no_grad():
        w.mul_(2)
    (w * w).sum().backward()
    assert torch.equal(w.grad, 2 * w.dequantize().detach())


def test_a_view_from_inference_mode_writes_through_and_counts_as_a_write() -> None:
    w = torch.nn.Parameter(QUANTIZERS["mxfp8"].quantize(torch.randn(64, 64)))
    for view in (lambda t: t.detach(), lambda t: t.view(-1), lambda t: t.chunk(2)[0]):
        with torch.inference_mode():
            result = view(w)
        version = w._version
        with torch.no_grad():
            result.fill_(3.0)
        assert w._version > version and (w.dequantize()[:32] == 3).all()


def test_a_model_is_saved_in_inference_mode_and_trained_after() -> None:
    model = duotone.convert(torch.nn.Sequential(torch.nn.Linear(64, 64)), duotone.recipes.load("mxfp8"), rules=())
    duotone.convert_parameters(model, duotone.recipes.load("mxfp8"))
    x = torch.randn(4, 64)
    with torch.inference_mode():
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        y = model(x)
        model.load_state_dict(model.state_dict())
        copied = copy.deepcopy(saved["0.weight"])
    assert same(copied, model[0].weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x).sum().backward()
    optimizer.step()
    assert not torch.equal(model(x), y)
    model.load_state_dict(saved)
    assert torch.equal(model(x), y)

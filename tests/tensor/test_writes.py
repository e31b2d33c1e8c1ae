"""In-place arithmetic, copy_, .data, quantize_, update_quantizer: right bytes after, the same bytes after an error."""

import pytest
import torch
from tensor_cases import (
    BOTH,
    COLUMN,
    QUANTIZERS,
    ROW,
    addresses,
    every_quantizer,
    every_usage,
    pair,
    parts_of,
    planes_of,
    same,
    same_bits,
    same_parts,
    snapshot,
)
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import duotone
from duotone import formats
from duotone.comm import ShardContext
from duotone.compat.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor import QuantizeContext, QuantizedTensor, Quantizer, in_place
from duotone.tensor.graph_casts import encoded
from duotone.tensor.plane_tensor import plain

MX, FP8, HYBRID = QUANTIZERS["mxfp8"], QUANTIZERS["fp8"], QUANTIZERS["nvfp4|mxfp8"]
X, Y = torch.linspace(-3, 3, 2048).view(32, 64), torch.linspace(5, -5, 2048).view(32, 64).contiguous()
IN_PLACE = {
    "add_": lambda t: t.add_(Y, alpha=0.5),
    "mul_": lambda t: t.mul_(3),
    "addcdiv_": lambda t: t.addcdiv_(Y, Y + 9, value=-0.1),
    "lerp_": lambda t: t.lerp_(Y, 0.25),
    "zero_": lambda t: t.zero_(),
    "fill_": lambda t: t.fill_(2.5),
    "clamp_": lambda t: t.clamp_(-1, 1),
    "masked_fill_": lambda t: t.masked_fill_(Y > 0, 1.0),
    "index_add_": lambda t: t.index_add_(0, torch.tensor([3]), Y[:1]),
    "add self": lambda t: t.add_(t),
    "uniform_": lambda t: t.uniform_(generator=torch.Generator().manual_seed(1)),
    "out=": lambda t: torch.add(X, Y, out=t),
    "out= self": lambda t: torch.mul(t, Y, out=t),
    "out= last": lambda t: torch.clamp(Y, max=2.0, out=t),
    "copy_": lambda t: t.copy_(Y),
    "copy_ row": lambda t: t.copy_(Y[:1]),
    "copy_ number": lambda t: t.copy_(torch.tensor(7.0)),
    "copy_ double": lambda t: t.copy_(Y.double()),
    "set item": lambda t: t.__setitem__(3, 0.0),
    "set column": lambda t: t.__setitem__((slice(None), 5), Y[:, 5]),
    "set mask": lambda t: t.__setitem__(Y > 1, -1.0),
    "set step": lambda t: t.__setitem__(slice(0, None, 2), Y[::2]),
    "init": lambda t: torch.nn.init.constant_(t, 0.125),
    "foreach": lambda t: torch._foreach_add_([t], [Y], alpha=2.0),
    "foreach_": lambda t: torch._foreach_addcmul_([t], [Y], [X], 0.5),
    "foreach copy": lambda t: torch._foreach_copy_([t], [Y]),
}


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize("op", IN_PLACE.values(), ids=IN_PLACE.keys())
@pytest.mark.parametrize("name", ["identity", "fp8", "mxfp8", "128x128", "nvfp4_rht", "nvfp4|mxfp8", "mxfp8|identity"])
def test_an_op_in_place_requantizes_at_the_same_addresses(op, name) -> None:
    """core 34: dequantize, compute, requantize; the same object, the same addresses, one new version."""
    q = QUANTIZERS[name]
    for usage in (BOTH, COLUMN):
        t = q.quantize(X.clone(), usage=usage)
        expected, at, version = t.dequantize().clone(), addresses(t), t._version
        returned = op(t)
        op(expected)
        assert returned is None or returned is t or returned[0] is t
        assert same(t, q.quantize(expected, usage=usage)) and addresses(t) == at and t._version > version


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("index", [torch.tensor([1, 5]), Y[:, 0] > 0], ids=["numbers", "mask"])
def test_rows_picked_by_a_tensor_are_written_in_the_dtype_of_the_weight(
    index: torch.Tensor, dtype: torch.dtype
) -> None:
    t = QUANTIZERS["mxfp8"].quantize(X.to(dtype))
    expected = t.dequantize(torch.float32).clone()
    t[index] = Y[index].to(dtype)
    expected[index] = Y[index].to(dtype).float()
    assert torch.equal(t.dequantize(), QUANTIZERS["mxfp8"].quantize(expected.to(dtype)).dequantize())


def test_in_place_on_plain_tensors_with_quantized_operands() -> None:
    """core 34, 35."""
    t = MX.quantize(X)
    assert torch.equal(Y.clone().add_(t), Y + t.dequantize())
    result = torch.empty(32, 64)
    assert torch.add(t, 1, out=result) is result and torch.equal(result, t.dequantize() + 1)
    assert all(type(p) is torch.Tensor for p in torch._foreach_add([t, t], 1.0))


def test_an_op_with_several_outputs_writes_each_by_name() -> None:
    """core 34: each argument that the schema writes, by name; what is returned is what was given."""
    values, indices = FP8.quantize(torch.zeros(64)), torch.zeros(64, dtype=torch.long)
    result = torch.ops.aten.max.dim_max(Y, 0, max=values, max_values=indices)
    assert result[0] is values and result[1] is indices
    assert same(values, FP8.quantize(Y.max(0).values)) and torch.equal(indices, Y.max(0).indices)
    with torch.inference_mode():
        t = MX.quantize(X)
        assert torch.ops.aten.mul_.Tensor(t, 2) is t
    a, b = MX.quantize(X), FP8.quantize(X)
    want = [MX.quantize(a.dequantize() * 2), FP8.quantize(b.dequantize() * 2)]
    torch._foreach_mul_([a, b], 2.0)
    assert same(a, want[0]) and same(b, want[1])


LISTS = {
    "twice": lambda t, u: ([t, t], [Y, Y]),
    "detached": lambda t, u: ([t, u, t.detach()], [Y, X, X]),
    "piece and whole": lambda t, u: ([t[:16], t], [Y[:16], Y]),
    "transpose and whole": lambda t, u: ([t.t(), t], [X.t(), Y]),
    "views that share rows": lambda t, u: ([t[:, :5], t[:, 3:9]], [Y[:, :5], X[:, 3:9]]),
    "crossed": lambda t, u: ([t, u], [u, t]),
    "read by a plain tensor": lambda t, u: ([t, x := X.clone(), t], [Y, t, x]),
    "disjoint": lambda t, u: ([t[:16], u, t[16:]], [Y[:16], Y, X[16:]]),
}
OF_LISTS = {
    "add": (lambda lists: torch._foreach_add_(*lists, alpha=3.0), lambda a, b: a.add_(b, alpha=3.0)),
    "addcdiv": (lambda lists: addcdiv_each(*lists), lambda a, b: a.addcdiv_(b, Y.new_tensor(4.0), value=8.0)),
}


def addcdiv_each(a: list[torch.Tensor], b: list[torch.Tensor]) -> None:
    """With the scalars in a tensor, which is one more list."""
    torch._foreach_addcdiv_(a, b, [Y.new_tensor(4.0)] * len(a), torch.full((len(a),), 8.0))


@pytest.mark.parametrize(("together", "alone"), OF_LISTS.values(), ids=OF_LISTS.keys())
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS.keys())
@pytest.mark.parametrize("inference", [False, True])
def test_an_element_of_a_list_reads_what_elements_before_it_wrote(inference, lists, together, alone) -> None:
    """As of plain tensors, however the elements share memory: no write is lost."""
    with torch.inference_mode(inference):
        t, u, v, w = MX.quantize(X), MX.quantize(Y), MX.quantize(X), MX.quantize(Y)
        together(lists(t, u))
        for a, b in zip(*lists(v, w), strict=True):
            alone(a, b)
        assert same(t, v) and same(u, w)


def test_unscaled_gradients_that_share_memory_are_unscaled_twice() -> None:
    """As torch's GradScaler would do it of plain ones."""
    t, found = MX.quantize(X), torch.zeros(1)
    torch._amp_foreach_non_finite_check_and_unscale_([t, t.detach()], found, torch.tensor(0.5))
    assert same(t, MX.quantize(X).mul_(0.5).mul_(0.5)) and not found.any()


def test_a_list_with_plain_tensors_writes_the_bits_of_single_operations() -> None:
    """What is encoded was rounded once, also beside a bias in bf16."""
    tensor = Quantizer(formats.get("fp8_e4m3_tensor")).quantize(torch.randn(64, 128).bfloat16())
    bias, gradient = torch.randn(64).bfloat16(), torch.randn(64, 128).bfloat16()
    tensors = [bias, tensor, bias.clone(), tensor.clone()]
    alone = [t.clone() for t in tensors]
    gradients = [bias * 2, gradient, bias, -gradient]
    torch._foreach_add_(tensors, gradients, alpha=-0.03)
    for t, g in zip(alone, gradients, strict=True):
        t.add_(g, alpha=-0.03)
    for result, want in zip(tensors, alone, strict=True):
        assert torch.equal(result + 0, want + 0)


def test_autograd_sees_writes() -> None:
    """core 34: a leaf that needs gradients refuses, a saved tensor notices, versions rise with quantize_ too."""
    w = torch.nn.Parameter(MX.quantize(X))
    for write in (lambda: w.add_(1), lambda: w.copy_(Y), lambda: w.__setitem__(0, 1.0)):
        with pytest.raises(RuntimeError, match="leaf Variable"):
            write()
    assert same(w.detach(), MX.quantize(X))
    loss = (w * w).sum()
    with torch.no_grad():
        w.quantize_(Y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    v = w.detach().view(-1)
    with torch.no_grad():
        v.mul_(2)
    assert torch.equal(w.dequantize(), v.dequantize().view(32, 64))


def test_set_item_carries_gradients() -> None:
    """core 34."""
    x, y = X.clone().requires_grad_(), Y.clone().requires_grad_()
    t = MX.quantize(x)
    t[3] = y[3] * 2
    t.dequantize().sum().backward()
    expected = torch.zeros(32, 64)
    expected[3] = 2
    assert torch.equal(y.grad, expected) and torch.equal(x.grad, (expected == 0).float())


def test_set_item_of_whole_blocks_leaves_the_others_alone() -> None:
    """core 34."""
    q = QUANTIZERS["mxfp8"]
    t = q.quantize(torch.randn(64, 64))
    before = snapshot(t)
    t[32:] = Y
    assert torch.equal(t.rowwise_codes[:32], before[0]["codes"][:32]) and same(t[32:].clone(), q.quantize(Y))


@every_quantizer
@every_usage
def test_a_copy_of_equal_formats_copies_bytes(q, usage) -> None:
    """core 35: equal formats and usages copy bytes, whatever they mean; nothing is shared after."""
    source, target = q.quantize(X.clone(), usage=usage), q.quantize(Y.clone(), usage=usage)
    for plane in source.planes:
        if plane is not None and plane.parts["codes"].dtype == torch.uint8:
            plane.parts["codes"][0, 0] = 0x80  # -0, which no requantization of values tells from other codes' bits
    before = snapshot(source)
    assert target.copy_(source) is target and same(target, source)
    target.zero_()
    assert same_parts(snapshot(source), before)


def test_copy_derives_what_is_missing() -> None:
    """core 35: usages that differ, where the format gives the other plane without loss."""
    for of_source, of_target in ((ROW, COLUMN), (COLUMN, ROW), (ROW, BOTH), (BOTH, ROW)):
        source, target = FP8.quantize(X, usage=of_source), FP8.quantize(Y, usage=of_target)
        assert same(target.copy_(source), FP8.quantize(X, usage=of_target))
        assert source.get_usages() == of_source._asdict()


def test_copy_with_usages_that_differ() -> None:
    """core 35; hybrid 32: one format requantizes; two formats raise before any write; a surplus plane is ignored."""
    source, target = MX.quantize(X, usage=ROW), MX.quantize(Y)
    assert same(target.copy_(source), MX.quantize(source.dequantize()))
    source, target = HYBRID.quantize(X, usage=ROW), HYBRID.quantize(Y)
    before = snapshot(target)
    with pytest.raises(MissingPlaneError, match="no columnwise plane"):
        target.copy_(source)
    assert same_parts(snapshot(target), before)
    assert same(HYBRID.quantize(Y, usage=ROW).copy_(HYBRID.quantize(X)), source)


NAMES = [name for name in QUANTIZERS if "|" not in name]


@pytest.mark.parametrize("source", NAMES)
@pytest.mark.parametrize("target", ["identity", "fp8", "mxfp8", "nvfp4_16x16", "nvfp4|mxfp8"])
def test_copy_between_formats(source, target) -> None:
    """core 36: the values of the source, scaled anew; of the same format, its bytes."""
    inputs, q = QUANTIZERS[source].quantize(X.bfloat16()), QUANTIZERS[target]
    values = inputs.dequantize(torch.float32)
    expected = snapshot(inputs) if QUANTIZERS[source] == q else snapshot(q.quantize(values.clone()))
    assert source == "identity" == target or same_parts(snapshot(q.quantize(Y.clone()).copy_(inputs)), expected)


@every_quantizer
@every_usage
def test_copy_from_and_to_plain(q, usage) -> None:
    """core 35, 48; hybrid 33: every held plane is refreshed; a plain target takes the values in its dtype."""
    t = q.quantize(Y.clone(), usage=usage)
    assert t.copy_(X) is t and same(t, q.quantize(X.clone(), usage=usage))
    assert same(t.copy_(Y.bfloat16()), q.quantize(Y.bfloat16().float(), usage=usage))
    plain = torch.empty(32, 64, dtype=torch.float64)
    assert plain.copy_(t) is plain and torch.equal(plain, t.dequantize().double())


def test_copy_between_views_of_different_matrices() -> None:
    """core 35: (2048,) over planes of (32, 64) from (2048,) over planes of (1, 2048)."""
    target, source = MX.quantize(X), MX.quantize(Y.view(-1))
    target.view(-1).copy_(source)
    assert same(target, MX.quantize(source.dequantize().view(32, 64)))


def test_copy_checks_shapes_before_bytes() -> None:
    """core 35: the planes of (2, 16, 64) and (32, 64) have one shape, the tensors have not."""
    t = MX.quantize(X.view(2, 16, 64))
    before = snapshot(t)
    for source in (MX.quantize(Y), Y, MX.quantize(Y)[:5], torch.ones(3)):
        with pytest.raises(UserError, match="cannot write shape"):
            t.copy_(source)
    assert same_parts(snapshot(t), before)


@every_quantizer
@every_usage
def test_data_of_a_plain_tensor(q, usage) -> None:
    """core 38; hybrid 34: quantized into new buffers; shape and dtype follow, the old buffers stay as they were."""
    w = torch.nn.Parameter(q.quantize(X.clone(), usage=usage))
    old = w.detach()
    before, alias = snapshot(old), w.data
    assert addresses(alias) == addresses(w) and not alias.requires_grad
    for new in (Y.clone(), torch.randn(2, 17, 33), torch.randn(48, 16).bfloat16()):
        w.data = new
        assert (w.shape, w.dtype, w.stride()) == (new.shape, new.dtype, new.stride()) and w.requires_grad
        assert same(w.detach(), q.quantize(new, usage=usage)) and isinstance(w, torch.nn.Parameter)
    assert same_parts(snapshot(old), before)


def test_data_of_a_view_keeps_its_matrix() -> None:
    """core 38: (2048,) over planes of (32, 64)."""
    v = MX.quantize(X).view(-1)
    v.data = Y.view(-1)
    assert same(v.view(32, 64), MX.quantize(Y))


def test_data_of_a_quantized_tensor() -> None:
    """core 38: equal formats adopt the buffers and nothing else is shared; other formats are quantized anew."""
    w, new = MX.quantize(X), MX.quantize(torch.randn(64, 32).half())
    new.requires_grad_()
    w.data = new
    assert addresses(w) == addresses(new) and (w.shape, w.dtype) == (new.shape, new.dtype) and not w.requires_grad
    w.update_usage(rowwise=False)
    w.update_quantizer(Quantizer(None, MX.columnwise))
    assert new.get_usages() == {"rowwise": True, "columnwise": True} and new.quantizer == MX
    w.data = FP8.quantize(Y)
    assert w.get_usages() == {"rowwise": False, "columnwise": True}
    assert same(w, MX.quantize(FP8.quantize(Y).dequantize(), usage=COLUMN))


def test_bad_data_is_refused_and_changes_nothing() -> None:
    """core 38; issue, bad input."""
    t = MX.quantize(X)
    before = snapshot(t)
    with pytest.raises(UserError, match="float64: cast it first"):
        t.data = X.double()
    with pytest.raises(UserError, match="got int"):
        t.quantize_(3)
    assert same_parts(snapshot(t), before)


def test_update_quantizer_changes_later_writes_alone() -> None:
    """core 43, 51: later writes change, bytes do not; other formats, and things that are none, are refused."""
    t = MX.quantize(X)
    before = snapshot(t)
    follows = Quantizer(MX.rowwise, MX.columnwise, "rowwise_dequantized")
    t.update_quantizer(Quantizer(MX.rowwise, MX.columnwise))  # equal: no warning, which would be an error here
    t.update_quantizer(follows)
    assert same_parts(snapshot(t), before)
    assert same_parts(snapshot(t.copy_(Y)), snapshot(follows.quantize(Y)))
    before = snapshot(t)
    for quantizer, text in (
        (FP8, "makes fp8_e4m3_tensor where the tensor holds mxfp8_e4m3; convert"),
        (Quantizer(MX.rowwise, None), "makes nothing where the tensor holds mxfp8_e4m3"),
        (Float8CurrentScalingQuantizer(), "makes fp8_e4m3_tensor where the tensor holds mxfp8_e4m3; convert"),
        (None, "got NoneType"),
    ):
        with pytest.raises(UserError, match=text):
            t.update_quantizer(quantizer)
    assert t.quantizer == follows and same_parts(snapshot(t), before)
    t.update_quantizer(MXFP8Quantizer())
    assert t.quantizer == MX and same_parts(snapshot(t), before)


def test_update_quantizer_with_a_handle_that_is_bound_to_a_slot() -> None:
    """core 43: later writes take the scale of the handle, and record their amax in it."""
    amax = torch.zeros(1)
    t = QUANTIZERS["fp8_delayed"].quantize(X)
    t.update_quantizer(Float8Quantizer(torch.tensor([16.0]), amax))
    t.copy_(Y)
    assert float(t.rowwise_scale) == 1 / 16 and amax == 5
    assert same_parts(parts_of(t)[:1], (QUANTIZERS["fp8_delayed"].rowwise.encode(Y, scale=torch.tensor([16.0])),))


def test_a_failing_write_changes_nothing() -> None:
    """core 34, 25: where one of several planes cannot be written, and where the operation itself fails."""
    seed = QuantizeContext(seed=torch.tensor([1]))
    t = pair("identity", "nvfp4_sr").quantize(X.clone(), ctx=seed)
    before = snapshot(t)
    with pytest.raises(UserError, match="needs a seed"):
        t.add_(1)
    with pytest.raises(RuntimeError):
        t.add_(torch.ones(3))
    assert same_parts(snapshot(t), before)
    t.context = seed
    assert same(t.add_(1), pair("identity", "nvfp4_sr").quantize(X + 1, ctx=seed))


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
def test_an_optimizer_step() -> None:
    """core 48; issue, in-place weight writes: SGD and Adam, foreach or not, write both planes."""
    for make in (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=False),
        lambda p: torch.optim.SGD(p, lr=0.1, foreach=True),
        lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    ):
        w = torch.nn.Parameter(MX.quantize(X))
        plain = torch.nn.Parameter(w.dequantize().detach().clone())
        for p in (w, plain):
            p.grad = Y.clone()
            make([p]).step()
        assert isinstance(w, QuantizedTensor) and same(w.detach(), MX.quantize(plain.detach()))


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
def test_an_optimizer_writes_long_lists_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """issue 18: no copy of all weights in high precision at once, and the bits of one that is written whole."""
    part_sizes: list[int] = []
    monkeypatch.setattr(
        in_place, "write_all", lambda all, write=in_place.write_all: (part_sizes.append(len(all)), write(all))
    )
    for options in ({"foreach": True}, {"fused": True}):
        results = []
        for at_once in (in_place.AT_ONCE, 2 * X.numel()):
            monkeypatch.setattr(in_place, "AT_ONCE", at_once)
            parameters = [torch.nn.Parameter(q.quantize(X + at)) for at, q in enumerate((MX, FP8, HYBRID, MX, MX))]
            parameters.insert(1, torch.nn.Parameter(Y.clone()))
            for at, p in enumerate(parameters):
                p.grad = Y * (at + 1)
            optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
            optimizer.step()
            optimizer.step()
            results.append(parameters)
            most, part_sizes[:] = max(part_sizes), []
            assert most == (5 if at_once > 2 * X.numel() else 2), options
        for result, want in zip(*results, strict=True):
            assert torch.equal(plain(result.detach()), plain(want.detach())), options


def test_a_state_dict_copies_bytes_or_requantizes() -> None:
    """hybrid 48; core 40: quantized into quantized copies bytes, high precision into quantized requantizes."""

    def module(x: torch.Tensor) -> torch.nn.Module:
        result = torch.nn.Module()
        result.w = torch.nn.Parameter(HYBRID.quantize(x))
        return result

    source, target = module(X), module(Y)
    at = addresses(target.w)
    target.load_state_dict(source.state_dict())
    assert same(target.w.detach(), source.w.detach()) and addresses(target.w) == at
    target.load_state_dict({"w": Y.bfloat16()})
    assert same(target.w.detach(), HYBRID.quantize(Y.bfloat16().float())) and addresses(target.w) == at


def test_values_of_a_bfloat16_source_are_not_rounded_twice() -> None:
    """core 35: a wider target takes what the codes say, not what the source would show."""
    source = FP8.quantize(X.bfloat16())
    target = QUANTIZERS["identity"].quantize(Y.clone())
    assert same_bits(target.copy_(source).dequantize(), source.dequantize(torch.float32))


FP32_WRITES = {
    "copy_": lambda t, x: t.copy_(x),
    "copy_ double": lambda t, x: t.copy_(x.double()),
    "quantize_": lambda t, x: t.quantize_(x),
    "quantize out=": lambda t, x: t.quantizer.quantize(x, out=t),
    "foreach": lambda t, x: torch._foreach_copy_([t], [x]),
    "set item": lambda t, x: t.__setitem__(slice(None), x),
    "load_state_dict": lambda t, x: load(t, x),
}


def load(t: QuantizedTensor, x: torch.Tensor) -> None:
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(t)
    module.load_state_dict({"w": x})


def awkward(dtype: torch.dtype) -> torch.Tensor:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(3)) * torch.logspace(-9, 2, 64)[:, None]
    x[0, :3], x[1] = torch.tensor([0.0, -0.0, 2.0**-140]), 0.0
    return x.to(dtype)


@pytest.mark.parametrize("nominal", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("write", FP32_WRITES.values(), ids=FP32_WRITES.keys())
def test_fp32_values_are_rounded_once(write, nominal) -> None:
    """The codes are those that the formats make of the fp32 values, whatever the tensor pretends to be."""
    x = awkward(torch.float32)
    for name in ("fp8", "fp8_row", "1x128", "128x128", "mxfp8", "nvfp4", "nvfp4_rht", "nvfp4|mxfp8", "mxfp8>nvfp4"):
        t = QUANTIZERS[name].quantize(torch.ones(64, 96, dtype=nominal))
        write(t, x)
        assert t.dtype is nominal
        assert same_parts(parts_of(t), planes_of(QUANTIZERS[name], x, nominal=nominal)), name


@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=str)
def test_values_of_another_16_bit_dtype_lose_nothing(source) -> None:
    """bf16 into fp16 and back: neither holds the other."""
    nominal = torch.float16 if source is torch.bfloat16 else torch.bfloat16
    x = awkward(source)
    t = MX.quantize(torch.ones(64, 96, dtype=nominal)).copy_(x)
    assert same_parts(parts_of(t), planes_of(MX, x.float()))


def test_a_plane_in_high_precision_holds_the_nominal_dtype_and_what_follows_it_encodes_that() -> None:
    x = awkward(torch.float32)
    for source, of_col in (("original", x), ("rowwise_dequantized", x.bfloat16())):
        q = pair("identity", "mxfp8_e4m3", source)
        t = q.quantize(torch.ones(64, 96, dtype=torch.bfloat16)).copy_(x)
        row, col = t.planes
        assert same_bits(row.parts["codes"], x.bfloat16())
        want = q.columnwise.encode(of_col.t().contiguous(), plane="col")
        assert all(same_bits(col.parts[name], part) for name, part in want.items())


READS = {
    "float": lambda t: t.float(),
    "to": lambda t: t.to(torch.float32),
    "type": lambda t: t.type(torch.float32),
    "copy_": lambda t: torch.empty(64, 96).copy_(t),
    "foreach": lambda t: foreach_copied(t),
    "double": lambda t: t.double().float(),
}


def foreach_copied(t: torch.Tensor) -> torch.Tensor:
    result = torch.empty(64, 96)
    torch._foreach_copy_([result], [t])
    return result


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_wider_reads_are_rounded_once(read) -> None:
    """Masters start from what the codes say, not from what bf16 holds of that."""
    for name in ("fp8", "mxfp8", "nvfp4", "nvfp4_rht", "nvfp4|mxfp8", "identity"):
        t = QUANTIZERS[name].quantize(awkward(torch.bfloat16))
        plane = t.planes[0] if name != "nvfp4|mxfp8" else t.planes[1]
        values = plane.format.unrotate(plane.format.decode(plane.parts, torch.float32), plane.shape[1])
        assert same_bits(read(t), values if name != "nvfp4|mxfp8" else values.t().contiguous()), name
        with torch.inference_mode():
            assert same_bits(read(t), values if name != "nvfp4|mxfp8" else values.t().contiguous()), name


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4"])
def test_a_step_of_torch_rounds_once(name) -> None:
    """SGD on a bf16 weight encodes the fp32 result, not its bf16 rounding."""
    q = Quantizer(formats.get(name), formats.get(name))
    weight = torch.nn.Parameter(q.quantize(torch.randn(64, 96).bfloat16()))
    start = weight.detach().dequantize(torch.float32)
    weight.grad = torch.randn(64, 96).bfloat16()
    torch.optim.SGD([weight], lr=0.1).step()
    want = q.quantize(start.add(weight.grad.float(), alpha=-0.1))
    assert torch.equal(weight.detach().rowwise_codes, want.rowwise_codes)


@pytest.mark.parametrize("write", ["quantize_", "copy_", "add_"])
def test_the_plane_that_follows_encodes_the_nominal_dtype_however_it_is_written(write) -> None:
    """The rowwise plane is of the fp32 values, the columnwise one of what that plane says in bf16."""
    row, col = formats.get("nvfp4"), formats.get("mxfp8_e4m3")
    q = Quantizer(row, col, columnwise_source="rowwise_dequantized")
    t, values = q.quantize(torch.zeros(64, 96, dtype=torch.bfloat16)), torch.randn(64, 96)
    getattr(t, write)(values)
    whole = Quantizer(row, None).quantize(values)
    assert torch.equal(t.rowwise_codes, whole.rowwise_codes)
    want = Quantizer(None, col).quantize(t.planes.rowwise.dequantize(torch.bfloat16))
    for name, part in want.planes.columnwise.parts.items():
        assert torch.equal(t.planes.columnwise.parts[name], part), name


@pytest.mark.parametrize("write", ["copy_", "copy_ of another", "add_", "state"])
def test_a_backward_in_flight_sees_a_write_as_in_torch(write: str) -> None:
    """Below `__torch_dispatch__` torch itself counts no write of the buffers that backward saved."""
    linear = duotone.Linear(64, 32, bias=False, recipe=duotone.recipes.load("mxfp8"))
    duotone.convert_parameters(linear, linear.recipe)
    y = linear(torch.randn(32, 64).requires_grad_())
    other = {"copy_ of another": linear.weight.detach().clone()}.get(write, X)
    with torch.no_grad():
        if write == "state":
            linear.load_state_dict({"weight": X}, strict=False)
        else:
            linear.weight.add_(X) if write == "add_" else linear.weight.copy_(other)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_traced_write_of_a_shard_is_one_op_where_ranks_need_not_agree() -> None:
    x = torch.randn(64, 64)
    asking = set()
    for name in formats.names():
        fmt = formats.get(name)
        if not (fmt.is_delayed or fmt.is_stochastic):
            asks = [fmt.shared_amax(x, dim) is not None for dim in (0, 1)]
            assert asks == [fmt.spans(0), fmt.spans(1)], name
            asking |= {name} if any(asks) else set()
    assert {"fp8_e4m3_tensor", "fp8_e4m3_row", "nvfp4"} <= asking and not asking & {"mxfp8_e4m3", "fp8_e4m3_128x128"}

    def parts(x: torch.Tensor) -> list[torch.Tensor]:
        planes = encoded(MX, x, BOTH, QuantizeContext(ShardContext("a group that nobody asks")))
        return [part for plane in planes for part in plane.parts.values()]

    graph = make_fx(dispatch_functionalize(parts))(x).graph  # as AOTAutograd traces
    calls = graph.find_nodes(op="call_function", target=torch.ops.duotone.encode_planes.default)
    assert len(calls) == 1
    assert all(map(torch.equal, parts(x), [part for plane in MX.encode(x) for part in plane.parts.values()]))


@pytest.mark.parametrize("copy", [
    lambda t: t.clone(), lambda t: t.to(torch.float32, copy=True), lambda t: torch.empty_like(t).copy_(t),
    lambda t: t.new_empty(64, 64).copy_(t), lambda t: t.new_zeros(64, 64),
], ids=["clone", "to", "empty_like", "new_empty", "new_zeros"])  # fmt: skip
def test_writes_to_a_copy_record_nothing_for_the_weight(copy) -> None:
    """An averaged or perturbed copy of a weight must not change the weight's next scale. A view writes the weight."""
    model = duotone.convert(torch.nn.Linear(64, 64), "fp8-delayed", rules=())
    duotone.convert_parameters(model, "fp8-delayed")
    model(torch.randn(64, 64)).sum().backward()
    recorded = model.duotone_forward.amax_history.clone()
    with torch.no_grad():
        copy(model.weight.detach()).mul_(1000.0)
        assert torch.equal(model.duotone_forward.amax_history, recorded)
        model.weight.detach().mul_(3.0)
    assert not torch.equal(model.duotone_forward.amax_history, recorded)

"""Views that no plane expresses: reads decode the tensor as it is then, and writes reach it."""

import copy
import ctypes
import io
import pickle

import numpy as np
import pytest
import torch
from tensor_cases import QUANTIZERS, every_usage, same, same_bits
from torch import Tensor

import duotone
from duotone.errors import MissingPlaneError, UserError
from duotone.tensor import QuantizedTensor

FORMATS = ("fp8", "fp8_row", "1x128", "128x128", "mxfp8", "nvfp4", "nvfp4_rht", "nvfp4|mxfp8", "mxfp8|identity")
every_format = pytest.mark.parametrize("name", FORMATS)
VIEWS = {
    "rows that cut a block": lambda t: t[3:40],
    "select": lambda t: t.select(0, 3)[5:],
    "column": lambda t: t[:, 7],
    "steps": lambda t: t[::2],
    "transpose": lambda t: t.t(),
    "two dimensions": lambda t: t.transpose(0, 1)[3:7, 1:],
    "diagonal": lambda t: t.diagonal(),
    "strided": lambda t: t.as_strided((5, 7), (64, 2), 65),
    "unsqueeze": lambda t: t.unsqueeze(1)[3:],
    "split": lambda t: t.split(20, 1)[1],
    "chunk of a transpose": lambda t: t.t().chunk(3)[2],
    "unbind of a transpose": lambda t: t.t().unbind()[9],
    "unfold": lambda t: t.unfold(0, 3, 5)[2],
}
every_view = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS.keys())
WRITES = {
    "copy_": lambda v: v.copy_(torch.linspace(-1, 1, v.numel()).reshape(v.shape)),
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(2.0),
    "data": lambda v: v.data.fill_(0.5),
    "index": lambda v: v.__setitem__(..., 0.25),
    "mask": lambda v: v.masked_fill_(v > 0, 3.0),
    "foreach": lambda v: torch._foreach_add_([v], [torch.ones(v.shape)]),
    "out": lambda v: torch.neg(v.clone(), out=v),
    "clamp": lambda v: torch.clamp_(v, -0.1, 0.1),
}


def quantized(name: str, usage=duotone.tensor.BOTH) -> QuantizedTensor:
    torch.manual_seed(0)
    return QUANTIZERS[name].quantize(torch.randn(64, 64), usage=usage)


@every_format
@every_view
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_a_view_reaches_the_tensor_or_is_refused(name, view, write) -> None:
    """As if the values were written by hand: torch writes a view of them, and the tensor encodes them."""
    t = quantized(name)
    values = t.dequantize(torch.float32).clone()
    try:
        write(view(t))
    except MissingPlaneError as refusal:
        assert "shares its scale with the rest" in str(refusal) and same(t, quantized(name))
        return
    write(view(values))
    expected = quantized(name)
    expected.copy_(values)
    assert same(t, expected) and not same(t, quantized(name))


@every_usage
@every_view
def test_a_view_shows_what_its_tensor_holds_now(view, usage) -> None:
    t = quantized("mxfp8", usage)
    v, x = view(t), torch.randn(64, 64)
    t.copy_(x)
    assert same_bits(v.clone(), view(t.dequantize()).clone()) and v.shape == view(x).shape


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-block", "mxfp8", "nvfp4"])
def test_fill_diagonal_of_a_weight(recipe) -> None:
    """It writes a view of its own."""
    m = duotone.convert_parameters(duotone.convert(torch.nn.Linear(64, 64, bias=False), recipe, rules=()), recipe)
    with torch.no_grad():
        m.weight.fill_diagonal_(1.0)
    assert torch.allclose(m.weight.dequantize().diagonal(), torch.ones(64), rtol=0.1)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_code_reads_and_writes_views_as_eager_code_does(backend) -> None:
    def step(t: Tensor, x: Tensor) -> Tensor:
        y = x @ t.t() + t[3:5].sum()
        t[0:8].copy_(x)
        t.t().mul_(2.0)
        t[::2].zero_()
        return y + t.diagonal()

    x = torch.randn(8, 64)
    eager, compiled = quantized("mxfp8"), quantized("mxfp8")
    results = step(eager, x), torch.compile(step, backend=backend, fullgraph=True)(compiled, x)
    assert same_bits(*results) and same(eager, compiled)


def test_gradients_pass_through_views() -> None:
    weights = [torch.nn.Parameter(w) for w in (quantized("mxfp8"), quantized("mxfp8").dequantize())]
    for w in weights:
        (torch.ones(3, 64) @ w.t() + w[5:6] * w.diagonal()).square().sum().backward()
    assert torch.equal(weights[0].grad, weights[1].grad)


def test_a_view_in_another_dtype_refuses_writes() -> None:
    t = quantized("mxfp8")
    assert torch.equal(t.view(torch.int32), t.dequantize().view(torch.int32))
    with pytest.raises(MissingPlaneError, match=r"as torch\.int32 takes no writes"):
        t.view(torch.int32).zero_()


@pytest.mark.parametrize(
    "reach",
    [
        lambda v: v.data_ptr(),
        lambda v: v.untyped_storage(),
        torch.from_dlpack,
        lambda v: v.share_memory_(),
        lambda v: setattr(v, "data", torch.zeros(64, 64)),
    ],
)
def test_a_view_of_a_parameter_has_no_memory(reach) -> None:
    """Other code would write it, and the parameter would not change."""
    with (
        torch.no_grad(),
        pytest.raises(MissingPlaneError, match=r"decoded at each read and has no address; clone\(\) it"),
    ):
        reach(torch.nn.Parameter(quantized("mxfp8")).t())


def test_a_view_of_what_is_saved_has_the_address_of_its_values() -> None:
    """safetensors reads the experts of a state_dict so."""
    v = quantized("mxfp8").t()
    values = (ctypes.c_float * v.numel()).from_address(v.data_ptr())
    assert torch.equal(torch.tensor(list(values)).reshape(64, 64).t(), quantized("mxfp8").dequantize().t())
    assert v.untyped_storage().data_ptr() == v.data_ptr()


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda v: pickle.loads(pickle.dumps(v)), torch.clone, torch.Tensor.contiguous]
)
def test_copies_of_a_view_are_plain(copied) -> None:
    v = quantized("mxfp8").t()
    assert type(copied(v)) is Tensor and same_bits(copied(v), quantized("mxfp8").dequantize().t().contiguous())


def test_what_reads_values_gets_them() -> None:
    v, values = quantized("mxfp8").t(), quantized("mxfp8").dequantize().t()
    buffer = io.BytesIO()
    torch.save(v, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer), values)
    assert (v.numpy() == values.numpy()).all() and v.tolist() == values.tolist()
    assert repr(v) == repr(values) and f"{v[0, 0]:.3f}" == f"{values[0, 0]:.3f}"


@pytest.mark.parametrize("array", [lambda v: v.numpy(), np.asarray, lambda v: v.view(torch.int32).numpy()])
def test_an_array_of_a_view_takes_no_writes(array) -> None:
    """They would not reach the tensor."""
    with pytest.raises(ValueError, match="read-only"):
        array(quantized("mxfp8")[::2])[...] = 2


def test_an_offset_into_a_piece_is_refused() -> None:
    """torch counts it from the start of the whole tensor, and a piece does not know where it starts."""
    t = quantized("mxfp8")
    for piece in (t[32:], t[:32], t.split(32)[1]):
        with pytest.raises(UserError, match="as_strided of a piece of a quantized tensor takes no storage_offset"):
            piece.as_strided((32, 64), (64, 1), 0)
    assert torch.equal(t[32:].as_strided((2, 3), (64, 1)).clone(), t.dequantize()[32:34, :3])
    assert torch.equal(t.as_strided((32, 64), (64, 1), 2048).dequantize(), t.dequantize()[32:])

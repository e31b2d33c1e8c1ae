"""Quantizing inside of torch.compile(fullgraph=True) has the bytes and the gradients of eager."""

import dataclasses
from typing import Any

import pytest
import torch
from tensor_cases import BOTH, COLUMN, QUANTIZERS, ROW, get, pair, same, same_bits

from duotone.compat.quantizers import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer, NVFP4Quantizer
from duotone.tensor import History, QuantizeContext, QuantizedTensor, Quantizer
from duotone.tensor.context import LOCAL
from duotone.tensor.plane import Planes, Usage
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

X = torch.randn(48, 80, generator=torch.Generator().manual_seed(4))


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


@pytest.mark.parametrize(
    "name", ["identity", "fp8", "fp8_row", "128x128", "mxfp8", "nvfp4_rht", "nvfp4|mxfp8", "mxfp8>nvfp4"]
)
def test_quantizers_compile_and_give_whole_tensors(name) -> None:
    """core 21: the tensor comes out whole, and can be used inside."""
    q, usages = QUANTIZERS[name], (BOTH, ROW, COLUMN)
    tensors = compiled(lambda x: [q.quantize(x, usage=usage) for usage in usages])(X)
    for result, usage in zip(tensors, usages, strict=True):
        assert (
            isinstance(result, QuantizedTensor) and result.quantizer == q and same(result, q.quantize(X, usage=usage))
        )
    want = (q.quantize(X).dequantize() + 1) @ X.t()
    assert torch.equal(compiled(lambda x: (q(x).dequantize() + 1) @ x.t())(X), want)


@pytest.mark.parametrize("name", ["identity", "fp8", "fp8_delayed", "128x128", "mxfp8", "nvfp4_rht", "mxfp8>nvfp4"])
def test_a_write_has_the_bytes_of_eager(name: str) -> None:
    """As a compiled step of an optimizer writes its parameter. Planes that share memory are written once."""
    source = X.repeat(8, 4)  # large enough for casts in pieces

    def tensors() -> list[QuantizedTensor]:
        return [QUANTIZERS[name].quantize(source, usage=usage) for usage in (BOTH, ROW, COLUMN)]

    def step(tensors: list[QuantizedTensor], x: torch.Tensor) -> None:
        for t in tensors:
            t.copy_(t.float() * 0.9 + x)

    written, expected = tensors(), tensors()
    buffers = [part.data_ptr() for t in written for part in t.parts]
    compiled(step)(written, source)
    step(expected, source)
    assert all(map(same, written, expected)) and buffers == [part.data_ptr() for t in written for part in t.parts]


def test_a_scale_of_both_planes_is_written_once() -> None:
    """As kernels for GPUs leave it: each plane has codes of its own. A graph writes none of its inputs twice."""

    def apart() -> QuantizedTensor:
        t = QUANTIZERS["fp8"].quantize(X)
        _, col = t.planes
        t._columnwise = dataclasses.replace(col, parts=col.parts | {"codes": col.parts["codes"].contiguous().clone()})
        return t

    written, expected = apart(), apart()
    assert not written.planes.aliased and written.planes[0].parts["scale"] is written.planes[1].parts["scale"]
    compiled(lambda t, x: t.copy_(x))(written, 3 * X)
    expected.copy_(3 * X)
    assert same(written, expected) and same(expected, QUANTIZERS["fp8"].quantize(3 * X))


@dataclasses.dataclass(frozen=True)
class Clipping(Quantizer):
    """Clips to a limit that `==` leaves out."""

    limits: Any = dataclasses.field(default=None, compare=False)

    def encode(self, x: torch.Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        return super().encode(x.clamp(-self.limits[0], self.limits[0]), usage, ctx)


def test_a_compiled_write_takes_the_quantizer_of_its_tensor() -> None:
    """Two tensors whose quantizers differ in what their `==` leaves out are not written by one graph."""
    mxfp8 = get("mxfp8_e4m3")
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    write = torch.compile(lambda t, x: t.copy_(x), fullgraph=True, backend=counter)
    for limits in ([1.0], [0.25], {0: 1.0}, {0: 0.25}, [1.0]):
        for _ in range(2):
            t = Clipping(mxfp8, mxfp8, limits=limits).quantize(torch.zeros_like(X))
            write(t, X)
            assert t.dequantize().abs().max() == limits[0]
    assert counter.frame_count == 4, "equal limits share a graph"


def test_a_compiled_write_notices_that_a_field_of_its_quantizer_changed() -> None:
    limits = [1.0]
    mxfp8 = get("mxfp8_e4m3")
    t = Clipping(mxfp8, mxfp8, limits=limits).quantize(torch.zeros_like(X))
    write = compiled(lambda t, x: t.copy_(x))
    for limit in (1.0, 0.25):
        limits[0] = limit
        write(t, X)
        assert t.dequantize().abs().max() == limit


@pytest.mark.parametrize("make", [MXFP8Quantizer, Float8CurrentScalingQuantizer, NVFP4Quantizer])
def test_handles_compile_to_the_bytes_of_eager(make) -> None:
    handle = make(columnwise=False)
    result = compiled(lambda x: handle(x))(X)
    assert same(result, handle(X)) and result.get_usages() == {"rowwise": True, "columnwise": False}
    assert torch.equal(compiled(lambda x: handle.quantize(x).dequantize())(X), handle(X).dequantize())


def test_gradients_pass_unchanged() -> None:
    q = QUANTIZERS["mxfp8"]

    def gradient(function) -> torch.Tensor:
        x = X.clone().requires_grad_()
        y = function(x)
        (y * y).sum().backward()
        return x.grad

    want = gradient(lambda x: q(x).dequantize())
    assert same_bits(want, 2 * q.quantize(X).dequantize())
    assert same_bits(gradient(compiled(lambda x: q(x).dequantize())), want)


def test_seeds_are_inputs_of_the_graph() -> None:
    q = pair("nvfp4_sr")
    run = compiled(lambda x, seed: q.quantize(x, ctx=QuantizeContext(seed=seed)))
    for value in (1, 2):
        seed = torch.tensor([value])
        assert same(run(X, seed), q.quantize(X, ctx=QuantizeContext(seed=seed)))


def test_a_delayed_handle_takes_its_scale_and_records_its_amax() -> None:
    inside, outside = (Float8Quantizer(torch.full((1,), 3.0), torch.zeros(1)) for _ in range(2))
    run = compiled(lambda x: inside(x))
    for x in (X, 3 * X):
        result, want = run(x), outside(x)
        assert same(result, want) and result.quantizer == want.quantizer
        assert torch.equal(inside.amax, outside.amax) and inside.amax == x.abs().max()
    inside.scale.fill_(5.0)
    assert float(run(X).rowwise_scale) == float(torch.tensor(1.0) / 5.0)


def test_histories_come_along() -> None:
    delayed = QUANTIZERS["fp8_delayed"].rowwise
    q = Quantizer(delayed, delayed, history=History(margin=2, amax_history_len=4))
    assert compiled(lambda x: q.quantize(x))(X).quantizer == q


def test_all_parameters_of_a_history_reach_a_tensor_that_compiled_code_quantizes() -> None:
    """The graph takes them one by one: a new one must not be left out."""
    history = History(1, 7, "most_recent", None, False, False, 3.0, False)
    changed = [getattr(history, f.name) != getattr(History(), f.name) for f in dataclasses.fields(History)]
    assert changed == [f.name != "scaling_factor_compute_algo" for f in dataclasses.fields(History)]
    fmt = get("fp8_e4m3_delayed")
    quantizer = Quantizer(fmt, fmt, history=history)
    result = compiled(lambda x: quantizer.quantize(x))(torch.randn(16, 32))
    assert result.quantizer.history == history

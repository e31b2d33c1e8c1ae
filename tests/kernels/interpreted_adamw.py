"""Checks: steps of AdamW, against the same steps in plain torch."""

import itertools

import torch
from interpreting import Check, awkward
from torch import Tensor, nn

from duotone import formats
from duotone.optim import update as steps
from duotone.optim.update import Rates, State, update
from duotone.tensor import Planes, QuantizedTensor, Quantizer, Usage
from duotone.tensor.context import QuantizeContext, Slot

GROUP = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
SHAPES = [(64, 128), (70, 143), (1, 5), (5, 1)]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
DELAYED = ["fp8_e4m3_delayed", "fp8_e5m2_delayed"]
OTHERS = ["fp8_e4m3_tensor", "fp8_e4m3_128x128", "mxfp8_e4m3", "nvfp4"]
USAGES = [Usage(True, True), Usage(True, False), Usage(False, True)]


class Recording(Slot):
    """A scale, and the bits of the amax that was met."""

    def __init__(self) -> None:
        self.scale, self.live = torch.tensor([24.0]), torch.tensor([1e-3]).view(torch.int32)

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return self.scale, self.live

    def scale_for(self, x: Tensor) -> Tensor:
        met = x.float().abs().nan_to_num(0.0, torch.inf).max().reshape(1)
        self.live = torch.maximum(met, self.live.view(torch.float32)).view(torch.int32)
        return self.scale


def state(shape: tuple[int, int], dtype: torch.dtype, stored: torch.dtype = torch.float32) -> State:
    """Gradients of every kind, moments as after some steps; the first and the master are stored in a dtype."""
    rows, cols = shape
    grad = awkward()[:rows, :cols].to(dtype).contiguous()
    second = torch.rand(shape) * torch.logspace(-42, 8, cols)
    second[0] = 0.0
    first, master = ((torch.randn(shape) * size).to(stored) for size in (0.1, 1.0))
    return State(grad, first, second, master)


def copied(state: State) -> State:
    return State(*(t.clone() for t in state))


def quantized_parameter(
    fmt: str, usage: Usage, shape: tuple[int, int], dtype: torch.dtype
) -> tuple[nn.Parameter, Recording]:
    """A quantized parameter whose planes are memory of their own, as on CUDA, and its slot."""
    quantizer, slot = Quantizer(formats.get(fmt), formats.get(fmt)), Recording()
    tensor = quantizer.make(torch.randn(shape, dtype=dtype), usage, QuantizeContext(slots=(slot, None)))
    row, col = tensor.planes
    planes = Planes(row, col and col.map(lambda part: part.clone(memory_format=torch.contiguous_format)))
    parameter = nn.Parameter(QuantizedTensor(planes, quantizer, tensor.shape, dtype), False)
    parameter.context = QuantizeContext(slots=(slot, None))
    slot.live = torch.tensor([1e-3]).view(torch.int32)
    return parameter, slot


def states(where: str, result: State, want: State) -> Check:
    yield from ((f"{where} {name}", a, b) for name, a, b in zip(State._fields[1:], result[1:], want[1:], strict=True))


def masters() -> Check:
    """Parameters in high precision."""
    for shape, dtype, maximize in itertools.product(SHAPES, DTYPES, (False, True)):
        rates = Rates.of(GROUP | {"maximize": maximize}, 3)
        stored = torch.bfloat16 if maximize else torch.float32
        result, parameter = state(shape, dtype, stored), nn.Parameter(torch.zeros(shape, dtype=dtype), False)
        want = copied(result)
        captured = copied(result)
        steps._by_kernels(parameter, captured, torch.tensor(rates))
        steps._by_kernels(parameter, result, rates)
        update(want, rates)
        where = f"{dtype} {shape} {maximize}"
        yield from states(f"{where} captured", captured, want)
        yield from states(where, result, want)
        yield f"{where} parameter", parameter.detach(), want.master.to(dtype)


def planes() -> Check:
    """Quantized parameters: those of delayed formats are written by the step."""
    rates = Rates.of(GROUP, 1)
    kinds = [*itertools.product(DELAYED, SHAPES, DTYPES[::2]), *itertools.product(OTHERS, SHAPES[:2], DTYPES[:1])]
    for (fmt, shape, dtype), usage in itertools.product(kinds, USAGES):
        torch.manual_seed(7)
        parameter, slot = quantized_parameter(fmt, usage, shape, dtype)
        torch.manual_seed(7)
        twin, other = quantized_parameter(fmt, usage, shape, dtype)
        result = state(shape, torch.bfloat16)
        want = copied(result)
        version, addresses = parameter._version, [p.parts["codes"].data_ptr() for p in parameter.planes if p]
        if not steps._by_kernels(parameter, result, rates if usage.rowwise else torch.tensor(rates)):
            parameter.copy_(result.master)
        update(want, rates)
        twin.copy_(want.master)
        where = f"{fmt} {usage} {dtype} {shape}"
        yield from states(where, result, want)
        for side, actual, expected in zip(("row", "col"), parameter.planes, twin.planes, strict=True):
            for part in actual.parts if actual is not None else ():
                yield f"{where} {side} {part}", actual.parts[part], expected.parts[part]
        yield f"{where} amax", slot.live, other.live
        assert parameter._version > version
        assert addresses == [p.parts["codes"].data_ptr() for p in parameter.planes if p]


REPLACED = [(steps, "can_read_once", lambda row, col, dtype, where: True)]


def checks(everything: bool) -> Check:
    yield from masters()
    yield from planes()

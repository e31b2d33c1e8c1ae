"""What makes a launch compile its kernel anew; the driver and the compiler are stand-ins."""

import itertools
import sys
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
import triton.backends.nvidia.driver as nvidia  # noqa: E402

from duotone import formats  # noqa: E402
from duotone.dispatch.casts import cast_of  # noqa: E402
from duotone.kernels import amax, launch, repeated_cast  # noqa: E402

NOWHERE = itertools.count(2000)
"""Numbers of cards that no machine has, so that launches which do nothing stay apart in caches."""
CAST_CALLS = 8
"""Numbers only fall."""


@pytest.fixture
def bound_kernel(monkeypatch):
    """A kernel of (x, live, N) with one constant, what it was compiled for, and what was enqueued."""
    compiled, enqueued, number = [], [], next(NOWHERE)

    def compile_for(self, signature):
        compiled.append(signature)
        return lambda programs, y, z, stream, *arguments: enqueued.append((programs, arguments)), ()

    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch.Launch, "_compile", compile_for)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: number, raising=False)
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: number)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    for module in (amax, repeated_cast):
        monkeypatch.setattr(module, "empty_cuda", torch._C._dynamo.guards._empty_strided_cpu)
    return launch.Kernel(SimpleNamespace()).bind({"T": 8}), compiled, enqueued


def test_what_triton_specializes_on_compiles_anew(bound_kernel) -> None:
    call, compiled, _ = bound_kernel
    x, live = torch.zeros(64), torch.zeros(4, dtype=torch.int32)
    calls = [
        ((x, live), (32,)),
        ((x[1:], live), (32,)),
        ((x.half(), live), (32,)),
        ((x, live), (33,)),
        ((x, live), (1,)),
        ((x, live), (2**31,)),
    ]
    for tensors, integers in (*calls, *calls):
        call(1, tensors, integers)
    assert len(compiled) == len(calls)


def test_a_tensor_that_is_none_stays_none(bound_kernel) -> None:
    call, _, enqueued = bound_kernel
    x = torch.zeros(64)
    call(1, (x, None), (32,))
    assert enqueued == [(1, (x.data_ptr(), None, 32, None))]


def test_a_cast_of_both_planes_keeps_to_its_calls(bound_kernel) -> None:
    """The host's time of a cast is mostly the Python functions that it runs, here with an amax before it."""
    fmt = formats.get("fp8_e4m3_tensor")
    cast, x, names = cast_of(fmt, fmt, torch.bfloat16), torch.zeros(64, 128, dtype=torch.bfloat16), []
    cast(x)
    sys.setprofile(lambda frame, event, _: names.append(frame.f_code.co_name) if event == "call" else None)
    try:
        cast(x)
    finally:
        sys.setprofile(None)
    assert len([name for name in names if name not in ("<lambda>", "_empty_on")]) <= CAST_CALLS, names


FORMATS = ("fp8_e4m3_tensor", "fp8_e4m3_delayed", "fp8_e4m3_row", "fp8_e4m3_1x128")


@pytest.mark.parametrize("name", FORMATS)
def test_a_cast_repeats_its_launches_on_other_addresses(name: str, bound_kernel) -> None:
    """Of equal shapes only the first cast prepares its launches; later ones may differ in addresses alone."""
    _, _, enqueued = bound_kernel
    fmt = formats.get(name)
    cast, scale, live = cast_of(fmt, fmt, torch.bfloat16), torch.ones(1), torch.zeros(1, dtype=torch.int32)
    assert cast is not None
    inputs = ((scale, None), live) if fmt.is_delayed else ((None, None), None)
    first, second = torch.zeros(64, 256, dtype=torch.bfloat16), torch.zeros(64, 256, dtype=torch.bfloat16)
    cast(first, *inputs)
    launches = enqueued.copy()
    del enqueued[:]
    parts = cast(second, *inputs, typed=True), cast(second, *inputs, typed=True)
    assert [part["codes"].dtype for plane in parts for part in plane] == [torch.float8_e4m3fn] * 4
    assert len(enqueued) == 2 * len(launches)
    row, col = parts[1]
    for (programs, arguments), (expected, others) in zip(enqueued[len(launches) :], launches, strict=True):
        assert programs == expected
        assert arguments[0] == second.data_ptr() and others[0] == first.data_ptr()
        assert [type(each) for each in arguments] == [type(each) for each in others]
        addresses = 3 if len(arguments) < 10 else 13
        assert arguments[addresses:] == others[addresses:]
    written = [part.data_ptr() for part in (row["codes"], row["scale"], col["codes"], col["scale"])]
    assert list(enqueued[-1][1][6:10]) == written


@pytest.mark.skipif(not launch.DIRECT, reason="another Triton is called the slow way; `make test` brings 3.6")
def test_tensor_maps_come_as_from_tritons_wrapper(monkeypatch) -> None:
    """Triton's own code is the oracle of what a compiled kernel takes for its descriptors."""
    utils = SimpleNamespace(fill_tma_descriptor=lambda *arguments: ("map", *arguments))
    driver = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(triton.runtime, "driver", driver)
    enqueued = []
    kinds = {0: "tensordesc<fp8e4nv[64, 128]>", 1: "tensordesc<bf16[1, 32, 64]>", 2: "*bf16", 3: "i32", 4: "constexpr"}
    flat = {"swizzle": 3, "elem_size": 1, "elem_type": 8, "block_size": [64, 128], "fp4_padded": False}
    deep = {"swizzle": 2, "elem_size": 2, "elem_type": 10, "block_size": [1, 32, 64], "fp4_padded": False}
    wrapper = nvidia.wrap_handle_tensordesc(lambda *arguments: enqueued.append(arguments), kinds, [flat, deep])
    codes, weights = torch.zeros(256, 512, dtype=torch.float8_e4m3fn), torch.zeros(3, 64, 128, dtype=torch.bfloat16)
    maps = (
        launch.Described(codes, codes.shape, codes.stride(), [64, 128]),
        launch.Described(weights, [3, 64, 128], [8192, 128, 1], [1, 32, 64]),
    )
    before = nvidia._BASE_ARGS_FORMAT_LEN
    for call in (wrapper, launch._mapped(wrapper, [flat, deep], before)):
        call(*range(before), *maps, 7, 8, None)
    assert enqueued[0] == enqueued[1]
    assert len(enqueued[0]) == before + 5 + 7 + 3

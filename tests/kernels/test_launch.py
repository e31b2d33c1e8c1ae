"""What makes a launch compile its kernel anew; the driver and the compiler are stand-ins."""

import sys
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
from duotone import formats  # noqa: E402
from duotone.dispatch.casts import cast_of  # noqa: E402
from duotone.kernels import launch  # noqa: E402

CAST_CALLS = 8
"""Numbers only fall."""


@pytest.fixture
def made(monkeypatch):
    """A kernel of (x, live, N) with one constant, what it was compiled for, and what was enqueued."""
    compiled, enqueued = [], []

    def compile_for(self, given):
        compiled.append(given)
        return lambda programs, y, z, stream, *arguments: enqueued.append((programs, arguments)), ()

    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch.Launch, "_compile", compile_for)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: -1, raising=False)  # of a CPU tensor
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    return launch.Kernel(SimpleNamespace()).bind({"T": 8}), compiled, enqueued


def test_what_triton_specializes_on_compiles_anew(made) -> None:
    call, compiled, _ = made
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


def test_a_tensor_that_is_none_stays_none(made) -> None:
    call, _, enqueued = made
    x = torch.zeros(64)
    call(1, (x, None), (32,))
    assert enqueued == [(1, (x.data_ptr(), None, 32, None))]


def test_a_cast_of_both_planes_keeps_to_its_calls(made) -> None:
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

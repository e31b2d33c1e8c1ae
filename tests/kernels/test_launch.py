"""What makes a launch compile its kernel anew; the driver and the compiler are stand-ins."""

import itertools
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
import triton.backends.nvidia.driver as nvidia  # noqa: E402

from duotone.kernels import launch  # noqa: E402

NOWHERE = itertools.count(2000)
"""Numbers of cards that no machine has, so that launches which do nothing stay apart in caches."""


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

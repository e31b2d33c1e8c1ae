"""Shared test data and switches."""

import gc
import os
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"  # read when Hugging Face's packages are imported: tests use no network
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process that compiles starts a pool of others
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # what the processor has; else six programs are compiled first
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")  # garbage is collected as often as set below
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored, and by all processes that tests start
WORKERS = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
torch.set_num_threads(max(1, torch.get_num_threads() // WORKERS))
os.environ.setdefault("OMP_NUM_THREADS", str(torch.get_num_threads()))  # for the processes that tests start
for device in (torch.cuda, torch.xpu, torch.mtia):  # else torch.manual_seed stores formatted stacks
    if not device.is_available():
        device.manual_seed_all = lambda seed: None
torch._C._dynamo.guards.profile_guard_manager = lambda *arguments: 0.0  # of no use here: it flushes caches
gc.disable()  # until all tests are collected: what imports and collection make stays


def pytest_xdist_auto_num_workers() -> int:
    """One process more than the cores that it may use, because tests also wait for processes that they start."""
    return len(os.sched_getaffinity(0)) + 1


def pytest_collection_finish() -> None:
    """Let the garbage collector leave out what stays: 750,000 objects, over which it walked again and again.

    It runs less often than by default: a tracing compiler makes many objects, and few of them are cycles.
    """
    gc.freeze()
    gc.set_threshold(200_000, 10, 100)
    gc.enable()


SMALL_TENSORS = {"conversion", "formats", "optim", "tensor"}
"""Folders whose tensors gain less from threads than these cost where they wait for each other on a busy machine."""


@pytest.fixture(autouse=True, scope="module")
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if request.path.parent.name in SMALL_TENSORS else before)
    yield
    torch.set_num_threads(before)


COMPILED_CASTS = {"cli", "dispatch", "lab", "observe"}
"""Folders whose casts of large matrices are compiled, as they are for users. tests/dispatch compares the bits."""


@pytest.fixture(autouse=True, scope="module")
def _casts(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        if request.path.parent.name not in COMPILED_CASTS:
            patched.setattr("duotone.dispatch.stages.COMPILE_FROM", 1 << 30)
        yield


@pytest.fixture(autouse=True)
def _fresh_compiler(request: pytest.FixtureRequest) -> None:
    """Let no test see what Dynamo noted in another one.

    Dynamo compiles no frame again in which a compiled call ended in an exception, not even for another model.
    """
    if "torch._dynamo" in sys.modules and request.path.parent.name not in COMPILED_CASTS:
        torch._dynamo.reset()


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    torch.manual_seed(1234)


@pytest.fixture
def awkward() -> torch.Tensor:
    """fp32 (96, 160) with zeros, denormals, infinities, NaN of both signs, huge and tiny rows."""
    x = torch.randn(96, 160)
    x[3] = 0
    x[4, 8:40] = -0.0
    x[5] *= 1e-40
    x[6] *= 1e-37
    x[7] *= 1e37
    x[8] *= torch.logspace(-20, 20, 160)
    x[9, 5] = float("nan")
    x[9, 6] = torch.tensor(-1, dtype=torch.int32).view(torch.float32)  # a NaN with its sign bit set
    x[10, 7], x[11, 9] = float("inf"), -float("inf")
    x[12, 64:96] = float("nan")
    return x


@pytest.fixture
def te() -> Iterator[ModuleType]:
    """`transformer_engine.pytorch` as scripts import it after `duotone.compat.te.install()`, for one test."""
    compat = import_module("duotone.compat.te")
    compat.install()
    yield import_module("transformer_engine.pytorch")
    sys.meta_path.remove(compat.FINDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == "transformer_engine"]:
        del sys.modules[name]

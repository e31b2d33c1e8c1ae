"""Makes the helpers of this folder importable from its tests.

Every buffer that is allocated holds NaN or a byte pattern first, so that what no kernel writes shows.
"""

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent))
PATTERN = 0xA5
if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the processors, and the references are computed on them


def pytest_configure(config: pytest.Config) -> None:
    """torch warns as it turns this on: a failure there would leave it on for all tests that follow."""
    config.addinivalue_line("filterwarnings", "ignore:Synchronization debug mode is a prototype:UserWarning")


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    """Without a device only test_imports.py is collected: to skip thousands of tests one by one takes seconds."""
    is_test = collection_path.name.startswith("test_") and collection_path.name != "test_imports.py"
    return True if is_test and not torch.cuda.is_available() else None


def poisoned(t: Tensor) -> Tensor:
    if t.is_cuda and t.numel():
        t.fill_(torch.nan if t.is_floating_point() and t.dtype.itemsize > 1 else PATTERN % 128)
    return t


@pytest.fixture(autouse=True, scope="session")
def backward_has_a_context() -> None:
    """torch warns where the first product of a process is one of a backward, whose thread has no CUDA context yet."""
    if torch.cuda.is_available():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            x = torch.ones(16, 16, device="cuda", requires_grad=True)
            (x @ x).sum().backward()


@pytest.fixture(autouse=True)
def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("empty", "empty_like", "empty_strided"):
        plain = getattr(torch, name)

        def filled(*args: Any, _plain: Any = plain, **kwargs: Any) -> Tensor:
            result = _plain(*args, **kwargs)
            compiling = torch.compiler.is_compiling() or type(result) is not Tensor
            return result if compiling else poisoned(result)

        monkeypatch.setattr(torch, name, filled)

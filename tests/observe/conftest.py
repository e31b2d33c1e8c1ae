"""Casts in plain torch on one thread: the same bits, and no test waits for a compiler or a busy processor."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode


@pytest.fixture(autouse=True)
def _plain_casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("duotone.dispatch.stages.compiler_reason", lambda: "off in these tests")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


READS = ("_local_scalar_dense", "nonzero", "is_nonzero", "item", "equal", "masked_select", "unique")


class NoSynchronisation(TorchDispatchMode):
    """Fails on every operator whose result the host has to wait for."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func._schema.name.split("::")[1] not in READS, f"{func} waits for the device"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def no_synchronisation() -> type[NoSynchronisation]:
    return NoSynchronisation

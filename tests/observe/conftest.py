"""Casts in plain torch on one thread: the same bits, and no test waits for a compiler or a busy processor."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _plain_casts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("duotone.dispatch.stages.compiler_reason", lambda: "off in these tests")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)

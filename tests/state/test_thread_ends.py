"""What a thread leaves to torch when it ends."""

import threading
import weakref
from collections.abc import Callable

import pytest
import torch

import duotone
from duotone.state import torch_private
from duotone.state.rolling import KEY


def in_thread(function: Callable[[], object]) -> object:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def train() -> None:
    m = duotone.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "fp8-delayed", rules=())
    with duotone.autocast("fp8-delayed"):  # else a region that another test left open gives a warning
        m(torch.randn(4, 32)).sum().backward()


@pytest.mark.skipif(not hasattr(torch._C, "_remove_obj_from_tls"), reason="this torch removes no object of a thread")
def test_a_thread_that_trained_under_delayed_scaling_leaves_no_object_to_torch() -> None:
    """Torch drops it after Python has ended the thread. If the interpreter is gone by then, the process aborts."""

    def mark() -> "weakref.ref[object]":
        train()
        return weakref.ref(torch_private.ENDING.__dict__[KEY])

    def before_and_after() -> tuple[bool, bool]:
        train()
        before = torch_private.has_thread_object(KEY)
        torch_private.ENDING.__dict__.clear()
        return before, torch_private.has_thread_object(KEY)

    assert in_thread(mark)() is None  # type: ignore[operator]  # Python destroys it with the thread
    assert in_thread(before_and_after) == (True, False)

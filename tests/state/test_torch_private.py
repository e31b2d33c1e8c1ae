"""What torch keeps for this room without public names."""

import gc
import sys
import threading
import weakref

from duotone.state import torch_private


class Referent:
    pass


def test_the_object_of_a_thread_is_counted_once_while_torch_holds_it() -> None:
    """torch 2.11 counts it not at all and gives up a reference later, which frees what others still use."""
    referent, other = Referent(), Referent()
    before = sys.getrefcount(referent)
    torch_private.set_thread_object("test", referent)
    assert sys.getrefcount(referent) == before + 1 and torch_private.thread_object("test") is referent
    torch_private.set_thread_object("test", other)
    assert sys.getrefcount(referent) == before


def test_a_thread_that_ends_gives_up_its_object_and_no_more() -> None:
    referents = [Referent() for _ in range(20)]
    counts = [sys.getrefcount(referent) for referent in referents]
    for referent in referents:
        thread = threading.Thread(target=torch_private.set_thread_object, args=("test", referent))
        thread.start()
        thread.join()
    del thread
    gc.collect()
    assert [sys.getrefcount(referent) for referent in referents][:-1] == counts[:-1]
    last = weakref.ref(referents[0])
    del referents, referent
    gc.collect()
    assert last() is None

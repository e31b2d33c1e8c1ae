"""What torch keeps for this room without public names."""

import gc
import sys
import threading
import weakref

from duotone.state import torch_private


class Thing:
    pass


def test_the_object_of_a_thread_is_counted_once_while_torch_holds_it() -> None:
    """torch 2.11 counts it not at all and gives up a reference later, which frees what others still use."""
    thing, other = Thing(), Thing()
    before = sys.getrefcount(thing)
    torch_private.set_thread_object("test", thing)
    assert sys.getrefcount(thing) == before + 1 and torch_private.thread_object("test") is thing
    torch_private.set_thread_object("test", other)
    assert sys.getrefcount(thing) == before


def test_a_thread_that_ends_gives_up_its_object_and_no_more() -> None:
    things = [Thing() for _ in range(20)]
    counts = [sys.getrefcount(thing) for thing in things]
    for thing in things:
        thread = threading.Thread(target=torch_private.set_thread_object, args=("test", thing))
        thread.start()
        thread.join()
    del thread
    gc.collect()
    assert [sys.getrefcount(thing) for thing in things][:-1] == counts[:-1]
    last = weakref.ref(things[0])
    del things, thing
    gc.collect()
    assert last() is None

"""A region of a context manager. A new thread starts in the regions that were open in its creator.

Python does not show which thread created another. So each entry and exit of a region records the threads that are
alive, and the regions that were open when a thread started. The creator may be the main thread or a thread with an open
region. If all of these had the same regions, the new thread starts in them. Otherwise it must enter a region.
"""

import asyncio
import math
import threading
import weakref
from contextvars import Token
from typing import Any, NamedTuple


class Region:
    """One entry into a context manager, compared by identity. `value` is what it decides."""

    is_open = True
    is_void = False
    """Whether another thread or task left the region than the one that entered it, or an interrupt broke its entry or
    exit. No call follows a void region."""

    in_capture = False
    """Whether it was entered during the capture of a CUDA graph."""

    run: int | None = None
    """The backward that ran when it was entered, -1 for none."""

    nodes: int | None = None
    """How many nodes autograd had made in this thread when it was entered; None in traced code."""

    is_followed = False
    """Whether a module asked for it, or for a region inside of it. The guards of compiled code ask too."""

    token: "Token[tuple[Region, ...]] | None" = None
    """Identifies the context that entered it; None in traced code."""

    @property
    def value(self) -> object:
        """What it decides: regions of equal values decide the same."""
        raise NotImplementedError


class Unknown(Region):
    """The region of a thread that was started while threads or tasks had different regions open."""

    is_open = False


UNKNOWN = Unknown()


Regions = tuple[Any, ...]
Owner = tuple[threading.Thread, asyncio.Task[object] | None]


class Entered(NamedTuple):
    """`time` counts enterings; `owner` is the thread and the task; `regions` is the stack with this one innermost."""

    time: int
    owner: "Owner"
    regions: Regions

    @property
    def lives(self) -> bool:
        """Whether the thread, and the task if there is one, has not ended."""
        thread, task = self.owner
        return thread.is_alive() and not (task is not None and task.done())


class Starts:
    """The open regions of all threads of one stack, and what each thread started from."""

    def __init__(self) -> None:
        self._time = 0
        self.open: dict[Region, Entered] = {}
        self._first_seen: weakref.WeakKeyDictionary[threading.Thread, int] = weakref.WeakKeyDictionary()
        self._start: weakref.WeakKeyDictionary[threading.Thread, Regions] = weakref.WeakKeyDictionary()
        self._choosing: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = threading.RLock()  # a generator that is collected may leave its region at any time

    def record_entry(self, region: Region, regions: Regions) -> None:
        """Note that the calling thread opened a region; `regions` is its stack, with the new one last."""
        with self._lock:
            self._time += 1
            for thread in threading.enumerate():
                self._first_seen.setdefault(thread, self._time)
            thread = threading.current_thread()
            self._choosing.add(thread)
            self.open[region] = Entered(self._time, (thread, _task()), regions)

    def record_exit(self, region: Region) -> None:
        """Threads that were started in the region keep what they started from."""
        with self._lock:
            entered = self.open.get(region)
            if entered is None:
                return
            for thread in threading.enumerate():
                if entered.time < self._first_seen.get(thread, math.inf) and thread not in self._start:
                    self._start[thread] = self._regions_at_start(thread)
            del self.open[region]

    def regions_of_thread(self) -> tuple[Regions, bool]:
        """What the calling thread started from, and whether that is final.

        It is not final for threads from outside of Python: nobody sees their start, so they use what is open now.
        """
        with self._lock:
            thread = threading.current_thread()
            regions = self._start.get(thread)
            if regions is None:
                regions = self._regions_at_start(thread)
                if isinstance(thread, threading._DummyThread):
                    return regions, False
                self._start[thread] = regions
            return regions, True

    def leaves_out_thread(self) -> bool:
        """Whether the calling thread is not the main one and never entered a region."""
        thread = threading.current_thread()
        return thread is not threading.main_thread() and thread not in self._choosing

    def _regions_at_start(self, thread: threading.Thread) -> Regions:
        first_seen = self._first_seen.get(thread, math.inf)
        innermost: dict[Owner, Regions] = {}
        for entered in list(self.open.values()):
            if entered.time < first_seen and entered.lives and entered.owner[0] is not thread:
                innermost[entered.owner] = tuple([region for region in entered.regions if region.is_open])
        if innermost:
            innermost.setdefault((threading.main_thread(), None), ())
        decisions = {regions[-1].value if regions else None for regions in innermost.values()}
        return (UNKNOWN,) if len(decisions) > 1 else next(iter(innermost.values()), ())


def _task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no event loop runs in this thread
        return None

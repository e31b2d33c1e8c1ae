"""Ctrl-C at any line of the library inside of a call."""

import linecache
import sys
from collections.abc import Callable, Collection

import duotone

INSIDE = duotone.__file__.rsplit("/", 1)[0]


def interrupt(call: Callable[[], object], at: int, functions: Collection[str] = ()) -> int:
    """Raise KeyboardInterrupt at the line of that number, 0 for none. Returns how many lines ran.

    Lines of these functions count, of all by default.

    The line `try` with which a region is left does not count: nothing could catch an interrupt there. Nor do lines of
    `with`: Python handles no signal between a block and the release of its lock, but a tracer would raise there.
    """
    seen = 0

    def trace(frame, event, _):  # type: ignore[no-untyped-def]
        nonlocal seen
        code = frame.f_code
        if not code.co_filename.startswith(INSIDE) or code.co_name in ("__hash__", "__del__"):
            return None
        is_entry = code.co_name == "__exit__" and frame.f_lineno == code.co_firstlineno + 1
        is_with = linecache.getline(code.co_filename, frame.f_lineno).lstrip().startswith("with ")
        is_named = not functions or code.co_name in functions
        if event == "line" and is_named and not (is_entry or is_with):
            seen += 1
            if seen == at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert at
    finally:
        sys.settrace(before)
    return seen

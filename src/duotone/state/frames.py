"""What a forward drew (seeds, delayed scales, its region), for the recompute of that very forward.

A checkpoint runs a forward in a frame, and again inside a backward. The frame is an object of torch that lives as long
as the graph: the `_CheckpointFrame` of a non-reentrant `torch.utils.checkpoint`, which its hooks for saved tensors
hold, or the `ctx` of an autograd.Function that runs the forward, as reentrant checkpoints are, torch's and others.
Values are kept on that object, by key and in order, and the recompute finds the object on Python's stack: so neither
two calls, nor microbatches, nor nested frames are mixed up. Outside of frames nothing is kept.
"""

import sys
from collections.abc import Hashable, Iterator
from types import FrameType
from typing import Any

import torch

from duotone.errors import UserError

is_forward_grad_enabled = torch._C._is_fwd_grad_enabled
_HOOKS: Any = torch._C._autograd  # type: ignore[attr-defined]
top_hooks = _HOOKS._top_saved_tensors_default_hooks
NAME = "_duotone_record"
PACK = "_checkpoint_hook.__init__.<locals>.pack_hook"
CHECKPOINT, ENGINE, COMPILED = "checkpoint.py", "_engine_run_backward", "_functorch"


class Record:
    """Values by key, in the order of a forward, and how far the newest run of its recompute has come."""

    def __init__(self) -> None:
        self.values: dict[Hashable, list[Any]] = {}
        self.first: Any = None
        self.run: Any = None
        self.taken: dict[Hashable, int] = {}

    def enter(self, run: Any) -> "Record":
        """The record for a run, which starts from the first values."""
        if run != self.run:
            self.run, self.taken = run, {}
            self.first = run if self.first is None else self.first
        return self

    def holds(self, key: Hashable) -> bool:
        """Whether the forward drew a value under that key that this run has not taken."""
        return self.taken.get(key, 0) < len(self.values.get(key, ()))

    def take(self, key: Hashable, advances: bool = True) -> Any:
        """The next value. UserError where the recompute draws what its forward did not."""
        if not self.holds(key):
            raise UserError(
                "a recompute inside a backward draws more than its forward did; let the checkpointed function do the "
                "same both times"
            )
        at = self.taken.get(key, 0)
        if advances:
            self.taken[key] = at + 1
        return self.values[key][at]

    @property
    def is_first_run(self) -> bool:
        return self.run == self.first


def remember(key: Hashable, value: Any) -> None:
    """Keep a value in every frame that runs its forward now; inference has none."""
    if is_forward_grad_enabled():  # only the forward of an autograd.Function, or inference mode, is without
        if top_hooks(True) is None:
            return
    elif torch.is_inference_mode_enabled():
        return
    for holder in _forward_holders():
        record = getattr(holder, NAME, None)
        if record is None:
            record = Record()
            setattr(holder, NAME, record)
        record.values.setdefault(key, []).append(value)


def recomputed() -> Record | None:
    """The record of the forward that runs again now, innermost; None where no frame recomputes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == ENGINE or (code.co_name == "backward" and COMPILED in code.co_filename):
            return None  # a hook that the engine called, or a compiled graph that recomputes by itself
        if code.co_name == "unpack_hook" and code.co_filename.endswith(CHECKPOINT):
            given = frame.f_locals
            record = getattr(given.get("frame"), NAME, None)
            if record is not None:
                return record.enter(given.get("gid"))
        elif code.co_name == "backward" and (ctx := _ctx_of(frame)) is not None:
            record = getattr(ctx, NAME, None)
            if record is not None:
                return record.enter(torch._C._current_graph_task_id())
        frame = frame.f_back
    return None


def _forward_holders() -> Iterator[Any]:
    """The objects of all frames that run their forward: by the stack of hooks, and by Python's stack."""
    for pack in _pack_hooks():
        if getattr(pack, "__qualname__", "") == PACK:
            yield dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))["frame"].cell_contents
    if is_forward_grad_enabled():
        return
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "forward" and COMPILED not in code.co_filename and (ctx := _ctx_of(frame)) is not None:
            yield ctx
        frame = frame.f_back


def _pack_hooks() -> list[Any]:
    """The first halves of all hooks for saved tensors, outermost last; torch shows only the top of that stack."""
    pairs = []
    while (top := top_hooks(True)) is not None:
        pairs.append(top)
        _HOOKS._pop_saved_tensors_default_hooks()
    for pair in reversed(pairs):
        _HOOKS._push_saved_tensors_default_hooks(*pair)
    return [pack for pack, _ in pairs]


def _ctx_of(frame: FrameType) -> Any:
    """The context of the method of an autograd.Function that a frame of Python runs, None where it runs none."""
    names = frame.f_code.co_varnames
    if not names or names[0] in ("self", "cls"):
        return None
    ctx = frame.f_locals.get(names[0])
    return ctx if isinstance(ctx, torch.autograd.function.FunctionCtx) else None

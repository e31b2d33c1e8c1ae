"""Values of a forward (seeds, delayed scales, its region) for the recompute of the same forward.

A checkpoint runs a forward in a frame, and again inside a backward. The frame is an object of torch that lives as long
as the graph:

- of a non-reentrant `torch.utils.checkpoint`, the object that its hooks for saved tensors hold;
- of an autograd.Function that runs the forward, as reentrant checkpoints do, its `ctx`.

Values are kept on that object, by key and in order. The recompute finds the object on Python's stack, so calls,
microbatches and nested frames stay apart. Outside of frames nothing is kept.

A compiled graph that recomputes by itself keeps delayed scales on its own `ctx`: all calls of a graph have one. Its
seeds are among the tensors that it saves.
"""

import sys
import threading
import weakref
from collections.abc import Hashable, Sequence
from types import FrameType
from typing import Any

import torch
from torch.autograd.function import FunctionCtx

from duotone.errors import UserError
from duotone.state import torch_private
from duotone.state.torch_private import count_nodes, is_forward_grad_enabled, top_saved_hooks

NAME, AROUND, GRAPH = "_duotone_record", "_duotone_around", "_duotone_graph"


class Forward(threading.local):
    """The innermost autograd.Function of Duotone whose forward runs in this thread."""

    is_alone = False
    """Whether no other autograd.Function runs it, so that none recomputes it."""
    graph: tuple[int, weakref.ref[FunctionCtx]] | None = None
    """The compiled graph that was found last, by `count_nodes`: it runs as long as autograd makes no other node."""


FORWARD = Forward()


class Record:
    """Values by key, in the order of a forward, and how far the newest run of its recompute has come."""

    def __init__(self) -> None:
        self.values: dict[Hashable, list[Any]] = {}
        self.first: int | None = None
        self.run: int | None = None
        self.positions: dict[Hashable, int] = {}
        """By key: how many values the newest run has drawn."""

    def enter(self, run: int) -> "Record":
        """The record for a run (a backward, by its number). A new run starts from the first values."""
        if run != self.run:
            self.run, self.positions = run, {}
            self.first = run if self.first is None else self.first
        return self

    def holds(self, key: Hashable) -> bool:
        """Whether the forward drew a value under that key that this run has not taken."""
        return self.positions.get(key, 0) < len(self.values.get(key, ()))

    def take(self, key: Hashable, advances: bool = True) -> Any:
        """The next value. UserError if the recompute draws more values than its forward."""
        if not self.holds(key):
            raise UserError(
                "a recompute inside a backward draws more than its forward did; let the checkpointed function do the "
                "same both times"
            )
        at = self.positions.get(key, 0)
        if advances:
            self.positions[key] = at + 1
        return self.values[key][at]

    @property
    def is_first_run(self) -> bool:
        """Whether the current run is the first one that read this record."""
        return self.run == self.first


def remember(key: Hashable, value: object, once: bool = False) -> None:
    """Keep a value in every frame that runs its forward now. Inference has none.

    `once`: only in frames that have none under the key.
    """
    for record in _records():
        values = record.values.setdefault(key, [])
        if not (once and values):
            values.append(value)


def remember_for_graph(values: Sequence[tuple[Hashable, object]]) -> None:
    """`remember` for pairs of keys and values, which the backward of a compiled graph that runs now finds, too."""
    for record in _records(values):
        for key, value in values:
            record.values.setdefault(key, []).append(value)


def _records(for_graph: Sequence[tuple[Hashable, object]] = ()) -> list[Record]:
    """The records of the frames that run their forward now. A compiled graph among them keeps `for_graph`."""
    if FORWARD.is_alone or is_forward_grad_enabled():
        if top_saved_hooks(True) is None:
            return []
    elif torch.is_inference_mode_enabled():
        return []
    graph, contexts = _functions()
    if for_graph and graph is not None:
        kept: dict[Hashable, object] = vars(graph).setdefault(GRAPH, {})
        for key, value in for_graph:
            kept.setdefault(key, value)
    records = list[Record]()
    for holder in _checkpoints() + contexts:
        record = getattr(holder, NAME, None)
        if record is None:
            record = Record()
            setattr(holder, NAME, record)
        records.append(record)
    return records


def of_graph(key: Hashable) -> Any:
    """The value that the forward of the compiled graph kept whose backward runs now, or None."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != torch_private.ENGINE:
        if frame.f_code.co_name == "backward" and (ctx := _ctx_of(frame)):
            return getattr(ctx, GRAPH, {}).get(key) if _is_compiled(frame) else None
        frame = frame.f_back
    return None


def is_trace_recomputed() -> bool:
    """In a trace: whether a checkpoint inside or outside of the graph runs again what is traced now."""
    return torch_private.is_graph_recomputed() or bool(_checkpoints() or _functions()[1])


def recomputed() -> Record | None:
    """The record of the forward that runs again now, innermost. None if no frame recomputes."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == torch_private.ENGINE:
            return None  # a hook that the engine called
        holder, run = None, -1
        if code.co_name == torch_private.UNPACK_HOOK and code.co_filename.endswith(torch_private.CHECKPOINT_FILE):
            holder, run = frame.f_locals.get("frame"), frame.f_locals.get("gid")
        elif code.co_name == "backward":
            if _is_compiled(frame):
                return None
            holder, run = _ctx_of(frame), torch_private.graph_task_id()
        record = getattr(holder, NAME, None)
        if record is not None:
            return record.enter(run)
        frame = frame.f_back
    return None


def _checkpoints() -> list[object]:
    """The objects of the non-reentrant checkpoints that run their forward: by the stack of hooks."""
    holders: list[object] = []
    for pack in _pack_hooks() if top_saved_hooks(True) is not None else ():
        if getattr(pack, "__qualname__", "") == torch_private.PACK_HOOK:
            cells = dict(zip(pack.__code__.co_freevars, pack.__closure__, strict=True))
            holders.append(cells["frame"].cell_contents)
    return holders


Functions = tuple[FunctionCtx | None, list[object]]


def _functions() -> Functions:
    """The autograd.Functions that run their forward: the innermost one if it is a compiled graph, and all others."""
    if FORWARD.is_alone or is_forward_grad_enabled():
        return None, []
    nodes, known = count_nodes(), FORWARD.graph
    if known is not None and known[0] == nodes and (ctx := known[1]()) is not None:
        return ctx, getattr(ctx, AROUND)
    graph, around = _functions_around(sys._getframe(1))
    FORWARD.graph = None if graph is None else (nodes, weakref.ref(graph))
    return graph, around


def _functions_around(frame: FrameType | None) -> Functions:
    """`_functions` of a Python frame and those around it. Compiled graphs are not among the others.

    Each context remembers those around it, so that a forward walks up Python's stack once.
    """
    while frame is not None:
        if frame.f_code.co_name == "forward" and (ctx := _ctx_of(frame)):
            around: list[object] | None = getattr(ctx, AROUND, None)
            if around is None:
                around = _functions_around(frame.f_back)[1]
                setattr(ctx, AROUND, around)
            return (ctx, around) if _is_compiled(frame) else (None, [ctx, *around])
        frame = frame.f_back
    return None, []


def _is_compiled(frame: FrameType) -> bool:
    """Whether a method of an autograd.Function is that of a compiled graph."""
    return torch_private.COMPILED in frame.f_code.co_filename


def _pack_hooks() -> list[Any]:
    """The first halves of all hooks for saved tensors, outermost last."""
    pairs: list[tuple[object, object]] = []
    while (top := top_saved_hooks(True)) is not None:
        pairs.append(top)
        torch_private.pop_saved_hooks()
    for pair in reversed(pairs):
        torch_private.push_saved_hooks(*pair)
    return [pack for pack, _ in pairs]


def _ctx_of(frame: FrameType) -> FunctionCtx | None:
    """The context of the method of an autograd.Function that a Python frame runs, None if it runs none."""
    names = frame.f_code.co_varnames
    if not names or names[0] in ("self", "cls"):
        return None
    ctx = frame.f_locals.get(names[0])
    return ctx if isinstance(ctx, FunctionCtx) else None

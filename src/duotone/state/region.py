"""Open regions of `autocast` and `quantized_model_init`, and the region and the mode of a call.

There is one stack for each thread and async task, in eager and in traced code. A stack lives in a ContextVar, so an
async task starts with the regions of its creator. Dynamo traces no ContextVar, but its guards read the attributes of a
module object at every call, computed ones too: so a `Stack` is such an object.
"""

import sys
import types
import warnings
from contextvars import ContextVar
from enum import Enum
from typing import Any, Generic, NamedTuple, Self, TypeVar

import torch

from duotone.capture import is_capturing
from duotone.errors import UserError
from duotone.numbered import never_compiled
from duotone.recipes.builtin import HighPrecision
from duotone.recipes.recipe import Recipe
from duotone.state import frames
from duotone.state.starts import UNKNOWN, Region, Starts
from duotone.state.torch_private import (
    PIPELINES,
    SHAPES,
    count_nodes,
    graph_task_id,
    in_pipeline,
    is_forward_grad_enabled,
    top_saved_hooks,
    write_in_trace,
)


class AmaxMode(Enum):
    """What a call does with its amaxes. The values are arguments of custom ops, and constants of graphs."""

    USE = "use"
    """No gradient is tracked: scale with the present scales and record nothing."""
    RECORD = "record"
    """A forward: record the amax for the next step."""
    RECOMPUTE = "recompute"
    """Forward code inside a backward: scale as the forward did; a forward that deferred its recording records here."""
    DEFER = "defer"
    """A forward without a graph in an autograd.Function, as reentrant checkpoints run it: the recompute records."""
    FIT = "fit"
    """As USE, where other code may have written the weight or the scale: a scale that does not fit gives way to one
    that does."""
    WRITE = "write"
    """A write of values that no step of an optimizer with masters made. As RECORD, but the scale fits the values."""
    STEP = "step"
    """A write by a step of an optimizer with masters. As RECORD, and inside of a backward it is no recompute."""

    __hash__ = object.__hash__  # Enum's is a Python function, and plans are looked up by their mode


EVALUATION = AmaxMode.USE, AmaxMode.FIT
"""Modes that leave the state of delayed scaling as it is."""
WRITES = AmaxMode.WRITE, AmaxMode.STEP
AMAX_MODES = {mode.value: mode for mode in AmaxMode}


def in_backward() -> bool:
    """Whether a backward runs in this thread. Forward code inside of one recomputes."""
    return graph_task_id() != -1


def mode_now() -> AmaxMode:
    """The mode of forward code that runs now. A program of torch.export evaluates, also where gradients are enabled."""
    if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
        return AmaxMode.RECORD if graph_task_id() == -1 else AmaxMode.RECOMPUTE
    # Inference mode and the forward of an autograd.Function alone switch off gradients of forward mode too.
    if is_forward_grad_enabled() or torch.is_inference_mode_enabled():
        return AmaxMode.USE
    return AmaxMode.DEFER


R = TypeVar("R", bound=Region)


class Stack(types.ModuleType, Generic[R]):
    """The open regions of the calling thread and task as `regions`, innermost last."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.variable: ContextVar[tuple[Any, ...]] = ContextVar(name)
        self.starts = Starts()
        self.shapes_only: tuple[R, ...] | None = None
        """Other regions that hold while only shapes matter, if any."""
        self.was_followed = False
        """Whether any module of the process asked, in a region or outside."""

    @property
    @never_compiled
    def regions(self) -> tuple[R, ...]:
        """The open regions. Warns if the thread has none while another thread has some."""
        if self.shapes_only is not None and PIPELINES in sys.modules and in_pipeline(SHAPES):
            return self.shapes_only
        regions = self.variable.get(None)
        if regions is None or (regions and regions[-1].is_void):
            regions = self.current()
        if graph_task_id() != -1 or top_saved_hooks(True) is not None or not is_forward_grad_enabled():
            regions = self._around_frame(regions)
        if not regions and self.starts.open and self.starts.leaves_out_thread():
            warnings.warn(
                f"this thread was started outside of {self.__name__}, so it goes by what its modules have themselves, "
                f"while a region is open in another thread; enter {self.__name__} in this thread to choose",
                stacklevel=5,
            )
        self.was_followed = True
        if regions and regions[-1].is_open:
            regions[-1].is_followed = True
        return regions

    @regions.setter
    @never_compiled
    def regions(self, regions: tuple[R, ...]) -> None:
        """Traced code entered and left regions. Others stay, because a recompute does not see all open regions."""
        before = self.regions
        new = [region for region in regions if region not in before]
        for region in new:
            region.run = graph_task_id()
        self.variable.set((*[each for each in self.current() if each in regions or each not in before], *new))

    def _around_frame(self, regions: tuple[R, ...]) -> tuple[R, ...]:
        """The regions around the forward of a checkpoint that recomputes, unless it has entered one. Else `regions`."""
        key, run = ("regions", self.__name__), graph_task_id()
        if run != -1 and not (regions and regions[-1].run == run):
            record = frames.recomputed()
            if record is not None and record.holds(key):
                regions = record.take(key, advances=False)
        frames.remember(key, regions, once=True)
        return regions

    @property
    def defers(self) -> bool:
        """Whether a call without gradients runs in the forward of an autograd.Function. Guards ask at every call."""
        return not is_forward_grad_enabled() and not torch.is_inference_mode_enabled()

    def current(self) -> tuple[R, ...]:
        """`regions`, without the warning for a thread that has none."""
        regions = self.variable.get(None)
        if regions is None:
            regions, is_final = self.starts.regions_of_thread()
            if is_final:
                self.variable.set(regions)
        if regions and regions[-1].is_void:
            regions = tuple([region for region in regions if not region.is_void])
            self.variable.set(regions)
        return regions

    def ran_in_vain(self, region: R) -> bool:
        """Whether a forward with gradients ran in a region that has ended, and nothing in it asked for the region.

        False where that cannot be known: in traced code, in a forward without gradients, if another thread or task
        left the region, and on a GPU after any module asked, because a CUDA graph replays without asking.
        """
        if region.nodes is None or region.is_followed or region.is_void or region.nodes == count_nodes():
            return False
        return not (self.was_followed and torch.cuda.is_initialized())

    def enter(self, region: R) -> None:
        """Open a region inside of those that are open."""
        self._around_frame(self.current())
        regions = (*self.current(), region)
        region.in_capture, region.run, region.nodes = is_capturing(), graph_task_id(), count_nodes()
        region.token = self.variable.set(regions)
        self.starts.record_entry(region, regions)

    def leave(self, region: R) -> None:
        """Close a region, which need not be the innermost."""
        opened = self.current()
        regions = without(opened, region)
        inside = opened[opened.index(region) :] if region in opened else ()  # they may end after it
        region.is_followed |= any(each.is_followed for each in inside)
        if regions and region.is_followed and regions[-1].is_open:
            regions[-1].is_followed = True
        self.starts.record_exit(region)
        region.is_open = False
        if region.token is not None:
            try:
                self.variable.reset(region.token)
            except (ValueError, RuntimeError):  # another context entered it, out of reach; or it is reset
                region.is_void = True
        self.variable.set(regions)


def without(regions: tuple[R, ...], region: R) -> tuple[R, ...]:
    """The regions except this one, wherever it is."""
    return tuple([each for each in regions if each is not region])


def innermost(regions: tuple[R, ...], name: str) -> R | None:
    """The innermost of the regions of `name`, None without any.

    Raises UserError in a thread that was started while threads or tasks had different regions open.
    """
    if not regions:
        return None
    if regions[-1] is UNKNOWN:
        raise UserError(
            f"this thread was started while {name} regions of several threads or tasks were open, and they differ; "
            f"enter duotone.{name} in this thread"
        )
    return regions[-1]


class RegionManager(Generic[R]):
    """A context manager that opens a region of `stack`, one at a time. No exit brings back a copy of the stack."""

    stack: Stack[R]
    region_type: type[R]
    _options: tuple[Any, ...]
    _region: R | None = None

    def __repr__(self) -> str:
        return f"{type(self).__name__}{self._options}"

    def __enter__(self) -> Self:
        if self._region is not None:
            name = type(self).__name__
            raise RuntimeError(f"this {name} is entered already; make a new one for each nested region")
        region = self.region_type(*self._options)
        if torch.compiler.is_dynamo_compiling():
            write_in_trace(self._write, region, (*self.stack.regions, region))
            return self
        try:
            self._region = region
            self.stack.enter(region)
            return self
        except BaseException:  # Ctrl-C: the block does not begin, so nothing else would end the region
            self._abandon(region)
            raise

    def __exit__(self, *exception: object) -> None:
        try:
            region = self._region
            assert region is not None
            if torch.compiler.is_dynamo_compiling():
                write_in_trace(self._write, None, without(self.stack.regions, region))
            else:
                self.stack.leave(region)
                self._region = None
        except BaseException:  # Ctrl-C
            if self._region is not None:
                self._abandon(self._region)
            raise
        self.end(region, failed=exception[0] is not None)

    def _abandon(self, region: R) -> None:
        """End a region whose entry or exit was interrupted."""
        region.is_void = True
        self._region = None
        self.stack.leave(region)

    def _write(self, region: R | None, regions: tuple[R, ...]) -> None:
        self._region, self.stack.regions = region, regions

    def end(self, region: R, *, failed: bool) -> None:
        """Called when a region has ended, with an exception or without."""


class Recording(NamedTuple):
    """A delayed state that recorded an amax: its number, and the group that reduces it, "" for none."""

    state: str
    group: str
    in_capture: bool
    """Whether a CUDA graph records it at each replay."""


Recorded = set[Recording]


class AutocastRegion(Region):
    """The recipe and the name of the amax reduction group.

    `calibrating` is the recipe whose delayed scales are calibrated while modules compute in high precision, if any.
    `recorded` are the delayed states that roll when the region ends.
    """

    def __init__(self, recipe: Recipe, group: str, calibrating: Recipe | None) -> None:
        self.recipe = recipe
        self.group = group
        self.calibrating = calibrating
        self.recorded: Recorded = set()
        self.backwards = 0
        """How many backwards ended while states of a forward waited for the end of the region."""

    @property
    def value(self) -> object:
        return self.recipe.key, self.group, self.calibrating and self.calibrating.key


STACK: Stack[AutocastRegion] = Stack("duotone.autocast")
STACK.shapes_only = (AutocastRegion(HighPrecision(), "", None),)
"""While only shapes matter, no seed advances and no amax is recorded."""


def traced_mode() -> AmaxMode:
    """The mode of forward code that a trace sees now. Its graph knows by itself when it recomputes."""
    if torch.is_grad_enabled() and not torch.compiler._is_exporting_flag:
        return AmaxMode.RECORD
    return AmaxMode.DEFER if STACK.defers else AmaxMode.USE


def active_region() -> AutocastRegion | None:
    """The innermost enclosing region, or None outside of any. Raises UserError if `innermost` does."""
    return innermost(STACK.regions, "autocast")


def active_recipe() -> Recipe | None:
    """The recipe of the innermost enclosing autocast, or None outside of any."""
    region = active_region()
    return None if region is None else region.recipe


def outermost_region() -> AutocastRegion | None:
    """The outermost enclosing region that has not ended in the thread or task that entered it."""
    for region in STACK.current():
        if region.is_open:
            return region
    return None


class CallRegion:
    """The region whose recipe the calls of one module follow."""

    def __init__(self) -> None:
        self.newest: tuple[AutocastRegion | None] | None = None
        """The region of the newest forward that a backward may follow."""

    def now(self, mode: AmaxMode) -> AutocastRegion | None:
        """The region of this call: for a recompute that of its forward, which may have ended."""
        key = ("region", id(self))
        running = mode is AmaxMode.RECOMPUTE or (mode is not AmaxMode.RECORD and in_backward())
        record = frames.recomputed() if running else None
        if running and (around := STACK.variable.get(())) and around[-1].is_open:  # it is around the backward
            around[-1].is_followed = True
        if record is not None and record.holds(key):
            region: AutocastRegion | None = record.take(key)
        elif running and self.newest is not None:
            region = self.newest[0]
        else:
            regions = STACK.regions
            region = innermost(regions, "autocast") if regions else None
        if top_saved_hooks(True) is not None or not is_forward_grad_enabled():
            frames.remember(key, region)
        if mode is not AmaxMode.USE and not running and (self.newest is None or self.newest[0] is not region):
            self.newest = (region,)
        return region

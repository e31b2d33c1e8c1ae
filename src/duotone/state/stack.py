"""Regions that are open around a call: one stack for each thread and async task, in eager and in traced code.

Stacks live in a ContextVar, so that an async task starts with what its creator had. Dynamo traces no ContextVar, but
its guards read an attribute of a module object anew at every call, computed ones too: so a `Stack` is such an object.
"""

import types
import warnings
from contextvars import ContextVar, Token
from typing import Any

import torch

from duotone.state.starts import Starts


class Region:
    """One entering of a context manager, compared by identity; `value` is what it decides."""

    is_open = True
    is_void = False
    """Whether it was left in another thread or task than it was entered in, so that it counts nowhere any more."""

    token: "Token[tuple[Region, ...]] | None" = None
    """Tells the context in which it was entered; None in traced code."""

    @property
    def value(self) -> object:
        raise NotImplementedError


class Unknown(Region):
    """The region of a thread that was started while regions of several threads or tasks were open, which differ."""

    is_open = False


UNKNOWN = Unknown()


class Stack(types.ModuleType):
    """The open regions of the calling thread and task as `regions`, innermost last."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.variable: ContextVar[tuple[Any, ...]] = ContextVar(name)
        self.starts: Starts = Starts(UNKNOWN)

    @property
    def regions(self) -> tuple[Any, ...]:
        regions = self.current()
        if not regions and self.starts.leaves_out_thread():
            warnings.warn(
                f"this thread was started outside of {self.__name__}, so it goes by what its modules have themselves, "
                f"while a region is open in another thread; enter {self.__name__} in this thread to choose",
                stacklevel=5,
            )
        return regions

    @regions.setter
    def regions(self, regions: tuple[Any, ...]) -> None:
        self.variable.set(regions)

    def current(self) -> tuple[Any, ...]:
        """As `regions`, without a warning where a thread has none."""
        regions = self.variable.get(None)
        if regions is None:
            regions, is_final = self.starts.regions_of_thread()
            if is_final:
                self.variable.set(regions)
        if regions and regions[-1].is_void:
            regions = tuple([region for region in regions if not region.is_void])
            self.variable.set(regions)
        return regions

    def enter(self, region: Region) -> None:
        regions = (*self.current(), region)
        region.token = self.variable.set(regions)
        self.starts.entered(region, regions)

    def leave(self, region: Region) -> None:
        rest = without(self.current(), region)
        self.starts.left(region)
        region.is_open = False
        if region.token is not None:
            try:
                self.variable.reset(region.token)
            except ValueError:  # of another context, whose stack cannot be reached from here
                region.is_void = True
        self.variable.set(rest)


def without(regions: tuple[Any, ...], region: Region) -> tuple[Any, ...]:
    """The regions but that very one, wherever it is."""
    return tuple([each for each in regions if each is not region])


def enter(stack: Stack, region: Region) -> None:
    """Open the region innermost in this thread and task."""
    if torch.compiler.is_compiling():
        stack.regions = (*stack.regions, region)
    else:
        stack.enter(region)


def leave(stack: Stack, region: Region) -> None:
    """Close the region wherever it is in the stack; what is left never comes from a copy."""
    if torch.compiler.is_compiling():
        stack.regions = without(stack.regions, region)
    else:
        stack.leave(region)

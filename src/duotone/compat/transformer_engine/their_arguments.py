"""Arguments and initial weights of Transformer Engine's modules, for modules of Duotone."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar

import torch
from torch import Tensor, nn

from duotone import ops
from duotone.compat.transformer_engine.contexts import CudaRNGStatesTracker
from duotone.compat.transformer_engine.options import CALLS, ORDER, Options, by_name, counterparts

Tracker = Callable[[], CudaRNGStatesTracker]
STD = 0.023
"""Without an `init_method`, weights are normal with this standard deviation, and biases are zero."""


def normal(weight: Tensor) -> None:
    """Fill a weight from the normal distribution with `STD`, in place."""
    nn.init.normal_(weight, std=STD)


def default_device() -> str | None:
    """The device that modules are built on: the GPU, if one exists and torch has no other default device."""
    return "cuda" if torch.cuda.is_available() and torch.get_default_device().type == "cpu" else None


def arguments(function: Callable[..., object]) -> Iterator[str]:
    """The names of the arguments of a function that can be passed by name, without `self`."""
    parameters = inspect.signature(function).parameters.values()
    return (p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY) and p.name != "self")


def constructor_arguments(*bases: type) -> frozenset[str]:
    """The arguments of the bases that are Duotone's classes. Each passes other arguments on to the next one."""
    classes = {cls for base in bases for cls in base.__mro__ if cls.__module__.startswith("duotone.")}
    return frozenset(name for cls in classes if "__init__" in vars(cls) for name in arguments(cls.__init__))


def ranks(named: Options) -> int:
    """The number of ranks that share the module."""
    group = named.get("tp_group")
    return named.get("tp_size", 1) if group is None else group.size()


class TakesTheirArguments:
    """Mixed in before a module of Duotone. `title` is its name in Transformer Engine."""

    title: ClassVar[str]
    constructor: ClassVar[frozenset[str]]
    call: ClassVar[frozenset[str]]

    def __init_subclass__(cls, further: tuple[type, ...] = (), **options: object) -> None:
        super().__init_subclass__(**options)
        if not hasattr(cls, "title") and issubclass(
            cls.__bases__[-1], nn.Module
        ):  # a user's class has that of its base
            base = cls.__bases__[-1]
            cls.title = cls.__name__
            cls.constructor = constructor_arguments(base, *further)
            cls.call = frozenset(arguments(base.forward))

    def __init__(self, *values: object, **options: object) -> None:
        named = by_name(f"te.{self.title}", ORDER[self.title].split(), values, options)
        tracker = named.pop("get_rng_state_tracker", None)
        sequence_parallel, size = bool(named.get("sequence_parallel")), ranks(named)
        self.prepare_constructor(named)
        for method in {"init_method", "output_layer_init_method"} & self.constructor:
            named[method] = forked(named.get(method) or normal, tracker)
        if "device" in self.constructor and named.get("device") is None:
            named["device"] = default_device()
        super().__init__(**counterparts(f"te.{self.title}", named, self.constructor))
        assert isinstance(self, nn.Module)
        self.tp_size = size
        if isinstance(self, ops.LayerNorm | ops.RMSNorm):
            for parameter in self.parameters():
                parameter.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]  # the script sums gradients
        replace_classes(self, tracker)

    def forward(self, *values: object, **options: object) -> object:
        call = f"te.{self.title}.forward"
        named = by_name(call, CALLS[self.title].split(), values, options)
        self.prepare_call(named)
        return super().forward(**counterparts(call, named, self.call))  # type: ignore[misc]

    def prepare_constructor(self, named: Options) -> None:
        """Drop arguments for many ranks if there is one rank."""
        if ranks(named) == 1:
            for name in ("tp_group", "tp_size", "parallel_mode", "set_parallel_mode", "sequence_parallel"):
                named.pop(name, None)

    def prepare_call(self, named: Options) -> None:
        """Change arguments of a forward that mean something else in Duotone."""


CLASSES: dict[type[nn.Module], type[nn.Module]] = {}
"""Modules of Duotone that are inside of others, and the classes that take Transformer Engine's arguments for them."""


def replace_classes(module: nn.Module, tracker: Tracker | None) -> None:
    """Let the modules inside take Transformer Engine's arguments too. Attributes do not depend on the class."""
    for inner in module.modules():
        inner.__class__ = CLASSES.get(type(inner), type(inner))
        if tracker is not None and hasattr(inner, "get_rng_state_tracker"):
            inner.get_rng_state_tracker = tracker  # type: ignore[assignment]


def fork(tracker: Tracker | None) -> AbstractContextManager[object]:
    """A context in which random numbers are those of a tracker's state for this rank. None changes nothing."""
    return nullcontext() if tracker is None else tracker().fork()


def forked(fill: Callable[[Tensor], object], tracker: Tracker | None) -> Callable[[Tensor], object]:
    """`fill` with the random numbers of this rank."""
    if tracker is None:
        return fill

    def fill_in_fork(weight: Tensor) -> None:
        with fork(tracker):
            fill(weight)

    return fill_in_fork

"""Bound calls: what a plan and the shapes of a call fix is recorded once, as straight-line code.

The second call of a signature runs its body under a `Recorder`, which sees each call of torch and each launch of a
kernel. The code repeats these calls in their order, so it gives the same bits. What changes from call to call is an
argument: tensors, seeds, and the scales and amaxes of delayed slots. A value never invalidates bound code.
"""

import itertools
import linecache
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from textwrap import indent
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from duotone import allocate
from duotone.capture import is_capturing
from duotone.dispatch.casts import PLAIN_TYPES
from duotone.dispatch.stages import COMPILE_FROM
from duotone.graph_ops import KERNELS
from duotone.tensor.context import OpenSlot, Slot

Body = Callable[..., Any]
"""Takes the open slots, or none if it opens them itself, a list of tensors, which it empties, and other arguments."""
MOST = 16
"""Signatures that are kept. Shapes that differ in each call are not recorded again and again."""
FOLDED = 1 << 12
"""Elements of a constant that code keeps. Larger ones are computed in each call."""
_CONVERSIONS = "__bool__", "__int__", "__float__", "__index__", "__contains__", "__set__", "__delete__"
READS_VALUES = {"item", "tolist", "numpy", "data_ptr", "equal", "is_nonzero", "allclose", "nonzero", *_CONVERSIONS}
"""Functions whose results the host may branch on."""
UNINITIALIZED = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "_empty_strided_cuda"}


class Bindings:
    """What runs the calls of one body, by signature. `slots` are the delayed slots of a state that each call opens."""

    def __init__(self, body: Body, slots: Sequence[Slot] = ()) -> None:
        self.body = body
        self.open_slots = slots[0].together(slots) if slots else ()
        self.repeats = True
        """Whether the plan and the shapes decide all calls of the body. Else each call runs it."""
        self.codes: dict[Hashable, Callable[..., Any] | None] = {}
        """By signature. None for one whose body no code can repeat."""
        self.seen: set[Hashable] = set()

    def __call__(self, tensors: list[Any], others: tuple[Any, ...] = (), choice: Hashable = None) -> Any:
        """Return what the body returns for `tensors`, which this empties, so that each is freed after its last use.

        Their shapes, strides, dtypes and alignments decide the signature, and `choice` does. `others` hold values of
        the moment in tuples and lists.
        """
        if (
            not self.repeats or torch._C._len_torch_dispatch_stack()
        ):  # fake tensors and observers see the calls of the body itself
            return self.body((), tensors, *others)
        opened, count, of_call, is_steady = list[OpenSlot](), len(tensors), [choice], True
        for open_slots in self.open_slots:
            opened += open_slots()
        for slot in opened:
            of_call.append(slot.key)
            is_steady &= slot.is_steady
        key = signature(tensors, of_call) if is_steady else None
        for slot in opened:
            tensors += slot.tensors
        code = self.codes.get(key)
        if code is not None:
            with torch._C._AutoDispatchBelowAutograd():  # autograd does nothing here, but would take host time
                return code(tensors, *others)
        recorder = Recorder(tensors, others) if key is not None and self._records(key, tensors, others) else None
        del tensors[count:]
        if recorder is None:
            return self.body(opened, tensors, *others)
        # Where autograd runs an op, writes raise no version, by which the recorder knows them.
        with recorder, torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
            result = self.body(opened, tensors, *others)
        self.codes[key] = recorder.code(result)
        return result

    def _records(self, key: Hashable, tensors: Sequence[Any], others: Sequence[Any]) -> bool:
        """Whether to record this call: the second one of its signature.

        Inference tensors show no writes. If two arguments are one tensor, the code of another call could not tell which
        of the two a step reads.
        """
        if key in self.seen:
            given = _tensors([*tensors, *others])
            infers = torch.is_inference_mode_enabled() or any([x.is_inference() for x in given])
            is_apart = len(set(map(id, given))) == len(given)
            return key not in self.codes and is_apart and not (infers or is_capturing())
        kernels_or_few = [x.is_cuda or x.numel() < COMPILE_FROM for x in tensors if x is not None]  # else it compiles
        if len(self.seen) < MOST and all(kernels_or_few):
            self.seen.add(key)
        return False


def signature(tensors: Sequence[Any], of_call: Sequence[Hashable]) -> Hashable:
    """What decides the calls of a body besides its plan: `of_call`, and how tensors lie. None if no code is bound."""
    device, key = -1, [*of_call]
    for x in tensors:
        if x is None:
            key.append(None)
        elif type(x) not in PLAIN_TYPES:
            return None
        else:
            key += x.shape, x.stride(), x.dtype
            if x.is_cuda:
                device = x.get_device()
                key.append(x.data_ptr() & 15)
            elif not x.is_cpu:
                return None
    if device >= 0 and device != torch._C._cuda_getDevice():
        return None
    return (device, *key)


class Recorder(TorchFunctionMode):
    """Writes the calls of a body as Python code. It keeps no tensor alive, but for constants."""

    def __init__(self, tensors: Sequence[Any], others: Sequence[Any] = ()) -> None:
        super().__init__()
        self.names: dict[int, tuple[weakref.ref[Tensor], str]] = {}
        self.values: dict[str, Any] = {}
        self.constants: dict[str, Tensor] = {}
        """Small results of calls that read nothing else, by name."""
        self.unsafe: set[str] = set()
        """Constants that something writes, or that the caller gets: each call computes its own."""
        self.steps: list[Step] = []
        self.refused = False
        self.numbers = itertools.count(1)
        self.parameters = [f"a{i}" for i in range(len(tensors))]
        self.others = [f"b{i}" for i in range(len(others))]
        for name, value in zip((*self.parameters, *self.others), (*tensors, *others), strict=True):
            self._take(name, value)

    def _take(self, name: str, value: Any) -> None:
        """Name the tensors of an argument."""
        if isinstance(value, Tensor):
            self._name(value, name)
        elif isinstance(value, tuple | list):
            for i, each in enumerate(value):
                self._take(f"{name}[{i}]", each)

    def _name(self, x: Tensor, name: str = "") -> str:
        name = name or f"v{next(self.numbers)}"
        self.names[id(x)] = weakref.ref(x), name
        return name

    def _name_of(self, x: Tensor) -> str | None:
        entry = self.names.get(id(x))
        return entry[1] if entry is not None and entry[0]() is x else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if (kernel := KERNELS.get(getattr(func, "_qualified_op_name", ""))) is not None:
            with self:
                return kernel(*args, **kwargs)
        if (launch := getattr(func, "__self__", None)) is not None and hasattr(launch, "fixed"):
            func(*args)
            return self._launch(launch, *args)
        before = [(x, x._version) for x in _tensors([*args, *kwargs.values()])]
        result = func(*args, **kwargs)
        self.refused |= getattr(func, "__name__", "") in READS_VALUES
        written = [x for x, version in before if x._version != version]
        results = result if isinstance(result, tuple | list) else (result,)
        if written:
            self._write(written)
            self._add(func, args, kwargs, (), "")
        elif results and all(isinstance(x, Tensor) and self._name_of(x) is None for x in results):
            self._add(func, args, kwargs, results, ", = " if result is results else " = ")
        return result  # else what the shapes fix, or a call that does nothing

    def _write(self, values: Sequence[Any]) -> None:
        """Note that a call may write to tensors. What shares memory with them is no constant."""
        memory = {x.untyped_storage()._cdata for x in _tensors(values)}
        self.unsafe |= {name for name, x in self.constants.items() if x.untyped_storage()._cdata in memory}

    def _add(self, func: Any, args: Any, kwargs: Any, results: Sequence[Tensor], equals: str) -> None:
        """Add a call of torch. One that only writes has no results."""
        reads: list[str] = []
        parts = [self._render(x, reads) for x in args]
        parts += [f"{key}={self._render(x, reads)}" for key, x in kwargs.items()]
        if func is torch.empty_strided and results[0].is_cuda:
            func, parts = allocate.empty_cuda, [*parts[:2], self._render(results[0].dtype, [])]
        names = [self._name(x) for x in results]
        text = f"{', '.join(names)}{equals}{self._render(func, [])}({', '.join(parts)})"
        self.steps.append(Step(names, text, reads, bool(names)))
        small = all(x.numel() <= FOLDED for x in results)
        if small and self.constants.keys() >= {*reads} and getattr(func, "__name__", "") not in UNINITIALIZED:
            self.constants.update(zip(names, results, strict=True))

    def _launch(self, launch: Any, programs: int, tensors: Sequence[Tensor | None], *others: Any) -> None:
        """Add the launch of a kernel, which may write to each of its tensors."""
        self._write(tensors)
        reads: list[str] = []
        fixed = launch.fixed(tensors, *others)
        self.refused |= fixed is None
        function, before, after = fixed or (None, (), ())
        stream = f"{self._render(torch._C._cuda_getCurrentRawStream, [])}({tensors[0].get_device()})"  # type: ignore
        parts = [str(programs), "1", "1", stream, *[self._render(x, []) for x in before]]
        parts += ["None" if x is None else f"{self._render(x, reads)}.data_ptr()" for x in tensors]
        parts += [self._render(x, []) for x in after]
        self.steps.append(Step([], f"{self._render(function, [])}({', '.join(parts)})", reads, False))

    def _render(self, x: Any, reads: list[str]) -> str:
        """The code of a value. Names of tensors are added to `reads`."""
        if isinstance(x, Tensor):
            name = self._name_of(x)
            self.refused |= name is None  # of unknown origin
            reads.append(str(name))
            return str(name)
        if type(x) in (list, tuple):
            inner = "".join(f"{self._render(each, reads)}, " for each in x)
            return f"[{inner}]" if type(x) is list else f"({inner})"
        if type(x) in (int, bool, str, type(None)):
            return repr(x)
        word = str(getattr(x, "__name__", "")).strip("_")
        new = f"{word if word.isidentifier() else 'c'}_{len(self.values)}"
        name = next((name for name, value in self.values.items() if value is x), new)
        self.values[name] = x
        return name

    def code(self, result: Any) -> Callable[..., Any] | None:
        """Return the function of the arguments that gives the result anew. None if something else decides it."""
        reads: list[str] = []
        out = self._render(result, reads)
        self._write([self.constants.get(name) for name in reads])
        if self.refused:
            return None
        for step in self.steps:  # what reads a constant that is none is none
            if any(read in self.unsafe for read in step.reads):
                self.unsafe.update(step.names)
        body, alive = [f"return {out}"], set(reads)
        for step in reversed(self.steps):
            if step.is_pure and not alive.intersection(step.names):
                continue
            if step.names and all(name in self.constants and name not in self.unsafe for name in step.names):
                self.values.update({name: self.constants[name] for name in step.names})
                continue
            dead = {name for name in (*step.reads, *step.names) if name not in alive and name[0] in "av"}
            dead -= self.constants.keys() - self.unsafe
            body += [f"del {', '.join(sorted(dead))}"] * bool(dead) + [step.text]
            alive.update(step.reads)
        body += ["tensors.clear()", f"{''.join(f'{name}, ' for name in self.parameters)}= tensors"]
        lines = indent("\n".join(reversed(body)), "    ")
        source = f"def bound({', '.join(('tensors', *self.others))}):\n{lines}"
        return FunctionType(_compiled(source), self.values, "bound")


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among values and in their lists."""
    found: list[Tensor] = []
    for x in values:
        if isinstance(x, Tensor):
            found.append(x)
        elif isinstance(x, tuple | list):
            found += _tensors(x)
    return found


class Step(NamedTuple):
    """A line of code: the names that it binds and reads, and whether it may be left out if nothing reads them."""

    names: list[str]
    text: str
    reads: list[str]
    is_pure: bool


@lru_cache(maxsize=1024)
def _compiled(source: str) -> CodeType:
    """Compile the one function of a source. Equal layers share it, and tracebacks show its lines."""
    name = f"<bound call {hash(source):x}>"
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    module = compile(source, name, "exec")
    return next(constant for constant in module.co_consts if isinstance(constant, CodeType))

"""Rows: tuples of stages as compiled code runs them, by names, over plain tensors.

What a forward keeps for its backward are tensors of the graph. The row remembers how backward finds what it needs.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.numbered import constant_in_traces
from duotone.pipeline.autograd import differentiate, run_forward
from duotone.pipeline.bound import Bindings
from duotone.pipeline.bound_pipeline import opened_stages
from duotone.pipeline.rewrites import RULES, rewrite
from duotone.pipeline.row_call import PLAIN, RowCall, RowPart
from duotone.pipeline.stage import AUTOGRAD, Stage, Stages, unpack
from duotone.state.torch_private import constants_allowed, is_faking
from duotone.tensor import QuantizedTensor, Quantizer
from duotone.tensor.plane import Planes, overlap, same_memory
from duotone.tensor.plane_tensor import matrix_shape, plain
from duotone.tensor.quantizer import quantizer_of

S = TypeVar("S", bound=Stage)
Rows = dict[Hashable, "Row"]
MOST = 64
"""Rows, and signatures of a name, that are remembered. The one that was not written for the longest time goes first."""
SEPARATOR = "|"


class View(NamedTuple):
    """A kept tensor that shares the memory of a source, by the source's index. Their elements are of one size."""

    source: int
    source_stride: tuple[int, ...]
    """Of the source in forward. Hooks for saved tensors may hand out a copy with other strides."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @staticmethod
    def of(tensor: Tensor | None, sources: Sequence[Tensor | None], inputs: float = inf) -> "View | None":
        """The view of the first source whose memory the tensor has. None if it has that of none.

        The first `inputs` sources may lie beside each other in one storage.
        """
        for i, source in enumerate(sources):
            if tensor is None or source is None or not same_memory(tensor, source):
                continue
            if i >= inputs or is_faking() or overlap(tensor, source):  # offsets of fake tensors may be symbols
                offset = tensor.storage_offset() - source.storage_offset()
                return View(i, source.stride(), tensor.dtype, tensor.size(), tensor.stride(), offset)  # type: ignore
        return None

    def restore(self, sources: Sequence[Any]) -> Tensor:
        """The tensor, over the memory of its source."""
        source = sources[self.source]
        if source.stride() != self.source_stride:
            strides = source.size(), self.source_stride
            source = torch.empty_strided(*strides, dtype=source.dtype, device=source.device).copy_(source)
        source = source.view(self.dtype)
        return source.as_strided(self.size, self.stride, source.storage_offset() + self.offset)  # type: ignore[no-any-return]


class Seed(NamedTuple):
    """An input that a stage keeps beside the saved tensors, by its index. It must be a source."""

    source: int


class KeptParts(NamedTuple):
    """A kept quantized tensor: what makes it, how its parts hold it, their places, and its size."""

    make: "Held"
    how: int
    places: list["Place"]
    size: Sequence[int]


Place = int | View | KeptParts | None
"""Of a saved tensor: its index among the sources and the kept tensors behind them, or its view of one."""


def _at(place: Place, given: Sequence[Any]) -> Any:
    if isinstance(place, KeptParts):
        return place.make(place.how, [_at(each, given) for each in place.places], place.size)
    return place.restore(given) if isinstance(place, View) else None if place is None else given[place]


class Structure(NamedTuple):
    """How the backward of a signature finds what its forward saved."""

    shells: list[list[Any]]
    has_seeds: bool
    places: list[Place]
    """Of each saved tensor."""

    def saved(self, given: Sequence[Any]) -> list[Tensor | None]:
        """The saved tensors, from the sources and the kept tensors."""
        return [_at(place, given) for place in self.places]

    def shells_over(self, sources: Sequence[Any]) -> list[list[Any]]:
        """The shells with the seeds of a call."""
        if not self.has_seeds:
            return self.shells
        return [[_replaced(x, Seed, lambda seed: sources[seed.source]) for x in entry] for entry in self.shells]


@dataclass(eq=False)
class Part:
    """What a name in graphs stands for."""

    stage: Stage
    """The stage of modules without states, and the one that tells shapes."""
    of_module: Callable[[Tensor, bool], tuple[Stage, Rows]] | None = None
    """The stage of the module that a handle names, for a forward or for its backward, and where its rows are."""
    held: tuple["Held | None", ...] = ()
    """What makes its input and each operand, if they are quantized, of their parts. () if none is."""
    sources: tuple[bool, ...] = ()
    """Of its input and each operand, whether backward reads it as it is."""
    keeps_output: bool = False
    """Whether backward may read its output as it is."""
    input_grad: bool = True
    """Whether backward gives its input a gradient."""
    of_number: Callable[[str], Stage] | None = None
    """The eager stage of the module of a number; `stage` if None."""
    gives_quantized: bool = False
    """Whether its output is quantized, so that no row ends with it."""
    is_quantized: bool = False
    """Whether one op runs it and the parts beside it."""
    recomputes: bool = False
    """Whether backward encodes its input again."""
    keeps: bool = False
    """Whether what its forward keeps stays outside of the graph."""
    is_home: bool = False
    """Whether rows and structures are remembered here: at the first linear, since all models share norms."""
    rows: Rows = field(default_factory=dict)
    structures: dict[Hashable, Structure] = field(default_factory=dict)
    """By the names of all parts, and by the sizes and the strides of x and of the operands."""
    shapes: dict[Hashable, list[tuple[torch.Size, tuple[int, ...], torch.dtype]]] = field(default_factory=dict)
    """Of the results of rows, by the names of all parts, and by what decides them."""


PARTS: dict[str, Part] = {}
"""By the names in graphs."""


def in_parts(stage: S, name: str, sources: tuple[bool, ...], input_grad: bool, **others: bool) -> S:
    """A stage without states that graphs hold under a name. Equal names are of equal stages. `others`: of `Part`."""
    PARTS.setdefault(name, Part(stage, sources=sources, input_grad=input_grad, **others))  # type: ignore[arg-type]
    return replace(stage, row_part=RowPart(name).text)  # type: ignore[type-var]


@constant_in_traces
def first_run(names: str, is_held: bool) -> tuple[int, str]:
    """How many of the stages of a pipeline run together first, and how: as "row", "plain", or "" without a name.

    `names` holds the parts as a graph names them. One op runs a row: linears that are quantized or keep tensors, and
    the norms and activations beside them. Graphs hold the operations of what is "plain". `is_held`: whether the input
    is quantized, which linears alone take in parts.
    """
    parts = [parts_of([RowPart.of(text).name])[0] if text else None for text in names.split(SEPARATOR)]
    kinds = ["" if part is None else "plain" if part.is_home and not part.is_quantized else "row" for part in parts]
    if is_held and parts[0] is not None and not parts[0].is_quantized:
        return 1, "plain"
    for at, part in reversed([*enumerate(parts)]):
        if part is not None and part.gives_quantized and kinds[at + 1 : at + 2] != ["row"]:
            kinds[at] = "plain"
    last = next((at for at, kind in enumerate(kinds) if kind != kinds[0]), len(kinds))
    is_low = any(part is not None and part.is_quantized for part in parts[:last])
    return last, kinds[0] if is_low or kinds[0] != "row" else "plain"


def plain_stages(row: str, numbers: Sequence[str]) -> Stages:
    """The stages of a row whose operations a graph holds. `numbers` are those of modules, "" for stages without."""
    pairs = zip(parts_of([part.name for part in named(row)]), numbers, strict=True)
    return tuple([part.stage if part.of_number is None else part.of_number(number) for part, number in pairs])


def named(row: str) -> list[RowPart]:
    """The parts of a row as a graph names them."""
    return [RowPart.of(text) for text in row.split(SEPARATOR)]


def flat(operand: Tensor | None) -> tuple[list[Tensor | None], int]:
    """The plain tensors of an operand, and how it holds them: 1 if rowwise plus 2 if columnwise, 0 if it is plain."""
    if not isinstance(operand, QuantizedTensor):
        return [operand], 0
    row, col = operand.planes
    return [*operand.parts], (row is not None) + 2 * (col is not None)


class Held(NamedTuple):
    """Makes quantized tensors over their parts."""

    quantizer: Quantizer
    dtype: torch.dtype

    def __call__(self, how: int, parts: Sequence[Tensor], shape: Sequence[int]) -> QuantizedTensor:
        """The inverse of `flat`, for a tensor of this shape."""
        quantizer, size = self.quantizer, torch.Size(shape)
        row, col = quantizer.rowwise if how & 1 else None, quantizer.columnwise if how & 2 else None
        planes = Planes.of(row, col, parts, matrix_shape(size))
        return QuantizedTensor(planes, quantizer, size, self.dtype, device=parts[0].device)


class Row:
    """What runs a tuple of stages: a bound forward and a bound backward where the plan decides all calls."""

    def __init__(self, stages: Stages, parts: Sequence[Part]) -> None:
        held = [part.held or (None,) * (1 + sum(stage.arity)) for part, stage in zip(parts, stages, strict=True)]
        self.held: list[Any] = [held[0][0], *[each for of_part in held for each in of_part[1:]]]
        self.keeps = any(part.keeps for part in parts)
        self.waits = any(stage.waits for stage in stages)
        self.forward_of, self.backward_of = rewrite(stages)
        self.rolls = any(stage.rolls_forward_alone for stage in stages)
        both = (*self.forward_of, *self.backward_of)
        bindable = all(stage.is_bindable for stage in both)
        slots = [slot for stage in self.forward_of for slot in stage.slots] if bindable else []
        of_gradients = [slot for stage in self.backward_of for slot in stage.gradient_slots] if bindable else []
        forward, backward = partial(self._forward, slots), partial(self._backward, of_gradients)
        self.forward, self.backward = Bindings(forward, slots), Bindings(backward, of_gradients)
        self.forward.repeats = self.backward.repeats = bindable

    def _forward(
        self,
        slots: Sequence[Any],
        opened: Sequence[Any],
        tensors: list[Any],
        held: Sequence[int],
        sources: Sequence[bool],
        sizes: Sequence[Sequence[int]],
    ) -> tuple[list[Tensor], Structure]:
        """y and the kept tensors, none of which shares memory with another tensor of the graph.

        `sizes`: see `RowCall.quantized_sizes`.
        """
        stages, inputs = opened_stages(self.forward_of, slots, opened), _apart(tensors, sources)
        of_parts, whole = iter(inputs), list[Any]()
        for make, code in zip(self.held, held, strict=True):
            tensors = [next(of_parts) for _ in range(code // PLAIN)]
            whole.append(make(code % PLAIN, tensors, sizes[len(whole)]) if code % PLAIN else tensors[0])
        x, *operands = whole
        (y,), saved, shells, _ = run_forward(stages, None, x, tuple(operands))
        outputs = [y if View.of(y, inputs) is None else y.clone()]
        pairs = zip((*inputs, outputs[0]), sources, strict=True)
        kept = Kept([each if is_source else None for each, is_source in pairs], [*inputs, y], outputs)
        places = [None if tensor is None else kept.place_of(tensor) for tensor in saved]
        change = torch.clone if self.keeps else partial(_seed, inputs)
        shells = [[_replaced(x, Tensor, change) for x in entry] for entry in shells]
        if self.keeps:
            outputs[0] = outputs[0].contiguous()
        has_seeds = any(
            isinstance(x, Seed) for entry in shells for shell in entry if type(shell) is tuple for x in shell
        )
        return outputs, Structure(shells, has_seeds, places)

    def _backward(
        self, slots: Sequence[Any], opened: Sequence[Any], tensors: list[Any], shells: list[Any], sinks: Sequence[int]
    ) -> list[Tensor]:
        """The gradients for autograd. They share no memory, as all results of ops; those of one kernel may do."""
        handed, saved, dtype = [tensors[0]], unpack(shells, tensors[1:]), tensors[0].dtype
        tensors.clear()
        stages, needs = opened_stages(self.backward_of, slots, opened), tuple(map(bool, sinks))
        results = differentiate(stages, handed, (), saved, needs)
        needed = [plain(each) for each, sink in zip(results, sinks, strict=True) if sink == AUTOGRAD]
        gradients = [each.to(dtype).contiguous() for each in needed if each is not None]
        return [each if each.untyped_storage().nbytes() == each.nbytes else each.clone() for each in gradients]


class Kept(NamedTuple):
    """What a forward keeps: among its sources, or else as outputs of its op."""

    sources: list[Tensor | None]
    """The inputs and the output that backward reads as they are."""
    given: list[Tensor | None]
    """All inputs, and the output of the stages. No output of the op shares their memory."""
    outputs: list[Tensor]
    """Of the op: y and what is kept, to which `place_of` adds."""

    def place_of(self, tensor: Tensor) -> Place:
        """Where backward finds the tensor."""
        if isinstance(tensor, QuantizedTensor):
            parts, how = flat(tensor)
            make = Held(cast(Quantizer, quantizer_of(tensor)), tensor.dtype)
            return KeptParts(make, how, [self.place_of(part) for part in parts if part is not None], tensor.shape)
        candidates = [*self.sources, *self.outputs[1:]]
        same = next((i for i, each in enumerate(candidates) if each is tensor), None)
        known = View.of(tensor, candidates, len(self.sources)) if same is None else same
        if known is not None:
            return known
        self.outputs.append(tensor.clone() if View.of(tensor, self.given) is not None else tensor)
        return len(candidates)


def _apart(inputs: Sequence[Any], sources: Sequence[bool]) -> list[Any]:
    """The inputs, with a copy of each source that shares memory with an earlier one.

    Modules with one graph share structures, and some of them tie weights. So a structure must not depend on ties.
    """
    result, earlier = list[Any](), list[Any]()
    for x, is_source in zip(inputs, sources, strict=False):
        result.append(x.clone() if is_source and View.of(x, earlier) is not None else x)
        earlier += [result[-1]] if is_source else []
    return result


def _replaced(shell: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """A shell with others in the place of its values of this kind."""
    if type(shell) is not tuple or not any(isinstance(x, kind) for x in shell):
        return shell
    return tuple([change(x) if isinstance(x, kind) else x for x in shell])


def _seed(inputs: Sequence[Any], seed: Tensor) -> Seed:
    return Seed(next(i for i, x in enumerate(inputs) if x is seed))


def row_of(names: Sequence[str], handles: Sequence[Tensor], is_forward: bool) -> tuple[Row, dict[Hashable, Structure]]:
    """The row of stages of these modules, and the structures of all rows of these names."""
    owners, stages, rows = iter(handles), list[Stage](), None
    parts = parts_of(names)
    for part in parts:
        stage, of_module = (part.stage, None) if part.of_module is None else part.of_module(next(owners), is_forward)
        stages.append(stage)
        rows = of_module if rows is None else rows
    home = _home(parts)
    return _row(names, tuple(stages), parts, home.rows if rows is None else rows), home.structures


def shapes_of(call: RowCall, tensors: list[Any], sizes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The results of a row of stages that know no module, without values. They are computed once for each layout.

    `sizes`: see `RowCall.quantized_sizes`.
    """
    home = _home(parts := parts_of(call.names))
    layouts = [None if each is None else (each.dtype, each.device, *each.shape, *each.stride()) for each in tensors]
    fixed = not any(isinstance(n, torch.SymInt) for layout in layouts if layout is not None for n in layout)
    known, key = home.shapes, (RULES.version, call.names, call.choice, *sizes, *layouts)
    if fixed and key in known:
        return [tensors[0].new_empty_strided(size, stride, dtype=dtype) for size, stride, dtype in known[key]]
    row = _row(call.names, tuple([part.stage for part in parts]), parts, home.rows)
    with constants_allowed(tensors[0]):
        outputs = row.forward(tensors, (call.codes, call.sources, sizes))[0]
    if fixed:
        remember(known, key, [(each.shape, each.stride(), each.dtype) for each in outputs])
    return outputs


def _row(names: Sequence[str], stages: Stages, parts: Sequence[Part], rows: Rows) -> Row:
    key = (RULES.version, names, *stages)
    return rows[key] if key in rows else remember(rows, key, Row(stages, parts))


def _home(parts: Sequence[Part]) -> Part:
    return next(part for part in parts if part.is_home)


def parts_of(names: Sequence[str]) -> list[Part]:
    """The parts of these names. UserError if their modules are gone."""
    try:
        return [PARTS[name] for name in names]
    except KeyError:
        raise UserError(
            "the recipe or the model of compiled code is gone; keep both until the compiled backward ends"
        ) from None


def remember(entries: dict[Hashable, Any], key: Hashable, value: Any) -> Any:
    """Put a value last under a key, and forget the first one beyond MOST. Returns the value."""
    entries.pop(key, None)
    entries[key] = value
    if len(entries) > MOST:
        del entries[next(iter(entries))]
    return value

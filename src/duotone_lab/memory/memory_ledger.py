"""The memory ledger: what each module of a model holds, and the peak of one forward and backward.

The peak is predicted and measured, so that each number checks the other. The prediction is the largest of two sums over
all calls of modules, in bytes, with each storage counted once:

    forward of a call    fixed + saved before it + its inputs that nobody saved + its workspace
    backward of a call   fixed + saved up to its end + gradients of the modules after it + its workspace

where fixed = weights + caches + inputs of the step that live on. The workspace of a planned linear follows from its
plan and shapes (`census.py`): quantized planes, decoded operands, results and gradients. The workspace of another
module is its results and the tensors that it created and saved. In backward it also has the gradients of these, of
inputs and of parameters. Operators outside of modules, such as a loss, count only with what they save. So the
prediction is too low for a step that has its peak there.
"""

import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.observe.unchanged import as_before, device_of
from duotone.text import aligned, in_units
from duotone_lab.memory.census import OUTSIDE, Call, Census
from duotone_lab.memory.storages import Holdings, holdings, peak_of, sizes


@dataclass(frozen=True)
class Moment:
    """The bytes that live while a module runs "forward" or "backward".

    `saved` is what autograd keeps at that time. `gradients` are the complete gradients of parameters. `workspace` is
    everything else that the call needs: inputs that nobody saved, quantized and decoded operands, results and new
    gradients.
    """

    module: str = ""
    phase: str = "forward"
    fixed: int = 0
    saved: int = 0
    gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        """Bytes of this moment."""
        return self.fixed + self.saved + self.gradients + self.workspace


def forecast(census: Census, fixed: int, static: set[int]) -> Moment:
    """The moment of the largest total; see `duotone_lab.ledger` for the formula.

    `fixed` are the bytes of `static`, the storages that live throughout the step.
    """
    return max(moments(census, fixed, static), key=lambda m: m.total, default=Moment(fixed=fixed))


def moments(census: Census, fixed: int, static: set[int]) -> Iterator[Moment]:
    """Forward and backward of every call, in the order of forward."""
    sizes = [0 if key in static else size for key, (_, size) in census.saved.items()]
    keys = list(census.saved)
    saved = list(itertools.accumulate(sizes, initial=0))
    workspaces: dict[Hashable, tuple[int, int]] = {}
    lasting = {key: size for key, size in census.output.items() if key not in static and key not in census.saved}
    for index, call in enumerate(census.calls):
        saved_here = slice(call.begin, call.end)
        forward, backward = _workspace(call, dict(zip(keys[saved_here], sizes[saved_here], strict=True)), workspaces)
        inputs = sum(size for key, size in call.inputs.items() if key not in static)
        now = Moment(call.name, "forward", fixed, saved[call.begin], 0, inputs + forward)
        yield now
        if not call.differentiable:
            continue
        later = [p for other in census.calls[index + 1 :] for p in other.trained]
        outputs = sum(lasting.values())  # the output of the step, and its gradient unless this call takes it
        outputs += 0 if call.outputs.keys() & census.output.keys() else sum(census.output.values())
        yield replace(
            now, phase="backward", saved=saved[call.end], gradients=_gradients(later), workspace=backward + outputs
        )


def _workspace(call: Call, saved: dict[int, int], workspaces: dict[Hashable, tuple[int, int]]) -> tuple[int, int]:
    """Bytes of a call in forward and in backward, besides saved and static storages. `saved` is what it saved."""
    if call.pipeline is None:
        results = sum(call.outputs.values())
        new = sum(size for key, size in saved.items() if key not in call.inputs and key not in call.outputs)
        return results + new, results + new + call.input_gradients + _gradients(call.trained)
    key = call.pipeline.key
    if key not in workspaces:
        workspaces[key] = call.pipeline.workspace()
    return workspaces[key]


def _gradients(parameters: Iterable[nn.Parameter]) -> int:
    """The bytes of gradients. They have the nominal dtype, also those of quantized parameters."""
    distinct = {id(p): p for p in parameters}
    return sum(p.numel() * p.dtype.itemsize for p in distinct.values())


Step = Callable[[], Tensor]


@dataclass(frozen=True)
class LedgerRow:
    """Bytes that one module owns, without its children. Delayed-scaling states count with their linear.

    `saved` is what autograd keeps for it between forward and backward, except parameters and buffers.
    """

    module: str
    weights: int
    caches: int
    saved: int

    @property
    def total(self) -> int:
        """Bytes of the module."""
        return self.weights + self.caches + self.saved


@dataclass(frozen=True)
class Ledger:
    """`modules` in the order of the model, then "(outside)" for what was saved outside of any module.

    `inputs` are the tensors given to the step that no module saved. `peak` is the moment of the predicted peak.
    """

    modules: tuple[LedgerRow, ...]
    inputs: int
    peak: Moment
    measured_peak: int

    @property
    def total(self) -> int:
        """Bytes of weights, caches and saved activations of all modules."""
        return sum(row.total for row in self.modules)

    @property
    def predicted_peak(self) -> int:
        """Bytes of the largest moment of the step."""
        return self.peak.total

    def rows(self) -> list[dict[str, Any]]:
        """A table: the fields of each row, and its total."""
        return [{**asdict(row), "total": row.total} for row in self.modules]

    def __str__(self) -> str:
        columns = ("weights", "caches", "saved", "total")
        lines = [[row["module"] or "(model)", *(in_units(row[c]) for c in columns)] for row in self.rows()]
        sums = [in_units(sum(row[c] for row in self.rows())) for c in columns]
        predicted, measured, at = self.predicted_peak, self.measured_peak, self.peak
        off = 100.0 * (predicted / measured - 1.0) if measured else 0.0
        shares = (("weights, caches and inputs", at.fixed), ("saved", at.saved), ("gradients", at.gradients))
        parts = [f"{in_units(size)} {what}" for what, size in (*shares, ("workspace", at.workspace)) if size]
        return "\n".join(
            [
                *aligned([["module", *columns], *lines, ["total", *sums]], [False, *([True] * len(columns))]),
                "",
                f"peak of forward and backward: predicted {in_units(predicted)}, measured {in_units(measured)} "
                f"({off:+.1f} %)",
                f"predicted in {at.phase} of {at.module or '(model)'}: {' + '.join(parts)}",
            ]
        )


def ledger(model: nn.Module, step: Step) -> Ledger:
    """Run `step` twice and account for its memory.

    `step()` runs forward and returns the loss, or any tensor. Backward starts there, from ones if it is no scalar. The
    first run watches modules. The second measures the peak: on CUDA that of the allocator, above what was allocated
    before; elsewhere the high-water mark of live storages. Gradients, buffers and random state are restored. States and
    planes that modules create at first use stay. UserError if the step cannot run backward.
    """
    if not isinstance(model, nn.Module) or not callable(step):
        wrong = type(model).__name__ if not isinstance(model, nn.Module) else type(step).__name__
        raise UserError(f"ledger takes a module and a function that runs one forward; got {wrong}")
    device = device_of(model)
    with _watched(model, step) as (census, owned):
        arguments = census.inputs()
        inputs = {key: size for key, size in sizes(arguments).items() if key not in owned.sizes}
        fixed = sum(owned.sizes.values()) + sum(inputs.values())
        peak = forecast(census, fixed, {*owned.sizes, *inputs})
        census.clear_gradients()
        with as_before(model, device):
            measured = _measured_peak(step, device, [*owned.tensors, *arguments], fixed)
    unsaved = sum(size for key, size in inputs.items() if key not in census.saved)
    return Ledger(_rows(model, owned, census), unsaved, peak, measured)


def module_rows(model: nn.Module, step: Step) -> tuple[LedgerRow, ...]:
    """The `modules` of a ledger, without its peaks: `step` runs once."""
    with _watched(model, step) as (census, owned):
        return _rows(model, owned, census)


@contextmanager
def _watched(model: nn.Module, step: Step) -> Iterator[tuple[Census, Holdings]]:
    """Run `step` and its backward. Returns the census, and what the model holds afterwards."""
    census = Census(static=set(holdings(model).sizes))
    try:
        with as_before(model, device_of(model)):
            _backward(census.run(model, step))
        yield census, holdings(model)  # the run may have created planes and states
    finally:
        census.restore_gradients()


def _rows(model: nn.Module, owned: Holdings, census: Census) -> tuple[LedgerRow, ...]:
    saved: dict[str, int] = {}
    for key, (owner, size) in census.saved.items():
        if key not in owned.sizes:
            saved[owner] = saved.get(owner, 0) + size
    names = [*(name for name, _ in model.named_modules()), OUTSIDE]
    rows = (LedgerRow(n, owned.weights.get(n, 0), owned.caches.get(n, 0), saved.get(n, 0)) for n in names)
    return tuple(row for row in rows if row.total)


def _measured_peak(step: Step, device: torch.device, living: list[Tensor], fixed: int) -> int:
    others = torch.cuda.memory_allocated(device) - fixed if device.type == "cuda" else 0
    with peak_of(living, device) as measured:
        _backward(step())
    return measured.peak - others


def _backward(output: Tensor) -> None:
    if not isinstance(output, Tensor) or not output.requires_grad:
        got = "a tensor without a gradient" if isinstance(output, Tensor) else type(output).__name__
        raise UserError(f"the step of a ledger returns the loss, a tensor to run backward from; it returned {got}")
    output.backward(None if output.numel() == 1 else torch.ones_like(output))

"""The peak of a step, predicted from a census: what lives at each call of a module, forward and backward."""

import itertools
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from duotone.observe.census import Call, Census


@dataclass(frozen=True)
class Moment:
    """What lives, in bytes, while a module runs "forward" or "backward".

    `saved` is what autograd keeps at that time. `gradients` are the complete ones of parameters. `workspace` is all
    else that the call needs: inputs that nobody saved, quantized and decoded operands, results and new gradients.
    """

    module: str = ""
    phase: str = "forward"
    fixed: int = 0
    saved: int = 0
    gradients: int = 0
    workspace: int = 0

    @property
    def total(self) -> int:
        return self.fixed + self.saved + self.gradients + self.workspace


def forecast(census: Census, fixed: int, static: set[int]) -> Moment:
    """The moment of the largest total; see `duotone.observe.ledger` for the formula.

    `fixed` are the bytes of `static`, the storages that live throughout the step.
    """
    return max(moments(census, fixed, static), key=lambda m: m.total, default=Moment(fixed=fixed))


def moments(census: Census, fixed: int, static: set[int]) -> Iterator[Moment]:
    """Forward and backward of every call, in the order of forward."""
    sizes = [0 if key in static else size for key, (_, size) in census.saved.items()]
    keys = list(census.saved)
    saved = list(itertools.accumulate(sizes, initial=0))
    known: dict[Hashable, tuple[int, int]] = {}
    lasting = {key: size for key, size in census.output.items() if key not in static and key not in census.saved}
    for index, call in enumerate(census.calls):
        saved_here = slice(call.begin, call.end)
        forward, backward = _workspace(call, dict(zip(keys[saved_here], sizes[saved_here], strict=True)), known)
        inputs = sum(size for key, size in call.inputs.items() if key not in static)
        now = Moment(call.name, "forward", fixed, saved[call.begin], 0, inputs + forward)
        yield now
        if not call.differentiable:
            continue
        later = [p for other in census.calls[index + 1 :] for p in other.trained]
        outputs = sum(lasting.values())  # of the step, and its gradient unless this call is the one that takes it
        outputs += 0 if call.outputs.keys() & census.output.keys() else sum(census.output.values())
        yield replace(
            now, phase="backward", saved=saved[call.end], gradients=_gradients(later), workspace=backward + outputs
        )


def _workspace(call: Call, saved: dict[int, int], known: dict[Hashable, tuple[int, int]]) -> tuple[int, int]:
    """Bytes of a call in forward and backward above what is saved and held; `saved` is what it saved itself."""
    if call.pipeline is None:
        results = sum(call.outputs.values())
        new = sum(size for key, size in saved.items() if key not in call.inputs and key not in call.outputs)
        return results + new, results + new + call.owed + _gradients(call.trained)
    key = call.pipeline.key
    if key not in known:
        known[key] = call.pipeline.workspace()
    return known[key]


def _gradients(parameters: Iterable[nn.Parameter]) -> int:
    """Gradients have the nominal size, however a parameter is held."""
    distinct = {id(p): p for p in parameters}
    return sum(p.numel() * p.dtype.itemsize for p in distinct.values())

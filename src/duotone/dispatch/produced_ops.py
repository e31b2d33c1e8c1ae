"""Producers as ops of a graph: a norm, an activation or its gradient, of which only the planes exist.

An op runs what eager code runs, so graphs have the bits of eager code. If no cast kernel computes the matrix, the op
writes and encodes it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

import torch
from torch import Tensor

from duotone.dispatch.activations import ACTIVATIONS, Activation
from duotone.dispatch.cast_ops import cast_planes, empty_planes
from duotone.dispatch.norms import NORMS, RowNorm
from duotone.graph_ops import define_op

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer

Inputs = Sequence[Tensor | None]


class Place(Protocol):
    """A slot of delayed scaling: `tensor.context.Slot`."""

    @property
    def is_new(self) -> bool:
        """Whether the slot has no scale yet."""
        ...

    def place(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """See `tensor.context.Slot.place`."""
        ...


@dataclass(frozen=True)
class ProducedMatrix:
    """A matrix (M, K) that an op computes from its inputs and encodes."""

    fused: "Callable[[Inputs, float], FusedProducer | None]"
    """What a cast kernel computes by itself; None if it cannot."""
    values: Callable[[Inputs, float], tuple[Tensor, ...]]
    """The matrix, and what backward needs of it."""
    shape: Callable[[Inputs], tuple[int, int]]
    measures: int = 0
    """How many statistics of x, gamma and beta are results, unless they follow these inputs."""

    def statistics(self, inputs: Inputs) -> list[Tensor]:
        """What backward needs of the matrix, without values."""
        x, count = inputs[0], self.measures if len(inputs) == 3 else 0
        assert x is not None
        return [x.new_empty((*x.shape[:-1], 1), dtype=torch.float32) for _ in range(count)]


def _activated(activation: Activation) -> ProducedMatrix:
    """Of x."""
    return ProducedMatrix(
        lambda inputs, eps: activation.produced(*_tensors(inputs)),
        lambda inputs, eps: (activation(*_tensors(inputs)),),
        lambda inputs: activation.shape(*_tensors(inputs)),
    )


def _gradient(activation: Activation) -> ProducedMatrix:
    """Of dy and x."""
    return ProducedMatrix(
        lambda inputs, eps: activation.produced_gradient(*_tensors(inputs)),
        lambda inputs, eps: (activation.differentiate(*_tensors(inputs)),),
        lambda inputs: _matrix_shape(inputs[1]),
    )


def _normalised(norm: RowNorm) -> ProducedMatrix:
    """Of x, gamma and beta, then the statistics if they are known."""

    def fused(inputs: Inputs, eps: float) -> "FusedProducer | None":
        x, gamma, beta, *measured = inputs
        return norm.produced(cast(Tensor, x), gamma, beta, eps, *_tensors(measured))

    def values(inputs: Inputs, eps: float) -> tuple[Tensor, ...]:
        x, gamma, beta, *_ = inputs
        return norm.forward(cast(Tensor, x), gamma, beta, eps)

    return ProducedMatrix(fused, values, lambda inputs: _matrix_shape(inputs[0]), norm.statistics)


def _below(inputs: Inputs) -> tuple[int, int]:
    rows = _tensors(inputs)
    return sum(x.shape[0] for x in rows), rows[0].shape[1]


def _tensors(inputs: Inputs) -> Sequence[Tensor]:
    return cast(Sequence[Tensor], inputs)


PRODUCERS = {
    "rows": ProducedMatrix(lambda inputs, eps: None, lambda inputs, eps: (rows_below(_tensors(inputs)),), _below),
    **{each.op: _activated(each) for each in ACTIVATIONS.values() if each.kernel},
    **{f"gradient of {each.op}": _gradient(each) for each in ACTIVATIONS.values() if each.kernel},
    **{kernel.op: _normalised(kernel) for kernel in NORMS.values() if isinstance(kernel, RowNorm)},
}
"""By the names in graphs."""


def rows_below(parts: Sequence[Tensor]) -> Tensor:
    """(n_i, *rest) -> (sum n_i, *rest): a view if the parts lie one after the other in memory, else a copy."""
    first = parts[0].detach()
    shape = sum(part.shape[0] for part in parts), *first.shape[1:]
    return first.as_strided(shape, first.stride(), first.storage_offset()) if _adjacent(parts) else torch.cat([*parts])


def _adjacent(parts: Sequence[Tensor]) -> bool:
    at, store = parts[0].data_ptr(), parts[0].untyped_storage().data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != at or part.untyped_storage().data_ptr() != store:
            return False
        at += part.numel() * part.element_size()
    return True


def _matrix_shape(x: Tensor | None) -> tuple[int, int]:
    assert x is not None
    return x.shape[:-1].numel(), x.shape[-1]


def produced_planes(
    what: str,
    inputs: Inputs,
    eps: float,
    row: str,
    col: str,
    propagate: bool,
    seed: Tensor | None = None,
    slot: Place | None = None,
) -> list[Tensor]:
    """What backward needs of the matrix, then its planes as `cast_planes` returns them.

    `slot` if a plane has a delayed scale. The first scale of a slot follows from the values.
    """
    kind = PRODUCERS[what]
    producer = None if slot is not None and slot.is_new else kind.fused(inputs, eps)
    if producer is None:
        values, *saved = kind.values(inputs, eps)
        values = values.reshape(kind.shape(inputs))
    else:
        values, saved = producer.x, ()
    scale, live = (None, None) if slot is None else slot.place(values)
    parts = cast_planes(producer or values, row, col, propagate, scale, seed, live)
    saved = saved if producer is None else producer.saved
    return [*saved[: len(kind.statistics(inputs))], *parts]


def empty_produced(what: str, inputs: Inputs, eps: float, row: str, col: str, *_: object) -> list[Tensor]:
    """The results of `produced_planes`, without values."""
    kind, x = PRODUCERS[what], inputs[0]
    assert x is not None
    return [*kind.statistics(inputs), *empty_planes(x.new_empty(kind.shape(inputs)), row, col)]


def norm_gradients(
    what: str,
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    saved: list[Tensor],
    needs: list[bool],
    added: Tensor | None = None,
) -> list[Tensor]:
    """The gradients of x, gamma and beta that `needs` names, as `RowNorm.backward_of_produced` gives them.

    The kernel writes those of gamma and beta into one matrix, and results of an op may not share memory.
    """
    norm = NORMS[what]
    assert isinstance(norm, RowNorm)
    dx, dgamma, dbeta = norm.backward_of_produced(dy, x, gamma, beta, saved, tuple(needs), added)
    if dgamma is not None and dbeta is not None:
        dbeta = dbeta.clone()
    return [gradient.contiguous() for gradient in (dx, dgamma, dbeta) if gradient is not None]


def _gradient_shapes(
    what: str,
    dy: Tensor,
    x: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    saved: object,
    needs: list[bool],
    *_: object,
) -> list[Tensor]:
    inputs = zip((x, gamma, beta), needs, strict=True)
    return [one.new_empty(one.shape) for one, need in inputs if one is not None and need]


define_op(
    "norm_gradients(str what, Tensor dy, Tensor x, Tensor? gamma, Tensor? beta, Tensor[] saved, bool[] needs,"
    " Tensor? added=None) -> Tensor[]",
    norm_gradients,
    _gradient_shapes,
    devices=("CUDA",),
)
define_op(
    "produced_planes(str what, Tensor?[] inputs, float eps, str row, str col, bool propagate, Tensor? seed=None)"
    " -> Tensor[]",
    produced_planes,
    empty_produced,
    devices=("CUDA",),
)

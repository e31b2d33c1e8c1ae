"""RollTable: where the delayed slots of several states lie, so that one kernel rolls them all."""

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.errors import UserError
from duotone.state import history
from duotone.state.delayed import DelayedState
from duotone.tensor.history import History


@dataclass(eq=False)
class RollTable:
    """`addresses` int64 (n, 4), see `duotone.kernels.roll`; `limits` fp32 (n,): MAX 2^-margin of each slot."""

    addresses: Tensor
    limits: Tensor


def roll_all(states: Iterable[DelayedState]) -> None:
    """End a step of every state: one launch for all that share a history rule and a device and have a kernel."""
    batches: dict[tuple[int, int], list[tuple[DelayedState, RollTable]]] = {}
    for state in states:
        table = _table_of(state)
        if table is None:
            state.roll()
        else:
            batches.setdefault((id(state.history), table.addresses.get_device()), []).append((state, table))
    for batch in batches.values():
        before = _roll_in_one_kernel(batch[0][0].history, [table for _, table in batch])
        end = 0
        for state, _ in batch:
            start, end = end, end + len(state.largest)
            state.end_step(before, slice(start, end))


def _roll_in_one_kernel(parameters: History, tables: list[RollTable]) -> Tensor:
    from duotone.kernels.roll import roll

    join = _joined.__wrapped__ if is_capturing() else _joined  # memory of a CUDA graph holds no values before a replay
    table = join(*tables)
    recent = parameters.amax_compute_algo != "max"
    skip, spike = parameters.skip_nonfinite_amax, parameters.spike_factor
    return roll(table.addresses, table.limits, parameters.amax_history_len, recent, skip, spike)


@functools.lru_cache(maxsize=64)
def _joined(*tables: RollTable) -> RollTable:
    return RollTable(torch.cat([t.addresses for t in tables]), torch.cat([t.limits for t in tables]))


def _table_of(state: DelayedState) -> RollTable | None:
    """The table of one state, kept until one of its buffers moves; None if no kernel rolls it.

    UserError if a capture comes before the table.
    """
    buffers = state._buffers  # past nn.Module's slow look-up
    scale, amaxes, events = buffers["scale"], buffers["amax_history"], buffers["events"]
    assert scale is not None and amaxes is not None and events is not None
    if not scale.is_cuda:
        return None
    key = (state.history, scale.data_ptr(), amaxes.data_ptr(), events.data_ptr(), *state.largest)
    if state.roll_table is None or state.roll_table[0] != key:
        state.roll_table = key, _new_table(state) if history.has_kernel(state.amax_history, state.history) else None
    return state.roll_table[1]


def _new_table(state: DelayedState) -> RollTable:
    from duotone.kernels.roll import addresses

    if is_capturing():
        raise UserError(
            "a CUDA graph captures a module under delayed scaling that has finished no step; run a step of forward "
            "and backward before the capture, as torch.cuda.make_graphed_callables does by itself"
        )
    limits = history.limits(tuple(state.largest), state.history.margin, state.scale.device)
    return RollTable(addresses(state.amax_history, state.scale, state.events), limits)

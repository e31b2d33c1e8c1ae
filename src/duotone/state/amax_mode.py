"""AmaxMode: what a forward does with the amaxes of its tensors under delayed scaling."""

from enum import Enum

import torch

from duotone.state.torch_private import graph_task_id, is_forward_grad_enabled


class AmaxMode(Enum):
    """What a call does with the amaxes that it meets. The values are what custom ops take and graphs hold."""

    USE = "use"
    """No gradient is tracked: scale with what is known and record nothing."""
    RECORD = "record"
    """A forward: record the amax for the next step."""
    RECOMPUTE = "recompute"
    """Forward code inside a backward: scale as the forward did; a forward that deferred its recording records here."""
    DEFER = "defer"
    """A forward without a graph in an autograd.Function, as reentrant checkpoints run it: the recompute records."""

    __hash__ = object.__hash__  # Enum's is a Python function, and plans are looked up by their mode


AMAX_MODES = {mode.value: mode for mode in AmaxMode}


def in_backward() -> bool:
    """Whether a backward runs in this thread. Forward code inside of one recomputes."""
    return graph_task_id() != -1


def mode_now() -> AmaxMode:
    """The mode of forward code that runs now."""
    if torch.is_grad_enabled():
        return AmaxMode.RECORD if graph_task_id() == -1 else AmaxMode.RECOMPUTE
    # Inference mode and the forward of an autograd.Function alone switch off gradients of forward mode too.
    if is_forward_grad_enabled() or torch.is_inference_mode_enabled():
        return AmaxMode.USE
    return AmaxMode.DEFER

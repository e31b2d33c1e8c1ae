"""The arithmetic of delayed scaling on plain tensors. Row 0 of a history (L, n) fills; the last row is the newest."""

import functools

import torch
from torch import Tensor
from torch.overrides import has_torch_function_unary

from duotone.capture import is_capturing
from duotone.comm import all_reduce
from duotone.dispatch.target import runs_kernels
from duotone.formats.elements import divide
from duotone.formats.scales import FLT_MAX
from duotone.tensor.history import History, clips

LONGEST = 8192
"""The most entries of a history that one program holds."""


SKIPPED, CLAMPED = range(2)
"""Rows of `events`: amaxes that were not finite and did not enter, and spikes that entered as something smaller."""


def is_joinable(parameters: History) -> bool:
    """Whether slots of several states may roll as those of one. A function of the user gets those of one state."""
    return isinstance(parameters.amax_compute_algo, str) and parameters.scaling_factor_compute_algo is None


def has_kernel(history: Tensor, parameters: History) -> bool:
    """Whether one kernel rolls this history (L, n), with those of other states."""
    length, slots = history.shape
    is_small = history.is_cuda and slots > 0 and length <= LONGEST
    return is_small and is_joinable(parameters) and runs_kernels(history.get_device())


@torch.no_grad()
def roll(history: Tensor, scale: Tensor, largest: list[float], parameters: History, events: Tensor) -> Tensor:
    """Roll the history (L, n) and the scales (n,) in place and count `events`, int32 (2, n). Returns the old scales."""
    before = scale.clone()
    scale.copy_(rolled(history, scale, largest, parameters, events))
    return before


def _new_limits(largest: tuple[float, ...], margin: int, device: torch.device) -> Tensor:
    """`limits` without a copy from the host, which waits for the device, and which a CUDA graph refuses."""
    return torch.cat([torch.full((1,), value * 2.0**-margin, dtype=torch.float32, device=device) for value in largest])


@functools.lru_cache(maxsize=1024)
def limits(largest: tuple[float, ...], margin: int, device: torch.device) -> Tensor:
    """fl(MAX 2^-margin) of each slot, fp32 (n,)."""
    with torch.inference_mode(False):
        return _new_limits(largest, margin, device)


def rolled(history: Tensor, scale: Tensor, largest: list[float], parameters: History, events: Tensor) -> Tensor:
    """Roll the history (L, n) in place and return the scales (n,) that follow.

    - Live amax 0: the slot met no tensor. Its history and scale stay.
    - Else the live amax, as `entering` changes it, becomes the newest entry, and scale = fl(fl(MAX 2^-margin) / amax).
    - The old scale stays if amax is not finite. On overflow the scale is the largest fp32.
    - A NaN among the entries is ignored.
    """
    entries = entering(history, parameters, events)
    live = entries[-1]
    moves = live != 0
    algorithm = parameters.amax_compute_algo
    if isinstance(algorithm, str):
        amax = _numbers(entries).amax(0) if algorithm == "max" else live
    else:
        amax = algorithm(entries)
    history[1:].copy_(torch.where(moves, entries[1:], history[1:]))
    history[0].zero_()
    return torch.where(moves, _scale_of(amax, scale, largest, parameters), scale)


def _limits_for(amax: Tensor, largest: list[float], margin: int = 0) -> Tensor:
    """`limits` beside amaxes. Neither a fake tensor nor the memory of a CUDA graph may be cached, and bound code has
    constants of its own."""
    is_fresh = type(amax) is not Tensor or has_torch_function_unary(amax) or is_capturing()
    return (_new_limits if is_fresh else limits)(tuple(largest), margin, amax.device)


def _scale_of(amax: Tensor, scale: Tensor, largest: list[float], parameters: History) -> Tensor:
    """The scales (n,) that follow from amaxes. The old scale stays if an amax is not usable."""
    if parameters.scaling_factor_compute_algo is not None:
        fp8_max = _limits_for(amax, largest).clone()
        return parameters.scaling_factor_compute_algo(amax, scale, fp8_max, parameters)
    fresh = divide(_limits_for(amax, largest, parameters.margin), amax).clamp(max=abs(FLT_MAX))
    return torch.where(torch.isfinite(amax) & (amax > 0), fresh, scale)


def is_new(history: Tensor, scale: Tensor) -> Tensor:
    """Whether slots have met no tensor yet, bool (n,). With a history of length 1, a scale of 1 means new."""
    return (scale == 1) & (history[-1] == 0) if history.shape[0] > 1 else scale == 1


def first(history: Tensor, scale: Tensor, amax: Tensor, largest: list[float], parameters: History) -> Tensor:
    """The scales (n,) of slots whose first tensors have these amaxes (n,). Slots that are not new keep their scale."""
    usable = is_new(history, scale) & torch.isfinite(amax) & (amax > 0)
    return torch.where(usable, _scale_of(amax, scale, largest, parameters), scale)


def fitting(scale: Tensor, amax: Tensor, largest: list[float], parameters: History) -> tuple[Tensor, Tensor]:
    """Which scales (n,) do not fit tensors with these amaxes (n,), and the scales with new ones in their place.

    They clip the tensor, or leave its largest element more than 2^8 below the largest code.
    """
    most = _limits_for(amax, largest)
    misfits = clips(amax, scale, most) | ((amax > 0) & (amax * scale * 2**8 < most))
    return misfits, torch.where(misfits, _scale_of(amax, scale, largest, parameters), scale)


def entering(history: Tensor, parameters: History, events: Tensor) -> Tensor:
    """The entries (L, n) that decide the next scale, oldest first, the live one last. Counts `events`.

    The entry that drops out in this roll still counts.
    """
    live, earlier = history[0].clone(), history[1:]
    if parameters.skip_nonfinite_amax:
        live, earlier = drop_nonfinite(live, events), finite(earlier)
    if parameters.spike_factor and earlier.shape[0]:
        limit = _numbers(earlier).amax(0) * parameters.spike_factor
        spikes = (limit > 0) & (live > limit)
        live = torch.where(spikes, limit, live)
        events[CLAMPED] += spikes
    return torch.cat([earlier, live[None]])


def drop_nonfinite(live: Tensor, events: Tensor) -> Tensor:
    """Live amaxes (n,), with 0 for those that are not finite, which are counted."""
    events[SKIPPED] += ~torch.isfinite(live)
    return finite(live)


def finite(amaxes: Tensor) -> Tensor:
    """The amaxes, with zeros in place of infinities and NaN."""
    return torch.where(torch.isfinite(amaxes), amaxes, 0.0)


def _numbers(entries: Tensor) -> Tensor:
    return torch.where(torch.isnan(entries), 0.0, entries)


def resized(history: Tensor, length: int) -> Tensor:
    """The history at another length. The live row and the newest entries stay; older ones are dropped or 0."""
    newest = history[1:][-(length - 1) :] if length > 1 else history[:0]
    missing = history.new_zeros((length - 1 - newest.shape[0], history.shape[1]))
    return torch.cat([history[:1], missing, newest])


def reduce(histories: list[Tensor], group: str) -> None:
    """Take the maximum of all live rows over the group, in one collective per device."""
    for device in sorted({str(h.device) for h in histories}):
        on_device = [h for h in histories if str(h.device) == device]
        largest = all_reduce(torch.cat([h[0] for h in on_device]), "max", group)
        for history, live in zip(on_device, largest.split([h.shape[1] for h in on_device]), strict=True):
            history[0].copy_(live)

"""Seeds of stochastic rounding: one int64 buffer per converted module, not part of its state_dict.

The initial seed is a hash of torch's initial seed and the module's name, so that no random number is drawn and the
order of conversion does not matter. A forward takes one seed for each stochastic quantize of its plan and advances the
buffer; the taken value travels to backward.
"""

import hashlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.state import frames
from duotone.state.amax_mode import in_backward

BUFFER = "duotone_seed"


def initial_seed(name: str) -> Tensor:
    """int64 (1,): the first seed of the module of that name."""
    digest = hashlib.blake2b(f"{torch.initial_seed()}:{name}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)


def take(buffer: Tensor, count: int) -> Tensor:
    """The current seed; the buffer advances by `count`, in place.

    Inside a backward, where forward code only recomputes, it is the seed of that forward, and the buffer stays.
    UserError where no checkpoint runs the recompute.
    """
    if torch.compiler.is_compiling():
        return torch.ops.duotone.take_seed(buffer, count)
    key = ("seed", id(buffer))
    seed = _again(key) if in_backward() else torch.ops.duotone.draw_seed(buffer, count)
    frames.remember(key, seed)
    return seed


def upcoming(buffer: Tensor, count: int) -> Tensor:
    """The seed that the next `take` of so many gives; nothing advances."""
    if torch.compiler.is_compiling():
        return torch.ops.duotone.upcoming_seed(buffer, count)
    return _again(("seed", id(buffer)), advances=False) if in_backward() else buffer.clone()


def _again(key: tuple[str, int], advances: bool = True) -> Tensor:
    record = frames.recomputed()
    if record is None:
        raise UserError(
            "a module that rounds stochastically runs inside a backward and no checkpoint recomputes it, so its seed "
            "is not known; recompute through torch.utils.checkpoint, or call the module outside of the backward"
        )
    seed: Tensor = record.take(key, advances)
    return seed


_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("take_seed(Tensor(a!) buffer, int count) -> Tensor")
_LIBRARY.define("draw_seed(Tensor(a!) buffer, int count) -> Tensor")
_LIBRARY.define("upcoming_seed(Tensor buffer, int count) -> Tensor")


def _draw_seed(buffer: Tensor, count: int) -> Tensor:
    seed = buffer.clone()
    buffer.add_(count)
    return seed


def _take_seed(buffer: Tensor, count: int) -> Tensor:
    """For compiled code, whose buffers may be copies: its draws have one order for all modules of a frame."""
    if in_backward():
        record = frames.recomputed()
        seed = buffer - count if record is None else record.take("compiled")
    else:
        seed = _draw_seed(buffer, count)
    frames.remember("compiled", seed)
    return seed


def _upcoming_seed(buffer: Tensor, count: int) -> Tensor:
    if not in_backward():
        return buffer.clone()
    record = frames.recomputed()
    return buffer - count if record is None else record.take("compiled", advances=False).clone()


def _meta(buffer: Tensor, count: int) -> Tensor:
    return torch.empty_like(buffer)


_EAGER = {"take_seed": _take_seed, "draw_seed": _draw_seed, "upcoming_seed": _upcoming_seed}
for _name, _eager in _EAGER.items():
    for _key, _kernel in (("CPU", _eager), ("CUDA", _eager), ("Meta", _meta)):
        _LIBRARY.impl(_name, _kernel, _key)


def rng_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all seed buffers by full name, for a checkpoint."""
    return {name: buffer.detach().clone().cpu() for name, buffer in _buffers(model).items()}


def load_rng_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Write the seeds of `rng_state` back. Raises UserError, before anything changes, where the names differ."""
    if not isinstance(state, dict):
        raise UserError(f"load_rng_state takes what rng_state gave, a dict of tensors; got {type(state).__name__}")
    buffers = _buffers(model)
    if set(buffers) != set(state):
        odd = sorted(set(buffers) ^ set(state))[0]
        raise UserError(f"seed {odd!r} is on one side only; convert the model as it was when rng_state was taken")
    for name in buffers:
        given = state[name]
        if not isinstance(given, Tensor) or given.dtype != torch.int64 or given.shape != (1,):
            raise UserError(f"seed {name!r} must be an int64 tensor of one element, as rng_state gives it")
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
    for module in model.modules():
        if module._buffers.get(BUFFER) is not None:
            module.__dict__[RESTORED] = module._buffers[BUFFER]._version  # type: ignore[union-attr]


LOADED, RESTORED = "_loaded_without_seed", "_seed_restored_at"


def note_load(module: Any) -> None:
    """Values came from a checkpoint, which holds no seed; a write to the seed afterwards is seen by its version.

    A seed that was restored before, and drawn from by nobody since, counts as that of the checkpoint.
    """
    if module.__dict__.get(RESTORED) == module._buffers[BUFFER]._version:
        return
    module.__dict__[LOADED] = module._buffers[BUFFER]._version


def warn_of_load(module: Any, count: int) -> None:
    """Say that a module draws so many whose values were loaded, its seed not. Python shows one text once."""
    if count and module.__dict__.pop(LOADED, None) == module._buffers[BUFFER]._version:
        warnings.warn(
            "stochastic rounding draws from seeds that no checkpoint restored: a state_dict holds none; to resume a "
            "run with its bits, call duotone.load_rng_state with what duotone.rng_state gave beside the state_dict",
            stacklevel=2,
        )


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise UserError(f"the seeds of a model were asked for; got {type(model).__name__}: pass the nn.Module")
    return {name: buffer for name, buffer in model.named_buffers() if name.split(".")[-1] == BUFFER}

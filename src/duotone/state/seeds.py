"""Seeds of stochastic rounding: one int64 buffer per converted module, not part of its state_dict.

The initial seed is a hash of torch's initial seed and the module's name, so that no random number is drawn and the
order of conversion does not matter. A forward takes one seed for each stochastic quantize of its plan and advances the
buffer; the taken value travels to backward.
"""

import hashlib

import torch
from torch import Tensor, nn

from duotone.errors import UserError

BUFFER = "duotone_seed"


def initial_seed(name: str) -> Tensor:
    """int64 (1,): the first seed of the module of that name."""
    digest = hashlib.blake2b(f"{torch.initial_seed()}:{name}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)


def take(buffer: Tensor, count: int) -> Tensor:
    """The current seed; the buffer advances by `count`, in place.

    Inside a backward, where forward code only recomputes, it is the seed taken last, and the buffer stays.
    """
    return torch.ops.duotone.take_seed(buffer, count)


def upcoming(buffer: Tensor, count: int) -> Tensor:
    """The seed that the next `take` of so many gives; nothing advances."""
    return torch.ops.duotone.upcoming_seed(buffer, count)


_LIBRARY = torch.library.Library("duotone", "FRAGMENT")
_LIBRARY.define("take_seed(Tensor(a!) buffer, int count) -> Tensor")
_LIBRARY.define("upcoming_seed(Tensor buffer, int count) -> Tensor")


def _take_seed(buffer: Tensor, count: int) -> Tensor:
    if torch._C._current_graph_task_id() != -1:
        return buffer - count
    seed = buffer.clone()
    buffer.add_(count)
    return seed


def _upcoming_seed(buffer: Tensor, count: int) -> Tensor:
    return buffer - count if torch._C._current_graph_task_id() != -1 else buffer.clone()


def _meta(buffer: Tensor, count: int) -> Tensor:
    return torch.empty_like(buffer)


for _name, _eager in (("take_seed", _take_seed), ("upcoming_seed", _upcoming_seed)):
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


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer for name, buffer in model.named_buffers() if name.split(".")[-1] == BUFFER}

"""Seeds of stochastic rounding: one int64 buffer per converted module, not part of its state_dict.

The initial seed is a hash of torch's initial seed and the module's name, so that no random number is drawn and the
order of conversion does not matter. A forward takes one seed for each stochastic quantize of its plan and advances the
buffer; the taken value travels to backward.
"""

import hashlib
import warnings
from collections.abc import Hashable, Mapping

import torch
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.graph_ops import define_op
from duotone.state import frames
from duotone.state.region import in_backward
from duotone.state.torch_private import once

BUFFER = "duotone_seed"


def initial_seed(name: str) -> Tensor:
    """int64 (1,): the first seed of the module of that name."""
    digest = hashlib.blake2b(f"{torch.initial_seed()}:{name}".encode(), digest_size=8).digest()
    return torch.tensor([int.from_bytes(digest, "little", signed=True)], dtype=torch.int64)


def follow_name(module: nn.Module, before: str, name: str) -> None:
    """Start the seed of a module anew under another name, if it is still the first one under the name before."""
    buffer = module._buffers.get(BUFFER)
    if type(buffer) is Tensor and not buffer.is_meta and torch.equal(buffer.cpu(), initial_seed(before)):
        buffer.copy_(initial_seed(name))


def take(buffer: Tensor, count: int) -> Tensor:
    """The current seed, int64 (1,). The buffer advances by `count`, in place.

    Forward code inside a backward recomputes: it gets the seed of its forward, and the buffer stays. Raises UserError
    if no checkpoint runs the recompute.
    """
    if torch.compiler.is_dynamo_compiling():
        return torch.ops.duotone.take_seed(buffer, count)
    key = ("seed", id(buffer))
    # As one op, since a recompute draws nothing: a selective checkpoint counts the ops of both, each by its name.
    draw = torch.ops.duotone.draw_seed if torch._C._len_torch_dispatch_stack() else _draw_seed
    seed = _again(key) if in_backward() else draw(buffer, count, False)
    frames.remember(key, seed)
    return seed


def upcoming(buffer: Tensor, count: int) -> Tensor:
    """The seed that the next `take` of `count` returns. Nothing advances."""
    if torch.compiler.is_dynamo_compiling():  # a write, though of nothing, stays in the forward of the graph
        return torch.ops.duotone.take_seed(buffer, 0)
    return _again(("seed", id(buffer)), advances=False) if in_backward() else buffer.clone()


def _again(key: Hashable, advances: bool = True) -> Tensor:
    record = frames.recomputed()
    if record is None:
        raise UserError(
            "a module that rounds stochastically runs inside a backward and no checkpoint recomputes it, so its seed "
            "is not known; recompute through torch.utils.checkpoint, or call the module outside of the backward"
        )
    seed: Tensor = record.take(key, advances)
    return seed


def _draw_seed(buffer: Tensor, count: int, compiled: bool) -> Tensor:
    """The seed, which advances. Compiled code has copies of buffers, so a frame keeps all its draws in one order."""
    recomputes = compiled and in_backward()
    seed = _again("compiled") if recomputes else buffer.clone()
    if not recomputes:
        buffer.add_(count)
    if compiled:
        frames.remember("compiled", seed)
    return seed


def _empty_seed(buffer: Tensor, count: int, compiled: bool) -> Tensor:
    return torch.empty_like(buffer)


define_op("draw_seed(Tensor(a!) buffer, int count, bool compiled) -> Tensor", _draw_seed, _empty_seed)
_draw_once = once(torch.ops.duotone.draw_seed)
define_op("take_seed(Tensor(a!) buffer, int count) -> Tensor", lambda buffer, count: _draw_once(buffer, count, True))


def rng_state(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all seed buffers by full name, for a checkpoint."""
    return {name: buffer.detach().clone().cpu() for name, buffer in _buffers(model).items()}


def load_rng_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    """Write the seeds of `rng_state` back. Raises UserError, before anything changes, if the names differ."""
    if not isinstance(state, dict):
        raise UserError(f"load_rng_state takes what rng_state gave, a dict of tensors; got {type(state).__name__}")
    buffers = _buffers(model)
    if set(buffers) != set(state):
        odd = sorted(set(buffers) ^ set(state))[0]
        raise UserError(f"seed {odd!r} is on one side only; convert the model as it was when rng_state was taken")
    for name in buffers:
        seed = state[name]
        if not isinstance(seed, Tensor) or seed.dtype != torch.int64 or seed.shape != (1,):
            raise UserError(f"seed {name!r} must be an int64 tensor of one element, as rng_state gives it")
    for name, buffer in buffers.items():
        buffer.copy_(state[name])
    for module in model.modules():
        if module._buffers.get(BUFFER) is not None:
            module.__dict__[RESTORED] = module.get_buffer(BUFFER)._version


LOADED, RESTORED = "_loaded_without_seed", "_seed_restored_at"


def note_load(module: nn.Module) -> None:
    """Note that a module loaded values without a seed. Its version tells whether the seed is written afterwards.

    A seed that `load_rng_state` restored before, and that nobody drew from since, belongs to the checkpoint.
    """
    version = module.get_buffer(BUFFER)._version
    if module.__dict__.get(RESTORED) != version:
        module.__dict__[LOADED] = version


def lacks_seed(module: nn.Module) -> bool:
    """Whether a module loaded values without a seed, and its seed has not moved since."""
    return LOADED in module.__dict__ and module.__dict__[LOADED] == module.get_buffer(BUFFER)._version


def warn_of_load(module: nn.Module, count: int) -> None:
    """Warn if a module that draws `count` seeds loaded its values without its seed. Python shows the text once."""
    if count and lacks_seed(module):
        del module.__dict__[LOADED]
        warnings.warn(
            "stochastic rounding draws from seeds that no checkpoint restored: a state_dict holds none; to resume a "
            "run with its bits, call duotone.load_rng_state with what duotone.rng_state gave beside the state_dict",
            stacklevel=2,
        )


def _buffers(model: nn.Module) -> dict[str, Tensor]:
    if not isinstance(model, nn.Module):
        raise UserError(f"the seeds of a model were asked for; got {type(model).__name__}: pass the nn.Module")
    buffers = {name: buffer for name, buffer in model.named_buffers() if name.split(".")[-1] == BUFFER}
    require_memory(buffers)
    return buffers


def require_memory(tensors: Mapping[str, Tensor]) -> None:
    """UserError if a tensor of a model, by its name, is on meta."""
    if absent := next((name for name, tensor in tensors.items() if tensor.is_meta), ""):
        raise UserError(f"{absent} is on meta, where it has no value: call to_empty(device=...) on the model before")

"""`_extra_state`: delayed scaling as checkpoints of Transformer Engine hold it, read without running their code.

It holds the bytes of a pickle or of `torch.save`, as a uint8 tensor or an `io.BytesIO`. Older versions store the dict
itself. Forward slots of a linear are input, weight and perhaps output. Backward slots are grad_output and grad_input.
"""

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace

import torch
from torch import Tensor
from torch._utils import _rebuild_tensor_v2

from duotone.errors import UserError

PARTS = ("scale", "amax_history")
PASSES = {"forward": "fwd", "backward": "bwd"}
Slots = Mapping[str, Sequence[int]]
LINEAR: Slots = {"forward": (0, 0, 1, 1), "backward": (0, 0)}
"""Slot of a linear in Duotone -> slot in Transformer Engine, where both directions share one."""

ATTENTION: Slots = {"forward": (2, 2, 2, 2, 2, 2, 8, 8, 3, 3), "backward": (3, 3, 5, 5)}
"""The same for attention. There query, key and value share a slot; softmax, output, dO and dP have one each."""


class Opaque:
    """Stands for an object of Transformer Engine, such as a recipe. Nothing reads its fields."""

    def __init__(self, *_: object) -> None: ...

    def __setstate__(self, state: object) -> None: ...


def _storage(data: bytes) -> object:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


ALLOWED: dict[str, Callable[..., object]] = {
    "builtins.getattr": Opaque,  # a member of an Enum, as Python 3.11 pickles it
    "collections.OrderedDict": OrderedDict,
    "torch._utils._rebuild_tensor_v2": _rebuild_tensor_v2,
    "torch.storage._load_from_bytes": _storage,
}


class Unpickler(pickle.Unpickler):
    """Builds only tensors and plain values. UserError for everything else that a pickle names."""

    def find_class(self, module: str, name: str) -> object:
        """The class or function of a name in a pickle. UserError unless it is allowed."""
        if module.partition(".")[0] in ("transformer_engine", "transformer_engine_torch"):
            return Opaque
        path = f"{module}.{name}"
        if path not in ALLOWED:
            raise UserError(f"an _extra_state names {path}, which no state of delayed scaling holds; remove that entry")
        return ALLOWED[path]


def read(extra: object) -> dict[str, object]:
    """The content of an `_extra_state`; {} if it is empty. UserError for what Transformer Engine does not write."""
    if isinstance(extra, Tensor):
        extra = io.BytesIO(extra.detach().cpu().numpy().tobytes())
    if isinstance(extra, io.BytesIO):
        data, module = extra.getvalue(), SimpleNamespace(Unpickler=Unpickler, __name__="pickle")
        try:
            if not data:
                extra = None
            elif data[:2] == b"PK":
                extra = torch.load(io.BytesIO(data), "cpu", module, weights_only=False)
            else:
                extra = Unpickler(io.BytesIO(data)).load()
        except (pickle.UnpicklingError, EOFError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            if isinstance(error, UserError):
                raise
            raise UserError(
                f"an _extra_state of {len(data)} bytes cannot be read: {error}; remove that entry"
            ) from None
    if extra is None:
        return {}
    if not isinstance(extra, dict):
        raise UserError(f"an _extra_state is a {type(extra).__name__}, not what Transformer Engine writes; remove it")
    return extra


def unpack(state_dict: dict[str, Tensor], prefix: str, linears: Sequence[str], attends: bool) -> None:
    """Replace `_extra_state` in a checkpoint by the delayed states of Duotone's modules. Without a state it goes.

    `linears` are the prefixes of the modules, one for each linear of their module. UserError if slots do not fit.
    """
    state, slots = read(state_dict.pop(f"{prefix}_extra_state", None)), ATTENTION if attends else LINEAR
    for direction, short in PASSES.items():
        saved = {part: state.get(f"{part}_{short}") for part in PARTS}
        if all(part is None for part in saved.values()):
            continue
        parts = {part: tensor for part, tensor in saved.items() if isinstance(tensor, Tensor) and tensor.dim()}
        counts = {parts[part].shape[-1] if part in parts else 0 for part in PARTS}
        count, *others = counts
        each = count // len(linears)
        if others or count % len(linears) or each <= max(slots[direction]):
            raise UserError(
                f"{prefix}_extra_state has {direction} scales or histories that are not those of "
                f"{len(linears)} linears or of attention; load it into the model that it is of"
            )
        for place in dict.fromkeys(linears):
            members = [i for i, linear in enumerate(linears) if linear == place]
            index = torch.tensor([i * each + slot for i in members for slot in slots[direction]])
            for part, tensor in parts.items():
                state_dict[f"{prefix}{place}duotone_{direction}.{part}"] = tensor.float()[..., index]

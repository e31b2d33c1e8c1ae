"""What forwards of rows save for backward outside of the graph: by the number in a token, which the graph saves.

It serves calls that keep tensors until the next call (cached weights, `main_grad`, delayed gradients). It also serves
groups, whose row counts decide the shapes of what they save.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, SupportsIndex

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.graph_ops import as_of_now
from duotone.numbered import Numbered
from duotone.pipeline.rows import Row, Structure
from duotone.state.torch_private import define_effects_of

aten = torch.ops.aten


@dataclass(eq=False)
class ForBackward:
    """What the forward of a row saves for its backward. Not the tensors of the graph: compilers reuse their memory."""

    row: Row
    structure: Structure
    tensors: list[Tensor]
    device: torch.device

    def to_cpu(self, *, pinned: bool) -> None:
        """Move the tensors to memory of the CPU."""
        for place, tensor in enumerate(self.tensors):
            if not tensor.is_cpu:
                self.tensors[place] = torch.empty_like(tensor, device="cpu", pin_memory=pinned).copy_(tensor)

    def restored(self) -> list[Tensor]:
        """The tensors, on the device of the forward."""
        return [tensor.to(self.device) for tensor in self.tensors]


FORWARDS: Numbered[ForBackward] = Numbered()
"""By the number in the token of a forward. An entry lives as long as a graph holds the token or a copy of it."""

KEEPS = "is_first_microbatch, fuse_wgrad_accumulation and delay_wgrad_compute keep tensors between calls"
TAKES_NO_VALUES = (
    f"what a compiled forward saved is not in the graph: where {KEEPS}, and in groups, hooks for saved tensors may "
    "copy tensors, but not store or compute with their values; use torch.autograd.graph.save_on_cpu, or no hooks"
)


class Token(Tensor):
    """int64 (1,) on the CPU: the number of a forward in FORWARDS. Copies of it hold the entry too.

    Hooks for saved tensors copy a token and drop it. Those of `save_on_cpu` call `cpu` or copy into pinned memory, and
    what the forward saved moves to the CPU.
    """

    number: Tensor
    entry: ForBackward

    @staticmethod
    def of(entry: ForBackward) -> "Token":
        """A token with a new number."""
        return Token(torch.tensor([int(FORWARDS.add(entry))], device="cpu"), entry)

    @staticmethod
    def __new__(cls, number: Tensor, entry: ForBackward) -> "Token":
        token = Tensor._make_subclass(cls, number)
        token.number, token.entry = number, entry
        return token

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise UserError(TAKES_NO_VALUES)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise UserError(TAKES_NO_VALUES)

    def cpu(self, *args: Any, **kwargs: Any) -> Tensor:
        """The token. What the forward saved moves."""
        self.entry.to_cpu(pinned=False)
        return self

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        token = next((each for each in args if isinstance(each, Token)), None)
        if token is None:  # it is in a list
            raise UserError(TAKES_NO_VALUES)
        result = function(*plain(args), **(kwargs or {}))
        if function is aten.copy_.default:
            result.untyped_storage().attached = token.entry
            if result.is_pinned():
                token.entry.to_cpu(pinned=True)
        return cls(result, token.entry) if function in COPIES else result


COPIES = aten.detach.default, aten.clone.default, aten._to_copy.default, as_of_now.default
"""Ops whose result is a token too."""


def plain(args: Sequence[Any]) -> list[Any]:
    """Arguments with numbers for tokens."""
    return [each.number if isinstance(each, Token) else each for each in args]


define_effects_of(Token, plain)


def forward_of(token: Tensor) -> ForBackward:
    """What the forward saved whose number a token holds. UserError if a hook dropped it."""
    entry = FORWARDS.get(str(token.item()))
    if entry is None:
        raise UserError(TAKES_NO_VALUES)
    return entry

"""RecipeState: the quantizers of one module and direction, with the delayed scales that they share.

This is Transformer Engine's interface to recipes and states. Modules of this library resolve plans instead.
"""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.compat.quantizers import QuantizerHandle
from duotone.errors import UserError
from duotone.modules.delayed_states import agreed_history, largest
from duotone.recipes.custom import CustomRecipe
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, QuantizerRole, require_known
from duotone.state.autocast_context import active_region
from duotone.state.delayed import DelayedState
from duotone.state.delayed_slot import DelayedSlot
from duotone.state.region import AmaxMode
from duotone.state.rolling import roll_all
from duotone.tensor import Quantizer
from duotone.tensor.context import Slot


class RecipeState:
    """The quantizers of a recipe for `num_quantizers` slots. `make_quantizers` returns a handle for each."""

    def __init__(
        self, recipe: Recipe, mode: str, roles: Sequence[QuantizerRole | None], device: torch.device | str | None
    ) -> None:
        self.recipe, self.mode, self.roles = recipe, mode, tuple(roles)
        slots = itertools.cycle(QuantizerRole(tensor_type=kind) for kind in SLOTS[mode])
        for role in self.roles:
            require_known(role)
        self.values = [recipe.quantizer(role, ANYWHERE, slot) for role, slot in zip(self.roles, slots, strict=False)]
        self.delayed: DelayedState | None = self._shared_state(device)

    def __repr__(self) -> str:
        return f"RecipeState({self.recipe.name}, mode={self.mode!r}, num_quantizers={len(self.values)})"

    @classmethod
    def create(
        cls,
        recipe: RecipeLike,
        *,
        mode: str,
        num_quantizers: int = 1,
        device: torch.device | str | None = None,
        roles: Sequence[QuantizerRole | None] | None = None,
    ) -> "RecipeState":
        """The state of a recipe in a `mode`, "forward" or "backward".

        A slot without a role, or with a role that names no tensor of a linear, goes by its position: input, weight and
        output in turn (forward), or grad_output and grad_input (backward). Raises UserError, a ValueError, if the
        arguments do not fit together.
        """
        recipe = as_recipe("RecipeState", recipe)
        if mode not in SLOTS:
            raise UserError(f"mode {mode!r} is unknown; allowed are 'forward' and 'backward'")
        if not isinstance(num_quantizers, int) or num_quantizers < 0:
            raise UserError(f"num_quantizers is {num_quantizers!r}; it must be an integer of at least 0")
        if roles is not None and len(roles) != num_quantizers:
            raise UserError(
                f"{len(roles)} roles for {num_quantizers} quantizers; give one per slot, None where unknown"
            )
        if roles is None:
            if isinstance(recipe, CustomRecipe):
                message = "a custom recipe got no roles, so that its factory sees tensor types by position alone"
                warnings.warn(f"{message}; give RecipeState roles", stacklevel=2)
            roles = [
                QuantizerRole(tensor_type=kind)
                for kind in itertools.islice(itertools.cycle(SLOTS[mode]), num_quantizers)
            ]
        return cls(recipe, mode, roles, device)

    @property
    def scale(self) -> Tensor | None:
        """fp32 (n,): the encode scales of the slots, then of their second directions. None without delayed scaling."""
        return None if self.delayed is None else self.delayed.scale

    @property
    def amax_history(self) -> Tensor | None:
        """fp32 (L, n): row 0 fills, the last row is the newest. None without delayed scaling."""
        return None if self.delayed is None else self.delayed.amax_history

    def make_quantizers(self) -> list[QuantizerHandle]:
        """A new handle per slot. Handles of delayed slots view the buffers of this state."""
        second = itertools.count(len(self.values))
        return [self._handle(i, value, second) for i, value in enumerate(self.values)]

    def roll(self) -> None:
        """Update the delayed scales now. Loops without autocast and backward need it; these do it otherwise."""
        if self.delayed is not None:
            roll_all([self.delayed])

    def _shared_state(self, device: torch.device | str | None) -> DelayedState | None:
        kinds = [f" ({role.tensor_type})" if role is not None and role.tensor_type else "" for role in self.roles]
        delayed = {f"slot {i}{kinds[i]}": value for i, value in enumerate(self.values) if any(value.delayed)}
        if not delayed:
            return None
        by_slot = [[size for size in largest(value) if size] for value in self.values]
        sizes = [(*sides, 0.0)[0] for sides in by_slot] + [side for sides in by_slot for side in sides[1:]]
        state = DelayedState(len(sizes), agreed_history(delayed), device)
        state.largest = sizes
        return state

    def _handle(self, i: int, value: Quantizer, second: Iterator[int]) -> QuantizerHandle:
        row, col = value.delayed
        if self.delayed is None or not (row or col):
            return QuantizerHandle(value)
        indices = (i if row else None, (next(second) if row else i) if col else None)
        return DelayedHandle(value, self.delayed, indices, self.mode == "backward")


class DelayedHandle(QuantizerHandle):
    """A quantizer over slots of a `RecipeState`. `scale` and `amax` view the first one, fp32 (1,) each."""

    def __init__(
        self, value: Quantizer, state: DelayedState, indices: tuple[int | None, int | None], backward: bool
    ) -> None:
        super().__init__(value)
        first = next(i for i in indices if i is not None)
        self.state = state
        self.scale = state.scale[first : first + 1]
        self.amax = state.amax_history[0, first : first + 1]
        row, col = (None if i is None else LiveSlot(state.number, i, backward) for i in indices)
        self.slots = (row, col)


@dataclass(frozen=True)
class LiveSlot(Slot):
    """A slot that always records, in the reduction group of the enclosing autocast."""

    state: str
    index: int
    backward: bool

    def scale_for(self, x: Tensor) -> Tensor:
        region = active_region()
        group = "" if region is None else region.group
        return DelayedSlot(self.state, self.index, group, AmaxMode.RECORD, self.backward).scale_for(x)

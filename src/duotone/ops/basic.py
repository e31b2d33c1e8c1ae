"""Small ops: bias, scale, dropout, reshape, further inputs and outputs, quantize."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from duotone.errors import RecipeError, UserError
from duotone.formats import IDENTITY
from duotone.linear.backward_operand import BACKWARD_OPERANDS
from duotone.linear.core import as_matrix
from duotone.pipeline.op import CallRegion, Op, TensorInfo
from duotone.pipeline.stage import Kept, Stage
from duotone.planned.initialisation import materialise
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe, drop_dead
from duotone.recipes.roles import ANYWHERE, QuantizerRole
from duotone.state import seeds
from duotone.state.amax_mode import mode_now
from duotone.state.autocast_context import HIGH_PRECISION, active_region
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.quantizer import Quantizer


class IdentityStage(Stage):
    """x -> x."""

    refusal, reads = "", (False,)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x,)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return x, ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (dy,)


class BiasStage(Stage):
    """x (*lead, N), bias (N,) -> x + bias."""

    arity = (1,)

    refusal, reads = "", (False, False)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x + operands[0],)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return x + operands[0], ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return dy, as_matrix(dy).sum(0) if needs[1] else None


@dataclass(frozen=True, eq=False)
class ScaleStage(Stage):
    """x -> x * scale."""

    scale: float

    refusal, reads = "", (False,)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x * self.scale,)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return x * self.scale, ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (dy * self.scale,)


@dataclass(frozen=True, eq=False)
class DropoutStage(Stage):
    """Zeroes with probability p and divides the rest by 1 - p."""

    p: float
    keeps: bool

    reads = (False,)

    @property
    def refusal(self) -> str:
        return "" if self.keeps else "it kept no mask of dropout, because nothing before that needs a gradient"

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        if kept is None:
            return (torch.dropout(x, self.p, True),)
        return (torch.ops.aten.native_dropout_backward(x, kept[0], self.factor),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        y, mask = torch.native_dropout(x, self.p, True)
        return y, (mask,) if self.keeps else ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (torch.ops.aten.native_dropout_backward(dy, kept[0], self.factor),)

    @property
    def factor(self) -> float:
        return 1 / (1 - self.p) if self.p < 1 else 0.0


@dataclass(frozen=True, eq=False)
class ReshapeStage(Stage):
    """x -> x.reshape(shape)."""

    shape: tuple[int, ...]

    refusal, reads = "", (False,)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x.reshape(self.shape),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return x.reshape(self.shape), ((x.shape,),)

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (dy.reshape(kept[0][0]),)


class AddStage(Stage):
    """x, other of the same shape -> x + other."""

    arity = (1,)

    refusal, reads = "", (False, False)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x + operands[0].reshape(x.shape),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        other = operands[0]
        return x + other.reshape(x.shape), ((other.shape,),)

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return dy, dy.view(kept[0][0]) if needs[1] else None


class ExtraOutputStage(Stage):
    """x -> x, and x as a further output."""

    extra_outputs: ClassVar[int] = 1

    refusal, reads = "", (False,)

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return x, x.view_as(x)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return x, (), x.view_as(x)

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (dy + extra[0],)


@dataclass(frozen=True, eq=False)
class QuantizeStage(Stage):
    """x, seed int64 (1,) or None -> x quantized, and its gradient too, where there are quantizers for them."""

    forward_to: Quantizer | None
    backward_to: Quantizer | None
    columnwise: bool
    propagate: bool = True
    arity = (1,)

    @property
    def draws(self) -> tuple[bool, bool]:
        """Whether forward and backward round stochastically."""
        forward, backward = (to is not None and to.is_stochastic for to in (self.forward_to, self.backward_to))
        return forward, backward

    @property
    def refusal(self) -> str:
        return "" if self.forward_to is self.backward_to is None else "it quantizes"

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (x,)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        (seed,) = operands
        if self.forward_to is not None:
            x = self.forward_to.make(x, Usage(True, self.columnwise), self._context(seed))
        return x, ((seed,),)

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        if self.backward_to is not None:
            ((seed,),) = kept
            own = None if seed is None else seed + int(self.draws[0])
            dy = self.backward_to.make(dy, ctx=self._context(own))
        return dy, None

    def _context(self, seed: Tensor | None) -> QuantizeContext:
        return QuantizeContext(seed=seed, propagate=self.propagate)


class BasicOp(Op, nn.Module):
    """An op whose stage does not depend on the input."""

    stage: Stage = IdentityStage()

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        return self.stage, signal._replace(held=None)


class Identity(BasicOp):
    """x -> x."""


class Bias(BasicOp):
    """Adds a vector of the last dimension's size."""

    stage = BiasStage()

    def __init__(self, size: int, *, dtype: torch.dtype | None = None, device: Any = None) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, dtype=dtype, device=device))

    def reset_parameters(self) -> None:
        """Zeros; a parameter on meta comes to the default device first."""
        materialise(self)
        nn.init.zeros_(self.bias)

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        if signal.width not in (None, self.bias.shape[0]):
            raise UserError(f"Bias takes (..., {self.bias.shape[0]}); got (..., {signal.width}): reshape the input")
        tracked = torch.is_grad_enabled() and self.bias.requires_grad
        return self.stage, signal._replace(requires_grad=signal.requires_grad or tracked, held=None)

    def operands(self, stage: Any, signal: TensorInfo, extra: Sequence[Any]) -> Sequence[Any]:
        return (self.bias if self.bias.dtype is signal.dtype else self.bias.to(signal.dtype),)


class ConstantScale(BasicOp):
    """Multiplies by a number."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale
        self.stage = ScaleStage(scale)


class Dropout(BasicOp):
    """torch's dropout; the identity in evaluation."""

    def __init__(self, p: float) -> None:
        super().__init__()
        if not 0 <= p <= 1:
            raise UserError(f"dropout has probability {p}; give one from 0 to 1")
        self.p = p
        self._by_keeps = {keeps: DropoutStage(p, keeps) for keeps in (False, True)}

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        dropping = self._by_keeps[signal.requires_grad]
        return dropping if self.training and self.p else self.stage, signal._replace(held=None)


class Reshape(BasicOp):
    """x.reshape(shape); one dimension may be -1."""

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.stage = ReshapeStage(self.shape)

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        width, rows = self._sizes(signal)
        return self.stage, signal._replace(width=width, rows=rows, held=None)

    def _sizes(self, signal: TensorInfo) -> tuple[int | None, int | None]:
        """Width and rows of the output; None where the input's are not known. UserError where they do not fit."""
        if signal.width is None or signal.rows is None:
            return (self.shape[-1] if self.shape[-1] >= 0 else None), None
        elements, given = signal.width * signal.rows, math.prod(size for size in self.shape if size >= 0)
        free = -1 in self.shape
        if (elements != given and not free) or (free and (not given or elements % given)):
            raise UserError(f"Reshape to {self.shape} takes as many elements; got {signal.rows} rows of {signal.width}")
        width = self.shape[-1] if self.shape[-1] >= 0 else elements // given
        return width, elements // width if width else 0


class AddExtraInput(BasicOp):
    """Adds a further input of the call."""

    extra_inputs = 1
    stage = AddStage()

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        return self.stage, signal._replace(requires_grad=torch.is_grad_enabled(), held=None)

    def accept(self, stage: Any, signal: TensorInfo, extra: Sequence[Any]) -> Sequence[Any]:
        (other,) = extra
        if not isinstance(other, Tensor) or other.dim() == 0:
            raise UserError(f"AddExtraInput adds a tensor of the same shape; got {type(other).__name__}")
        rows, width = other.shape[:-1].numel(), other.shape[-1]
        if signal.width not in (None, width) or signal.rows not in (None, rows):
            got = f"{rows} rows of {width} for {signal.rows} of {signal.width}"
            raise UserError(f"AddExtraInput adds tensors of one shape; got {got}")
        return extra

    def operands(self, stage: Any, signal: TensorInfo, extra: Sequence[Any]) -> Sequence[Any]:
        return extra


class MakeExtraOutput(BasicOp):
    """Gives its input as a further output of the call too."""

    extra_outputs = 1
    stage = ExtraOutputStage()


_NUMBERS = itertools.count(1)
INPUT, GRAD_OUTPUT = QuantizerRole("linear", "input"), QuantizerRole("linear", "grad_output")


class Quantize(BasicOp):
    """Quantizes its input, its gradient or both for the consumer whose roles are given; the identity without a recipe.

    `recipe` applies where no autocast encloses the call. Under a backward override gradients stay as they are. Raises
    RecipeError where the recipe gives a delayed format, whose scale belongs to the module that consumes the tensor.
    """

    def __init__(
        self,
        forward: bool = True,
        backward: bool = False,
        *,
        role: QuantizerRole = INPUT,
        grad_role: QuantizerRole = GRAD_OUTPUT,
        recipe: RecipeLike = HIGH_PRECISION,
    ) -> None:
        super().__init__()
        self.roles = (role if forward else None, grad_role if backward else None)
        self.recipe = as_recipe("Quantize", recipe)
        if backward:
            seed = seeds.initial_seed(f"Quantize_{next(_NUMBERS)}")
            self.register_buffer(seeds.BUFFER, seed, persistent=False)
        self._forget()

    def _forget(self) -> None:
        self._stages: dict[tuple[str, bool], QuantizeStage] = {}
        self._region = CallRegion()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in super().__getstate__().items() if name not in ("_stages", "_region")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()

    def link(self, signal: TensorInfo, is_first_microbatch: bool | None) -> tuple[Stage, TensorInfo]:
        region = active_region() if torch.compiler.is_compiling() else self._region.now(mode_now())
        recipe = self.recipe if region is None else region.recipe
        if recipe.evaluation is not None and not self.training:
            recipe = recipe.evaluation
        key = (recipe.key, signal.requires_grad)
        stage = self._stages.get(key)
        if stage is None:
            forward, backward = (None if role is None else self._quantizer(recipe, role) for role in self.roles)
            if not BACKWARD_OPERANDS[recipe.backward_override].quantizes_gradient:
                backward = None
            stage = QuantizeStage(forward, backward, signal.requires_grad, recipe.propagate_nonfinite)
            drop_dead(self._stages)
            self._stages[key] = stage
        return stage, signal if stage.forward_to is None else signal._replace(held=stage.forward_to)

    def operands(self, stage: Any, signal: TensorInfo, extra: Sequence[Any]) -> Sequence[Any]:
        count = sum(stage.draws)
        buffer = self._buffers.get(seeds.BUFFER)
        return (seeds.take(buffer, count) if count and buffer is not None else None,)

    def roles_of(self, mode: str) -> dict[str, QuantizerRole | None]:
        """The slot that it quantizes for a consumer: "output" of forward, "grad_input" of backward."""
        slot, role = ("output", self.roles[0]) if mode == "forward" else ("grad_input", self.roles[1])
        return {} if role is None else {slot: role}

    def _quantizer(self, recipe: Recipe, role: QuantizerRole) -> Quantizer | None:
        made = recipe.quantizer(role, ANYWHERE)
        if any(made.delayed):
            raise RecipeError(
                f"ops.Quantize has no delayed scale for {role}; give that role a format without a history"
            )
        return None if made.rowwise == made.columnwise == IDENTITY else made

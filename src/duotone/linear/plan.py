"""The plan of a linear: recipe, roles, gradients needed, parallel layout and device, resolved once into three GEMMs.

Execution reads no mode; it follows the plan. A plan is frozen and hashable, and its rows say which kernel runs.
"""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from duotone.comm import ShardContext
from duotone.dispatch.casts import can_read_once
from duotone.dispatch.target import target
from duotone.dispatch.worth import least_work
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format
from duotone.linear.backward_operand import (
    BACKWARD_OPERANDS,
    REENCODE_FROM_PRODUCER,
    REENCODE_IN_BACKWARD,
    BackwardOperand,
)
from duotone.linear.gemm_plan import GemmPlan as GemmPlan
from duotone.linear.gemm_plan import gemm_plan
from duotone.linear.layout import WHOLE, Layout
from duotone.linear.operand_plan import OperandPlan
from duotone.linear.plane_source import DEQUANTIZE_HELD, ENCODE_NOW, USE_HELD, PlaneSource, source_of_plain
from duotone.recipes.recipe import MEASURED, Recipe
from duotone.recipes.roles import ANYWHERE, SLOTS, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import Rule, first_match
from duotone.state.amax_mode import AmaxMode
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.quantizer import Quantizer

FAST_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""In which a small linear is faster than in formats."""


@dataclass(frozen=True)
class PlanRequest:
    """All that decides a plan: what the module is asked to do, and where.

    `held` is the quantizer of a weight, or of an input, that is a quantized tensor already. `output_role` and
    `grad_input_role` name the consumers at the module's boundaries, None where they are not known. `weight_shape` is
    (N, K) of each linear of the module on this rank, None where `min_weight_elements` is not to apply; `weight_dtype`
    is that of the parameter, None where it is `dtype`. `linears` of them, a group's experts, share the plan.
    `device` is one of torch ("cpu", "cuda:1") or an architecture that need not be here ("sm90").
    """

    recipe: Recipe
    rules: tuple[Rule, ...]
    name: str
    module_type: str
    device: str
    dtype: torch.dtype
    input_grad: bool = True
    weight_grad: bool = True
    site: Site = ANYWHERE
    layout: Layout = WHOLE
    weight_held: Quantizer | None = None
    input_held: Quantizer | None = None
    output_role: QuantizerRole | None = None
    grad_input_role: QuantizerRole | None = None
    save_original_input: bool = False
    weight_shape: tuple[int, ...] | None = None
    weight_dtype: torch.dtype | None = None
    linears: int = 1

    def without_held(self) -> "PlanRequest":
        """As if no operand were quantized yet."""
        return replace(self, weight_held=None, input_held=None)

    def role(self, tensor_type: str) -> QuantizerRole:
        return QuantizerRole(self.module_type, tensor_type, self.name)

    @property
    def slots(self) -> dict[str, QuantizerRole | None]:
        """Every quantizer slot of a linear with the role that its recipe sees: forward slots, then backward ones."""
        return {
            "input": self.role("input"),
            "weight": self.role("weight"),
            "output": self.output_role,
            "grad_output": self.role("grad_output"),
            "grad_input": self.grad_input_role,
        }


@dataclass(frozen=True)
class LinearPlan:
    """What forward and backward follow: three operands, three GEMMs, and the quantizers of the boundary slots."""

    input: OperandPlan
    weight: OperandPlan
    gradient: OperandPlan
    """Of the output; its planes are made in backward."""

    output: Quantizer
    grad_input: Quantizer
    layout: Layout
    fprop: GemmPlan
    dgrad: GemmPlan
    wgrad: GemmPlan
    seeds: int
    """Stochastic quantizes of one forward and backward: how far the module's seed advances."""

    rolls_forward_alone: bool = False
    """Whether forward operands are delayed and the gradient is not, so that no op of backward rolls their states."""

    @property
    def input_grad(self) -> bool:
        """Whether backward owes the gradient of the input."""
        return self.weight.is_kept

    @property
    def weight_grad(self) -> bool:
        """Whether backward owes the gradient of the weight."""
        return self.input.is_kept

    @property
    def operands(self) -> dict[str, OperandPlan]:
        """By tensor type."""
        return dict(zip(TENSOR_TYPES, (self.input, self.weight, self.gradient), strict=True))

    @property
    def gemms(self) -> Iterator[GemmPlan]:
        return iter((self.fprop, self.dgrad, self.wgrad))

    @property
    def refusal(self) -> str:
        """Why second derivatives cannot go through these GEMMs, "" where they can."""
        if any(fmt != IDENTITY for gemm in self.gemms for fmt in (gemm.a, gemm.b)):
            return "its operands are quantized"
        return "" if self.layout == WHOLE else "it is spread over ranks"

    @property
    def is_delayed(self) -> bool:
        return any(any(operand.quantizer.delayed) for operand in self.operands.values())

    def with_slots(self, forward: str, backward: str, group: str, mode: AmaxMode, member: int = 0) -> "LinearPlan":
        """The plan whose delayed directions use the module's states of these numbers; `member` of its linears."""
        return replace(
            self,
            input=self.input.with_slots(forward, member, 0, FORWARD_SLOTS, group, mode),
            weight=self.weight.with_slots(forward, member, 2, FORWARD_SLOTS, group, mode),
            gradient=self.gradient.with_slots(backward, member, 0, BACKWARD_SLOTS, group, AmaxMode.RECORD, True),
            rolls_forward_alone=not any(self.gradient.quantizer.delayed),
        )


FORWARD_SLOTS, BACKWARD_SLOTS = 4, 2
"""Delayed-scaling slots of a linear: two directions of input and weight, and of grad_output."""


def ask_recipe(request: PlanRequest) -> dict[str, Quantizer]:
    """What rules and recipe give each slot, each asked once; slots of other experts where a function may differ there.

    Raises RecipeError where experts of one group would have formats of their own.
    """
    made: dict[str, Quantizer] = {}
    roles, members = request.slots, range(request.linears if request.recipe.asks_by_slot else 1)
    for member, slot in ((member, slot) for slots in SLOTS.values() for member in members for slot in slots):
        found = _quantizer(request, roles[slot], request.role(slot))
        first = made.setdefault(slot, found)
        if _formats(found) != _formats(first):
            raise RecipeError(
                f"{request.name or 'a group'}: the recipe gives {slot} of expert {member} {_words(found)} and "
                f"of expert 0 {_words(first)}; give all experts of a group the same formats"
            )
    return made


def _formats(quantizer: Quantizer) -> tuple[Format | None, Format | None, str]:
    return quantizer.rowwise, quantizer.columnwise, quantizer.columnwise_source


def _words(quantizer: Quantizer) -> str:
    row, col, source = _formats(quantizer)
    names = f"{row.name if row else None}/{col.name if col else None}"
    return names if source == "original" else f"{names} ({source})"


def build_plan(request: PlanRequest, given: dict[str, Quantizer] | None = None) -> LinearPlan:
    """Resolve a request, with the quantizers that the recipe gave before where it was asked already.

    Raises RecipeError where a GEMM that this call owes cannot run as the recipe says.
    """
    made = dict(given or ask_recipe(request))
    source = BACKWARD_OPERANDS[request.recipe.backward_override]
    input_source, weight_source = _hold(request, made)
    if not source.quantizes_gradient:
        made["grad_output"] = Quantizer()
    gemms = _gemms(request, source, made)
    small = _too_small(request, gemms)
    if small:
        made = dict.fromkeys(made, Quantizer())
        input_source, weight_source = _hold(request, made)
        gemms = {gemm: replace(plan, reason=small) for gemm, plan in _gemms(request, source, made).items()}
    kept_input = _input_backward(request, source, made["input"])
    kept_weight = _weight_backward(request, source, made["weight"], weight_source)
    layout, input_grad, weight_grad = request.layout, request.input_grad, request.weight_grad
    drawn = [made[kind].is_stochastic for kind in TENSOR_TYPES]
    streams = [sum(drawn[:i]) if draws else None for i, draws in enumerate(drawn)]
    return LinearPlan(
        input=OperandPlan(
            made["input"],
            input_source,
            Usage(True, kept_input.needs_columnwise and weight_grad),
            _context(request, layout.input_shard, made["input"]),
            kept_input,
            weight_grad,
            streams[0],
        ),
        weight=OperandPlan(
            made["weight"],
            weight_source,
            Usage(True, kept_weight.needs_columnwise and input_grad),
            _context(request, None, made["weight"]),
            kept_weight,
            input_grad,
            streams[1],
        ),
        gradient=OperandPlan(
            made["grad_output"],
            source_of_plain(made["grad_output"]),
            Usage(input_grad, weight_grad),
            _context(request, layout.grad_shard, made["grad_output"]),
            stream=streams[2],
        ),
        output=made["output"],
        grad_input=made["grad_input"],
        layout=layout,
        fprop=gemms["fprop"],
        dgrad=gemms["dgrad"],
        wgrad=gemms["wgrad"],
        seeds=sum(drawn[:2]) + (drawn[2] and (input_grad or weight_grad)),
    )


def _context(request: PlanRequest, shard: ShardContext | None, quantizer: Quantizer) -> QuantizeContext:
    pair = quantizer.rowwise, quantizer.columnwise
    kernel = can_read_once(*pair, request.dtype, target(request.device))
    return QuantizeContext(shard, traces_kernel=kernel, propagate=request.recipe.propagate_nonfinite)


def _input_backward(request: PlanRequest, source: BackwardOperand, quantizer: Quantizer) -> BackwardOperand:
    """With `save_original_input`, backward encodes the input again.

    A columnwise plane with a delayed scale of its own is made in forward, which alone records its amax.
    """
    if not source.needs_columnwise or request.input_held is not None:
        return source
    if not quantizer.is_repeatable:
        _warn_of_kept_plane(request)
        return source
    if request.save_original_input and quantizer.delayed[1]:
        raise RecipeError(
            f"save_original_input of {request.name or 'a linear'}: forward alone records the delayed scale of the "
            "columnwise plane; give its input one delayed format in both directions, or leave the option off"
        )
    if request.save_original_input:
        return REENCODE_IN_BACKWARD
    return REENCODE_FROM_PRODUCER if _recomputes(request, quantizer) else source


def _weight_backward(
    request: PlanRequest, source: BackwardOperand, quantizer: Quantizer, weight_source: PlaneSource
) -> BackwardOperand:
    """With `recompute_columnwise`, backward encodes a plain weight again: not a copy in the input's dtype, which would
    be larger than a plane."""
    lives = weight_source is ENCODE_NOW and request.weight_dtype in (None, request.dtype)
    return REENCODE_IN_BACKWARD if lives and source.needs_columnwise and _recomputes(request, quantizer) else source


def _warn_of_kept_plane(request: PlanRequest) -> None:
    """Say what an input keeps whose quantizer may give other bits to backward than to forward."""
    asked = "save_original_input" if request.save_original_input else "recompute_columnwise"
    if request.weight_grad and (request.save_original_input or request.recipe.recompute_columnwise):
        warnings.warn(
            f"{request.name or 'a linear'}: the quantizer of its input has an encode of its own, which may give other "
            f"bits the second time, so {asked} keeps the columnwise plane; set is_repeatable = True on its class if "
            "it gives the same",
            stacklevel=2,
        )


def _recomputes(request: PlanRequest, quantizer: Quantizer) -> bool:
    """Not for experts, which encode an operand of all of them at once."""
    asked = request.recipe.recompute_columnwise and request.module_type != "grouped_linear"
    return asked and quantizer.is_repeatable and not quantizer.delayed[1]


def _quantizer(request: PlanRequest, role: QuantizerRole | None, slot: QuantizerRole) -> Quantizer:
    found = first_match(request.rules, role, request.site, slot=slot)
    return found or request.recipe.quantizer(role, request.site, slot)


def _hold(request: PlanRequest, made: dict[str, Any]) -> tuple[PlaneSource, PlaneSource]:
    """Put the formats that quantized tensors hold already into `made`; say where the operands' planes come from."""
    input_source, weight_source = source_of_plain(made["input"]), source_of_plain(made["weight"])
    if request.weight_held is not None:
        weight_source = _held_weight(request, made["weight"], request.weight_held)
    if request.input_held is not None:
        input_source = USE_HELD
        made["input"] = request.input_held
    return input_source, weight_source


def _held_weight(request: PlanRequest, wanted: Quantizer, held: Quantizer) -> PlaneSource:
    if wanted.rowwise == wanted.columnwise == IDENTITY and held != wanted:
        return DEQUANTIZE_HELD
    needs = [(wanted.rowwise, held.rowwise)]
    if request.input_grad and BACKWARD_OPERANDS[request.recipe.backward_override].needs_columnwise:
        needs.append((wanted.columnwise, held.columnwise))
    for new, old in needs:
        if old is not None and (new is None or old.stored != new.stored):
            raise RecipeError(
                f"the weight of {request.name or 'a linear'} is held in {old.name} and recipe {request.recipe.name} "
                f"asks for {new.name if new else 'nothing'}; call duotone.convert_parameters(model, recipe)"
            )
    return USE_HELD


def _gemms(request: PlanRequest, source: BackwardOperand, made: dict[str, Quantizer]) -> dict[str, GemmPlan]:
    operands = {
        "fprop": (made["input"].rowwise, made["weight"].rowwise),
        "dgrad": (made["grad_output"].rowwise, source.format(made["weight"])),
        "wgrad": (made["grad_output"].columnwise, source.format(made["input"])),
    }
    owed = {"fprop": True, "dgrad": request.input_grad, "wgrad": request.weight_grad}
    return {gemm: gemm_plan(request, gemm, a, b, owed[gemm]) for gemm, (a, b) in operands.items()}


def _too_small(request: PlanRequest, gemms: dict[str, GemmPlan]) -> str:
    """Why `min_weight_elements` leaves the linear in high precision, or "".

    Never where a product is emulated, whose values someone asked for, nor where an operand is held quantized already.
    """
    asked, shape = request.recipe.min_weight_elements, request.weight_shape
    if not asked or shape is None or request.dtype not in FAST_DTYPES:
        return ""
    quantized = [plan for plan in gemms.values() if (plan.a, plan.b) != (IDENTITY, IDENTITY)]
    held = request.weight_held or request.input_held
    if held or not quantized or not all(plan.rule.native for plan in quantized):
        return ""
    where = target(request.device)
    measured = max(least_work({plan.a.block, plan.b.block}, where) for plan in quantized)
    least = measured if asked == MEASURED else asked
    n, k = shape
    if n * k >= int(least):
        return ""
    where = FAST_DTYPES[request.dtype]
    return f"K x N = {k} x {n} = {n * k} is below {least}: left in {where} by min_weight_elements"

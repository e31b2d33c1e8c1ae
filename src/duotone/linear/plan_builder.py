"""From a request to the plan that a linear follows."""

import warnings
from dataclasses import replace

import torch

from duotone.comm import ShardContext
from duotone.dispatch.gemms import choose
from duotone.dispatch.rule import GemmProblem
from duotone.dispatch.target import least_work, target
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format, ScaleCodec
from duotone.linear.operand_plan import (
    BACKWARD_OPERANDS,
    REENCODE_FROM_PRODUCER,
    REENCODE_IN_BACKWARD,
    REENCODE_IN_GRAPH,
    BackwardOperand,
    OperandPlan,
)
from duotone.linear.plan import BACKWARD_SLOTS, FORWARD_SLOTS, GemmPlan, LinearPlan, PlanRequest, ask_recipe
from duotone.linear.plane_source import (
    DEQUANTIZE_HELD,
    ENCODE_NOW,
    USE_HELD,
    PlaneSource,
    source_of_plain,
)
from duotone.recipes.recipe import MEASURED
from duotone.recipes.roles import PLANES_OF_GEMM, TENSOR_TYPES
from duotone.recipes.rules import first_rule
from duotone.tensor.context import QuantizeContext
from duotone.tensor.plane import Usage
from duotone.tensor.quantizer import Quantizer

Quantizers = dict[str, Quantizer]
"""Quantizers by slot."""

HIGH_PRECISION_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FAST_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
"""A small linear is faster in these dtypes than in quantized formats."""


def build_plan(request: PlanRequest, answers: Quantizers | None = None) -> LinearPlan:
    """The plan for a request. `answers` is what the recipe gave the slots, if it was asked before.

    Raises RecipeError if a GEMM that this call needs cannot run as the recipe says.
    """
    override = BACKWARD_OPERANDS[request.recipe.backward_override]
    quantizers, sources = _with_held(request, answers or ask_recipe(request))
    if not override.quantizes_gradient:
        quantizers["grad_output"] = Quantizer()
    gemms = _gemms(request, override, quantizers)
    if reason := _too_small(request, gemms):
        quantizers, sources = _with_held(request, dict.fromkeys(quantizers, Quantizer()))
        gemms = [replace(gemm, reason=reason) for gemm in _gemms(request, override, quantizers)]
    draws = [quantizers[kind].is_stochastic for kind in TENSOR_TYPES]
    input_grad, weight_grad, layout = request.input_grad, request.weight_grad, request.layout
    shards = layout.shards
    streams = [layout.stream(sum(draws[:i]), shards[i]) if stochastic else None for i, stochastic in enumerate(draws)]

    def forward_operand(
        kind: str, backward: BackwardOperand, needed: bool, shard: ShardContext | None, stream: int | None
    ) -> OperandPlan:
        usage, context = Usage(True, backward.needs_columnwise and needed), _context(request, shard, quantizers[kind])
        if sources[kind] is DEQUANTIZE_HELD or (kind == "weight" and request.weight_held is not None):
            context = replace(context, nominal=request.dtype)
        return OperandPlan(quantizers[kind], sources[kind], usage, context, backward, needed, stream, FORWARD_SLOTS)

    input_backward = _input_backward(request, override, quantizers["input"])
    weight_backward = _weight_backward(request, override, quantizers["weight"], sources["weight"])
    gradient = quantizers["grad_output"]
    travels_once = layout.gathers_grad and gradient.derives_columnwise  # then ranks transpose what they gathered
    return LinearPlan(
        input=forward_operand("input", input_backward, weight_grad, shards[0], streams[0]),
        weight=forward_operand("weight", weight_backward, input_grad, shards[1], streams[1]),
        gradient=OperandPlan(
            gradient,
            source_of_plain(gradient),
            Usage(input_grad or (weight_grad and travels_once), weight_grad and not travels_once),
            _context(request, shards[2], gradient),
            BACKWARD_OPERANDS[None],
            stream=streams[2],
            slot_distance=BACKWARD_SLOTS,
        ),
        output=quantizers["output"],
        grad_input=quantizers["grad_input"],
        layout=layout,
        fprop=gemms[0],
        dgrad=gemms[1],
        wgrad=gemms[2],
        seeds=sum(draws[:2]) + (draws[2] and (input_grad or weight_grad)),
    )


def _with_held(request: PlanRequest, answers: Quantizers) -> tuple[Quantizers, dict[str, PlaneSource]]:
    """The quantizers, replaced by those of tensors that are quantized already, and the sources of input and weight.

    Where the recipe keeps the input in high precision, or there is no recipe, a quantized one has a single value in
    forward and backward: `dequantize()`. Its planes may have two, one for each direction.
    """
    sources = {kind: source_of_plain(answers[kind]) for kind in ("input", "weight")}
    if request.weight_held is not None:
        sources["weight"] = _source_of_held_weight(request, answers["weight"], request.weight_held)
    if request.input_held is None:
        return dict(answers), sources
    if answers["input"].rowwise == answers["input"].columnwise == IDENTITY:
        return dict(answers), {**sources, "input": DEQUANTIZE_HELD}
    return {**answers, "input": request.input_held}, {**sources, "input": USE_HELD}


def _source_of_held_weight(request: PlanRequest, target_quantizer: Quantizer, present: Quantizer) -> PlaneSource:
    if target_quantizer.rowwise == target_quantizer.columnwise == IDENTITY and present != target_quantizer:
        return DEQUANTIZE_HELD
    needs = [(target_quantizer.rowwise, present.rowwise)]
    if request.input_grad and BACKWARD_OPERANDS[request.recipe.backward_override].needs_columnwise:
        needs.append((target_quantizer.columnwise, present.columnwise))
    for new, old in needs:
        if old is not None and (new is None or old.stored != new.stored):
            raise RecipeError(
                f"the weight of {request.title} is held in {old.name} and recipe {request.recipe.name} "
                f"asks for {new.name if new else 'nothing'}; call duotone.convert_parameters(model, recipe), or after "
                "gather_quantized run the first forward under a recipe with these formats"
            )
    return USE_HELD


def _context(request: PlanRequest, shard: ShardContext | None, quantizer: Quantizer) -> QuantizeContext:
    formats = quantizer.rowwise, quantizer.columnwise
    is_scaled = all(fmt is None or fmt.scale_codec.family == ScaleCodec.FP32.family for fmt in formats)
    typed = is_scaled and shard is None and not request.layout.exchanges  # codes that travel or are decoded are bytes
    propagate = request.recipe.propagate_nonfinite
    return QuantizeContext(shard, propagate=propagate, typed=typed)


def _input_backward(request: PlanRequest, override: BackwardOperand, quantizer: Quantizer) -> BackwardOperand:
    """With `save_original_input`, backward encodes the input again.

    With `recompute_columnwise` a compiled one does, too: the partitioner computes the input again.

    A columnwise plane with its own delayed scale is encoded in forward: only forward records amaxes.
    """
    if not override.needs_columnwise or request.input_held is not None:
        return override
    if not quantizer.is_repeatable:
        _warn_of_kept_plane(request)
        return override
    if not request.save_original_input:
        again = REENCODE_IN_GRAPH if request.is_traced else REENCODE_FROM_PRODUCER
        return again if _recomputes(request, quantizer) else override
    if quantizer.delayed[1]:
        raise RecipeError(
            f"save_original_input of {request.title}: forward alone records the delayed scale of the "
            "columnwise plane; give its input one delayed format in both directions, or leave the option off"
        )
    return REENCODE_IN_BACKWARD


def _weight_backward(
    request: PlanRequest, override: BackwardOperand, quantizer: Quantizer, source: PlaneSource
) -> BackwardOperand:
    """With `recompute_columnwise`, backward encodes a plain weight again, and one that FSDP2 frees between the passes.

    Not a copy in the input's dtype, because to keep that copy takes more memory than a plane.
    """
    is_parameter = source is ENCODE_NOW and request.weight_dtype in (None, request.dtype)
    again = is_parameter and override.needs_columnwise and _recomputes(request, quantizer, request.weight_is_freed)
    return REENCODE_IN_BACKWARD if again else override


def _recomputes(request: PlanRequest, quantizer: Quantizer, always: bool = False) -> bool:
    """Whether `recompute_columnwise` applies. Not for experts, which encode an operand of all of them at once."""
    applies = (request.recipe.recompute_columnwise or always) and request.module_type != "grouped_linear"
    return applies and quantizer.is_repeatable and not quantizer.delayed[1]


def _warn_of_kept_plane(request: PlanRequest) -> None:
    option = "save_original_input" if request.save_original_input else "recompute_columnwise"
    if request.weight_grad and (request.save_original_input or request.recipe.recompute_columnwise):
        warnings.warn(
            f"{request.title}: the quantizer of its input has an encode of its own, which may give other "
            f"bits the second time, so {option} keeps the columnwise plane; set is_repeatable = True on its class if "
            "it gives the same",
            stacklevel=2,
        )


def _gemms(request: PlanRequest, override: BackwardOperand, quantizers: Quantizers) -> list[GemmPlan]:
    x, w, dy = (quantizers[kind] for kind in TENSOR_TYPES)
    return [
        gemm_plan(request, "fprop", x.rowwise, w.rowwise, True),
        gemm_plan(request, "dgrad", dy.rowwise, override.format(w), request.input_grad),
        gemm_plan(request, "wgrad", dy.columnwise, override.format(x), request.weight_grad),
    ]


def _too_small(request: PlanRequest, gemms: list[GemmPlan]) -> str:
    """Why `min_weight_elements` leaves the linear in high precision, or "".

    It never applies to an emulated product, whose values someone asked for, nor to operands that are quantized already.
    """
    limit, shape = request.recipe.min_weight_elements, request.weight_shape
    if not limit or shape is None or request.dtype not in FAST_DTYPES or request.weight_held or request.input_held:
        return ""
    quantized = [gemm for gemm in gemms if (gemm.a, gemm.b) != (IDENTITY, IDENTITY)]
    if not quantized or not all(gemm.rule.native for gemm in quantized):
        return ""
    if limit == MEASURED:
        limit = max(least_work({gemm.a.block, gemm.b.block}, target(request.device)) for gemm in quantized)
    n, k = shape
    if n * k >= int(limit):
        return ""
    dtype = FAST_DTYPES[request.dtype]
    return f"K x N = {k} x {n} = {n * k} is below {limit}: left in {dtype} by min_weight_elements"


def gemm_plan(request: PlanRequest, gemm: str, a: Format | None, b: Format | None, needed: bool) -> GemmPlan:
    """The plan of one GEMM. RecipeError if the call needs it and it cannot run as the recipe says."""
    refusal = _refusal(request, gemm, a, b)
    if refusal and needed:
        raise RecipeError(refusal)
    a, b = a or IDENTITY, b or IDENTITY
    fast = getattr(request.recipe, f"{gemm}_fast_accum")
    problem = GemmProblem(a, b, target(request.device), request.dtype, fast)
    rule, reason = choose(problem)
    if refusal:
        return GemmPlan(gemm, problem, rule, f"not needed here, else it would be an error: {refusal}")
    if a == b == IDENTITY:
        reason = _why_high(request, gemm)
    elif IDENTITY not in (a, b) and a.family != b.family:
        reason = f"{reason}; mixed formats, which no hardware multiplies"
    return GemmPlan(gemm, problem, rule, reason)


def _refusal(request: PlanRequest, gemm: str, a: Format | None, b: Format | None) -> str:
    """Why a GEMM cannot run as the recipe says, or ""."""
    slots = " with ".join(f"{tensor_type} {direction}" for tensor_type, direction in PLANES_OF_GEMM[gemm])
    if a is None or b is None:
        return f"the recipe gives {gemm} of {request.title} ({slots}) only one operand; give the other a format"
    full = (a == IDENTITY, b == IDENTITY)
    if request.recipe.strict and any(full) and not all(full):
        return (
            f"strict: {gemm} of {request.title} pairs {a.name} with {b.name}, so it would run in high precision; "
            "give both operands a format, or set strict to false"
        )
    if not any(full) and a.family != b.family and not request.recipe.emulate_mixed:
        return (
            f"{gemm} of {request.title} would multiply {slots}: {a.name} ({a.family}) with {b.name} ({b.family}), "
            "which no hardware does; give both the same kind of format, or set emulate_mixed to true"
        )
    if not all(full) and request.dtype not in HIGH_PRECISION_DTYPES:
        return f"{request.title} is in {request.dtype}; formats encode bf16, fp16 and fp32: cast the model first"
    return ""


def _why_high(request: PlanRequest, gemm: str) -> str:
    """Why both operands of a GEMM are in high precision."""
    rules = [first_rule(request.rules, request.role(kind), request.site) for kind, _ in PLANES_OF_GEMM[gemm]]
    return rules[-1].why if rules[-1] and all(rules) else "the recipe keeps both operands in high precision"

"""The seven products of attention: the formats of their operands, what runs them, and the stage that follows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from duotone.attention.attention_stage import AttentionStage, Call
from duotone.attention.head_planes import HeadOperand, TileOperand
from duotone.attention.ranks import Ranks
from duotone.comm import ShardContext
from duotone.dispatch.attention import FORWARD, KERNEL, NEVER, NO_DROPOUT, AttentionProblem, LeastTokens
from duotone.dispatch.target import target
from duotone.errors import RecipeError
from duotone.formats import IDENTITY, Format
from duotone.formats.geometry import TENSOR
from duotone.recipes.recipe import Recipe
from duotone.tensor.context import QuantizeContext, Slot
from duotone.tensor.quantizer import Quantizer

PRODUCTS = {
    "QK^T": (("query", "rowwise"), ("key", "rowwise")),
    "PV": (("s", "rowwise"), ("value", "columnwise")),
    "QK^T again": (("query", "rowwise"), ("key", "rowwise")),
    "P^T dO": (("s", "columnwise"), ("do", "columnwise")),
    "dO V^T": (("do", "rowwise"), ("value", "rowwise")),
    "dS K": (("dp", "rowwise"), ("key", "columnwise")),
    "dS^T Q": (("dp", "columnwise"), ("query", "columnwise")),
}
"""The two operands of each product: a tensor and the direction of reading. Forward has the first two products."""

FORWARD_OPERANDS, BACKWARD_OPERANDS = ("query", "key", "value", "s", "output"), ("do", "dp")
OPERANDS = (*FORWARD_OPERANDS, *BACKWARD_OPERANDS)
"""The tensors that have delayed scales, in the order of their slots: two each, rowwise first."""

Slots = Mapping[str, tuple[Slot | None, Slot | None]]
"""By tensor: the slots of its rowwise and its columnwise plane."""

NO_SLOTS: tuple[Slot | None, Slot | None] = (None, None)


class ProductPlan(NamedTuple):
    """One product of attention: the names of the formats that it multiplies, the kernel, and the reason."""

    gemm: str
    a: str
    b: str
    reason: str
    kernel: str = "torch"
    native: bool = True


@dataclass(frozen=True)
class AttentionFormats:
    """The quantizers that a recipe gives the tensors of attention.

    `s` are the probabilities and `dp` the gradient of the scores. `output` is how backward keeps the output. `serving`
    names the direction whose plane serves all products of query, key and value, "" if each direction has its own.
    """

    query: Quantizer
    key: Quantizer
    value: Quantizer
    s: Quantizer
    output: Quantizer
    do: Quantizer
    dp: Quantizer
    is_dequantized: bool = False
    """Whether backward reads the planes of forward in high precision."""

    @staticmethod
    def of(answers: Mapping[str, Sequence[Quantizer]], recipe: Recipe, name: str) -> "AttentionFormats":
        """`answers` are by kind of slot. RecipeError if a quantizer overrides `encode`."""
        for kind, quantizers in answers.items():
            for quantizer in quantizers:
                if type(quantizer).encode is not Quantizer.encode:
                    title = type(quantizer).__name__
                    raise RecipeError(
                        f"{name}: attention takes a duotone.Quantizer for {kind}, whose formats it reads; got {title}, "
                        "which encodes by itself: give its formats to a Quantizer"
                    )
        query, key, value = answers["qkv"]
        forward, do, dp = answers["s"][0], answers["do"][0], answers["dp"][0]
        output = answers["output"][0].rowwise or IDENTITY
        keeps = output.precision >= 8 and not output.is_stochastic and not output.transform
        formats = AttentionFormats(query, key, value, forward, Quantizer(output if keeps else IDENTITY), do, dp)
        return formats if recipe.backward_override is None else formats.overridden(recipe.backward_override)

    def overridden(self, override: str) -> "AttentionFormats":
        """The formats under a `Recipe.backward_override`. The scores of backward stay those of forward."""
        high = Quantizer()
        changed = replace(self, do=high, dp=high, s=_without_columnwise(self.s))
        if override == "dequantized":
            return replace(changed, is_dequantized=True)
        query, key = map(_without_columnwise, (self.query, self.key))
        return replace(changed, query=query, key=key, value=replace(self.value, rowwise=IDENTITY))

    def format(self, tensor: str, direction: str) -> Format:
        """The format of the plane that a product reads."""
        if self.is_dequantized and tensor in ("query", "key", "value"):
            direction = "columnwise" if tensor == "value" else "rowwise"
        quantizer: Quantizer = getattr(self, tensor)
        return getattr(quantizer, direction) or IDENTITY

    def products(self) -> dict[str, tuple[Format, Format]]:
        """The formats of both operands of each product."""
        return {name: (self.format(*a), self.format(*b)) for name, (a, b) in PRODUCTS.items()}

    def problem(self, widths: tuple[int, int], dropout: float, device: str) -> AttentionProblem:
        """What decides the kernels on a device, or on an architecture that need not be here."""
        return AttentionProblem(self.products(), widths, dropout, target(device))

    @property
    def is_stochastic(self) -> bool:
        """Whether any operand rounds stochastically."""
        return any(getattr(self, tensor).is_stochastic for tensor in OPERANDS)

    def crosses(self, tensor: str) -> bool:
        """Whether a neighbour may encode the tensor: under one scale, which serves all products."""
        quantizer: Quantizer = getattr(self, tensor)
        row = quantizer.rowwise or IDENTITY
        same = row == quantizer.columnwise and quantizer.columnwise_source == "original"
        return same and row != IDENTITY and row.block == TENSOR and not row.is_delayed

    def delayed(self) -> dict[str, Quantizer]:
        """The tensors whose scales follow from earlier steps."""
        quantizers = {tensor: getattr(self, tensor) for tensor in OPERANDS}
        return {tensor: quantizer for tensor, quantizer in quantizers.items() if any(quantizer.delayed)}

    def stage(
        self,
        name: str,
        problem: AttentionProblem,
        slots: Slots,
        recipe: Recipe,
        call: Call,
    ) -> AttentionStage:
        """The stage of a call. `slots` are those of tensors with delayed scales."""
        forward = "" if problem.forward_refusal() else KERNEL
        backward = "" if problem.backward_refusal() else problem.backward_kernel

        is_delayed = bool(self.delayed())
        ranks = Ranks.named(call.ranks)
        shard = None if ranks is None or is_delayed else ShardContext(ranks.group)

        def context(tensor: str) -> QuantizeContext:
            return QuantizeContext(slots=slots.get(tensor, NO_SLOTS), propagate=recipe.propagate_nonfinite)

        def heads(tensor: str, stream: int, serving: str = "") -> HeadOperand:
            operand = HeadOperand.of(getattr(self, tensor), context(tensor), stream)
            if operand.is_whole:
                operand = replace(operand, context=replace(operand.context, shard=shard))
            return replace(operand, serving=serving) if self.is_dequantized and serving else operand

        value, gradient = heads("value", 2, "columnwise"), heads("do", 3)
        return AttentionStage(
            name=name,
            query=heads("query", 0, "rowwise"),
            key=heads("key", 1, "rowwise"),
            value=replace(value, serving="") if forward and value.serving == "rowwise" else value,
            gradient=replace(gradient, serving="") if backward == KERNEL else gradient,
            out=heads("output", 4),
            weights=TileOperand(self.s, context("s"), 1.0, 0),
            scores_gradient=TileOperand(self.dp, context("dp"), None, 1 << 20),
            problem=problem,
            forward_kernel=forward,
            backward_kernel=backward,
            fast=recipe.fprop_fast_accum,
            ranks=ranks,
            call=call,
            is_stochastic=self.is_stochastic,
            has_owner=is_delayed,
        )


def _without_columnwise(quantizer: Quantizer) -> Quantizer:
    """The quantizer whose columnwise plane stays in high precision."""
    return replace(quantizer, columnwise=IDENTITY, columnwise_source="original")


def product_rows(problem: AttentionProblem, is_measured: bool, least: LeastTokens) -> list[ProductPlan]:
    """The kernel of each product. With fewer than `least` queries it runs in high precision (see `least_tokens`)."""
    refusals, kernels = (problem.forward_refusal(), problem.backward_refusal()), (KERNEL, problem.backward_kernel)
    rows = []
    for gemm, (a, b) in problem.products.items():
        is_backward = gemm not in FORWARD
        if refusal := refusals[is_backward]:
            reason = f"{refusal}: decoded, multiplied in fp32 by blocks of keys"
            rows.append(ProductPlan(gemm, a.name, b.name, reason, "blocks of keys", False))
            continue
        reason = ""
        if is_measured:
            reason = "calls with a mask of pairs or of less work run in high precision, which is faster there: "
            below = [f"below {each} queries" if each < NEVER else "" for each in least]
            forward, training = (each or "in all" for each in below[:2])
            others = (each or "with gradients in all" for each in below[2:])
            reason += f"{forward} without gradients, {training} with them, "
            reason += "windows, sequences and causal padding {}, other padding {} (dpa_min_tokens)".format(*others)
        elif least.forward:
            reason = f"calls of fewer than {least.forward} queries in high precision (dpa_min_tokens)"
        kernel = kernels[is_backward]
        rows.append(ProductPlan(gemm, a.name, b.name, reason, kernel, kernel == KERNEL and gemm in problem.native))
    return rows


def refused(name: str, refusal: str = NO_DROPOUT) -> RecipeError:
    """The error of a strict recipe for products that no kernel runs."""
    remedy = "give roles of module type 'dpa' FP8 with a scale per tensor, or leave them in high precision"
    remedy = "set attention_dropout to 0, or strict to false" if refusal == NO_DROPOUT else remedy
    return RecipeError(f"strict: {name} would emulate its products: {refusal}; {remedy}")

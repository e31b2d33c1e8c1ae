"""`advise`: samples of one step, encoded in the formats of every candidate.

The error of a GEMM is that of its product against the exact product of the same samples. Speeds are those of whole
linears in the measured table.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from duotone.dispatch.stages import amax_of, uncompiled
from duotone.errors import UserError
from duotone.formats import Format
from duotone.observe import speeds
from duotone.observe.advice import Advice, AdviceRow, conclude, with_pareto_marks
from duotone.observe.candidates import EXACT, UNIFORM, load_candidates, plane_bytes
from duotone.observe.operand_samples import LinearSample, sample_operands
from duotone.observe.sampling import spread
from duotone.observe.speeds import Shape, SpeedTable
from duotone.observe.statistics import decibels, measure, summary
from duotone.recipes.recipe import Recipe, RecipeLike
from duotone.recipes.roles import PLANES_OF_GEMM, QuantizerRole
from duotone.state.seeds import initial_seed
from duotone.tensor.context import FixedScale, QuantizeContext, Slot
from duotone.tensor.plane import BOTH, Plane

COUNTED = 1 << 18
"""The most elements of an operand whose underflow and saturation are counted."""

COMPILE_FROM = 1 << 25
"""With so many elements in all weights, compiled casts save more time than the compiler takes."""

Batch = Tensor | Sequence[object] | Mapping[str, object]


def advise(
    model: nn.Module,
    batch: Batch,
    loss: Callable[[Any], Tensor] | None = None,
    *,
    candidates: Sequence[RecipeLike] = UNIFORM,
    memory: int | None = None,
    size: tuple[int, int] | None = None,
) -> Advice:
    """Encode samples of the operands of every linear in the formats of each candidate recipe, and rank the formats.

    One forward and backward run in high precision. `batch` is the argument of the model, a sequence of arguments, or a
    mapping of keywords. `loss(output)` gives a scalar; without it the output is the loss. Gradients, buffers and random
    state are restored. The model may be converted, but not fused.

    - `memory`: bytes that samples may take. By default a quarter of the free memory.
    - `size`: width and tokens, for bytes and speeds as if the model had them.

    UserError if the model gives no loss, if an operand is empty or not finite, or if no sample fits. RecipeError if a
    candidate is no recipe. Exceptions of the model itself pass through.
    """
    if size is not None and not (
        isinstance(size, tuple) and len(size) == 2 and all(type(n) is int and n > 0 for n in size)
    ):
        raise UserError(f"size is {size!r}; give width and tokens, two positive integers, such as (4096, 8192)")
    recipes = {recipe.name: recipe for recipe in load_candidates("advise", candidates)}

    def step() -> Tensor:
        if isinstance(batch, Mapping):
            output = model(**batch)
        else:
            output = model(batch) if isinstance(batch, Tensor) else model(*batch)
        return output if loss is None else loss(output)

    (samples, notes), table = sample_operands(model, step, memory), speeds.measured()
    shapes = _shapes(samples, size)
    is_small = sum(sample.operands["weight"].numel() for sample in samples) < COMPILE_FROM
    with uncompiled(is_small):
        rows = [
            row
            for sample, shape in zip(samples, shapes, strict=True)
            for row in _Linear(sample, shape, table).rows(recipes)
        ]
    ratios = {name: table.model_speed([(name, shape) for shape in shapes]).ratio for name in recipes}
    slow = {name for name, ratio in ratios.items() if ratio is not None and ratio < 1.0}
    return conclude(rows, recipes, slow, [*notes, _speed_note(table, rows)])


def _shapes(samples: Sequence[LinearSample], size: tuple[int, int] | None) -> list[Shape]:
    """Tokens, features in and features out of each linear."""
    linears = [(weight.shape[1], weight.shape[0]) for weight in (sample.operands["weight"] for sample in samples)]
    if size is not None:
        return [(size[1], *linear) for linear in speeds.widened(linears, size[0])]
    return [(sample.tokens, *linear) for sample, linear in zip(samples, linears, strict=True)]


@dataclass(frozen=True)
class _Linear:
    """The samples of one linear, and its size."""

    sample: LinearSample
    shape: Shape
    table: SpeedTable

    @torch.no_grad()
    def rows(self, recipes: Mapping[str, Recipe]) -> list[AdviceRow]:
        """Each GEMM under each recipe."""
        kinds = {
            kind: sides
            for kind, sides in PLANES_OF_GEMM.items()
            if all(tensor_type in self.sample.operands for tensor_type, _ in sides)
        }
        trials: dict[str, list[AdviceRow]] = {kind: [] for kind in kinds}
        operands = {"rowwise": self.sample.operands, "columnwise": {k: x.t() for k, x in self.sample.operands.items()}}
        exact = {kind: [operands[direction][key] for key, direction in sides] for kind, sides in kinds.items()}
        products = {kind: a.float() @ b.float().T for kind, (a, b) in exact.items()}
        for name, recipe in recipes.items():
            planes = self._planes(recipe)
            for kind, (a, b) in kinds.items():
                trials[kind].append(self._row(kind, name, exact[kind], products[kind], planes[a], planes[b]))
        return [row for rows in trials.values() for row in with_pareto_marks(rows)]

    def _planes(self, recipe: Recipe) -> dict[tuple[str, str], Plane]:
        planes = {}
        for tensor_type, x in self.sample.operands.items():
            quantizer = recipe.quantizer(QuantizerRole("linear", tensor_type, self.sample.name), self.sample.site)
            slots = [_slot(fmt, x) for fmt in (quantizer.rowwise, quantizer.columnwise)]
            context = QuantizeContext(slots=(slots[0], slots[1]), seed=initial_seed(self.sample.name))
            row, col = quantizer.encode(x, BOTH, context)
            planes[tensor_type, "rowwise"] = row or Plane.of(x)
            planes[tensor_type, "columnwise"] = col or Plane.of(x.t())
        return planes

    def _row(self, kind: str, recipe: str, exact: Sequence[Tensor], product: Tensor, a: Plane, b: Plane) -> AdviceRow:
        formats, speed = (a.format.name, b.format.name), self.table.speed(recipe, self.shape)
        is_exact = formats == EXACT
        lost = []
        for x, plane in () if is_exact else zip(exact, (a, b), strict=True):
            sums, extremes = measure(*spread(x, plane, COUNTED))
            lost.append(summary(sums.tolist(), extremes.tolist()))
        underflow, saturation = (
            max((side[share] or 0.0 for side in lost), default=0.0) for share in ("underflow", "saturation")
        )
        tokens, inputs, outputs = self.shape
        rows, columns, depth = {
            "fprop": (tokens, outputs, inputs),
            "dgrad": (tokens, inputs, outputs),
            "wgrad": (outputs, inputs, tokens),
        }[kind]
        dtype = exact[0].dtype
        return AdviceRow(
            self.sample.name,
            kind,
            recipe,
            *formats,
            None if is_exact else _snr(product, a, b),
            underflow,
            saturation,
            plane_bytes(a.format, (rows, depth), dtype) + plane_bytes(b.format, (columns, depth), dtype),
            speed.ratio,
            speed.basis,
        )


def _slot(fmt: Format | None, x: Tensor) -> Slot | None:
    """The slot of a delayed format, whose scale is that of the amax of x."""
    if fmt is None or not fmt.is_delayed:
        return None
    amax = amax_of(x)
    return FixedScale(torch.where(amax == 0, 1.0, fmt.scale_limits(torch.float32)[0] / amax))


def _snr(exact: Tensor, a: Plane, b: Plane) -> float | None:
    """The SNR of the product of two planes in dB; None if nothing was lost, -inf if a product became infinite."""
    product = a.dequantize(torch.float32) @ b.dequantize(torch.float32).T
    signal, noise = exact.square().sum().item(), (product - exact).square().sum().item()
    if signal == 0 and noise:
        return -math.inf
    return decibels(signal, noise) if math.isfinite(signal) else None


def _speed_note(table: SpeedTable, rows: Sequence[AdviceRow]) -> str:
    kinds = {row.basis for row in rows}
    text = f"speed: of the linear over bf16 on an {table.device} ({table.source}, {table.date})"
    if kinds == {"unknown"}:
        return f"{text}; unknown, but for {table.reach}: name such a width and tokens"
    return text + ("; * interpolated" if "interpolated" in kinds else "")

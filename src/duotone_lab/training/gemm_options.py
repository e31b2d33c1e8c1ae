"""The options for each GEMM of a model, each with its share of time and memory, as a table of a GPU predicts them.

The table has the time of all three GEMMs of a linear under one recipe; a GEMM counts as a third of it. Memory is what
linears keep between forward and backward: the input for wgrad, and the columnwise plane of a quantized weight.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from duotone import formats
from duotone.errors import UserError
from duotone.observe import speeds
from duotone.observe.candidates import EXACT, Formats, Gemm, formats_of, plane_bytes, recipe_of
from duotone.observe.speeds import Shape, SpeedTable
from duotone.recipes import Recipe
from duotone.recipes.roles import PLANES_OF_GEMM
from duotone_lab.training import models
from duotone_lab.training.config import TrainConfig

Size = tuple[int, int]
"""Width and tokens."""


@dataclass(frozen=True)
class Option:
    """The formats that a recipe gives a GEMM. `time` and `memory` are shares of those of all linears in bf16.

    `time` is None if the table has no speed.
    """

    recipe: str
    formats: Formats
    time: float | None
    memory: float


Options = Mapping[Gemm, Sequence[Option]]


def options_of(config: TrainConfig, recipes: Sequence[Recipe], table: SpeedTable, size: Size | None) -> Options:
    """The options of every GEMM, those of bf16 first. UserError for a model without linears that `convert` takes."""
    linears = models.linear_shapes(config.model, config.preset)
    if not linears:
        raise UserError(f"the model {config.model} has no linear to choose formats for: give another --model")
    sizes, tokens = [*linears.values()], config.preset.tokens_per_step
    if size is not None:
        sizes, tokens = speeds.widened(sizes, size[0]), size[1]
    shapes = {name: (tokens, *linear) for name, linear in zip(linears, sizes, strict=True)}
    work = sum(map(math.prod, shapes.values()))
    memory = sum(_saved_bytes(EXACT, kind, shape) for shape in shapes.values() for kind in PLANES_OF_GEMM)

    def option(recipe: Recipe, gemm: Gemm, shape: Shape) -> Option:
        names = formats_of(recipe, gemm)
        ratio = 1.0 if names == EXACT else table.speed(recipe_of(names, gemm[1]), shape).ratio
        time = None if ratio is None else math.prod(shape) / work / len(PLANES_OF_GEMM) / ratio
        return Option(recipe.name, names, time, _saved_bytes(names, gemm[1], shape) / memory)

    return {
        (name, kind): [option(recipe, (name, kind), shape) for recipe in recipes]
        for name, shape in shapes.items()
        for kind in PLANES_OF_GEMM
    }


def _saved_bytes(names: Formats, kind: str, shape: Shape) -> int:
    """Bytes of the operand in bf16 that a GEMM keeps from forward to backward; 0 for a weight in high precision."""
    tokens, inputs, outputs = shape
    if kind == "fprop" or (kind == "dgrad" and names == EXACT):
        return 0
    rows = (inputs, tokens) if kind == "wgrad" else (inputs, outputs)
    return plane_bytes(formats.get(names[1]), rows, torch.bfloat16)

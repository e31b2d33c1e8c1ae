"""Candidates for each GEMM of a linear: the formats that a recipe gives its two operands, and rules that give them."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from duotone import recipes
from duotone.errors import UserError
from duotone.formats import Format
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.roles import ANYWHERE, PLANES_OF_GEMM, TENSOR_TYPES, QuantizerRole, Site
from duotone.recipes.rules import Rule
from duotone.recipes.tables import Table, text_of

UNIFORM = ("bf16", "fp8-current", "fp8-rowwise", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4")
"""The recipes whose formats are tried by default."""

REFERENCE = "bf16"
EXACT = ("identity", "identity")

Gemm = tuple[str, str]
"""A module, and "fprop", "dgrad" or "wgrad"."""

Formats = tuple[str, str]
"""The names of the formats of a and b in a @ b.T."""


def load_candidates(taker: str, names: Sequence[RecipeLike]) -> list[Recipe]:
    """The recipes by their names, with bf16 always first. UserError without a name, or for a name that comes twice."""
    if not names:
        raise UserError(f"{taker} got no recipes; give at least one, such as 'mxfp8'")
    chosen = [as_recipe(taker, name) for name in names]
    counts = Counter(recipe.name for recipe in chosen)
    if twice := next((name for name, count in counts.items() if count > 1), None):
        raise UserError(f"{taker} takes each recipe once, and {twice!r} comes twice: give the files names of their own")
    return [recipes.load(REFERENCE), *(recipe for recipe in chosen if recipe.name != REFERENCE)]


def formats_of(recipe: Recipe, gemm: Gemm, site: Site = ANYWHERE) -> Formats:
    """The formats of the operands of a GEMM under a recipe."""
    module, kind = gemm
    names = []
    for tensor_type, direction in PLANES_OF_GEMM[kind]:
        fmt = getattr(recipe.quantizer(QuantizerRole("linear", tensor_type, module), site), direction)
        names.append("identity" if fmt is None else fmt.name)
    return names[0], names[1]


@cache
def recipe_of(formats: Formats, kind: str) -> str:
    """The uniform recipe that has these formats in "fprop", "dgrad" or "wgrad". "" if no recipe has them."""
    return next((name for name in UNIFORM if formats_of(recipes.load(name), ("", kind)) == formats), "")


def plane_bytes(fmt: Format, shape: tuple[int, int], dtype: torch.dtype) -> int:
    """The bytes of the plane of a matrix of that shape and dtype."""
    return sum(math.prod(part.shape) * (part.dtype or dtype).itemsize for part in fmt.parts(*shape).values())


def rules_for(chosen: Mapping[Gemm, Formats]) -> tuple[Rule, ...]:
    """Rules that give these formats, one for each module and tensor. GEMMs without formats stay in high precision."""
    rules = []
    for module in dict.fromkeys(module for module, _ in chosen):
        planes = {
            plane: name
            for kind, sides in PLANES_OF_GEMM.items()
            for plane, name in zip(sides, chosen.get((module, kind), EXACT), strict=True)
        }
        for tensor_type in TENSOR_TYPES:
            row, col = planes[tensor_type, "rowwise"], planes[tensor_type, "columnwise"]
            rules.append(Rule(module=module, tensor_type=tensor_type, rowwise=row, columnwise=col))
    return tuple(rules)


def file_text(name: str, rules: Sequence[Rule], base: str | Table | None = None) -> str:
    """A recipe file, TOML: the rules, on top of the recipe `base`, its name or its table."""
    head: Table = {"name": name} | ({} if base is None else {"base": base})
    return text_of({**head, "rules": [rule.to_dict() for rule in rules]})

"""Recipes as data: ordered rules, the first that matches a role decides its formats."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, ClassVar

from duotone import formats
from duotone.errors import RecipeError
from duotone.recipes.recipe import Recipe, one_of
from duotone.recipes.roles import GEMMS, PLANES_OF_GEMM, TENSOR_TYPES, QuantizerRole
from duotone.tensor.quantizer import SOURCES, Quantizer

DIRECTIONS = ("rowwise", "columnwise")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Matches roles by `module` (glob on the full name), `module_type` and `tensor_type`; None matches all.

    Formats are given for both planes (`format`), per plane (`rowwise`, `columnwise`), or per GEMM for both of its
    operands (`fprop`, `dgrad`, `wgrad`). A plane's own format goes before its GEMM's, that before `format`.
    """

    module: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None
    format: str | None = None
    rowwise: str | None = None
    columnwise: str | None = None
    fprop: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None
    columnwise_source: str = "original"

    def __post_init__(self) -> None:
        if self.tensor_type is not None:
            one_of("tensor_type", self.tensor_type, TENSOR_TYPES)
        one_of("columnwise_source", self.columnwise_source, SOURCES)
        for field in ("format", *DIRECTIONS, *GEMMS):
            name = getattr(self, field)
            if name is not None:
                formats.get(name)
        for tensor_type in (self.tensor_type,) if self.tensor_type else TENSOR_TYPES:
            for direction in DIRECTIONS:
                self._format(tensor_type, direction)

    def matches(self, role: QuantizerRole) -> bool:
        return (
            (self.module is None or fnmatchcase(role.name, self.module))
            and (self.module_type is None or self.module_type == role.module_type)
            and (self.tensor_type is None or self.tensor_type == role.tensor_type)
        )

    def quantizer(self, role: QuantizerRole) -> Quantizer:
        row, col = (formats.get(self._format(role.tensor_type, direction)) for direction in DIRECTIONS)
        return Quantizer(row, col, self.columnwise_source)

    def to_dict(self) -> dict[str, str]:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: v for k, v in values.items() if v is not None and (k, v) != ("columnwise_source", "original")}

    def _format(self, tensor_type: str, direction: str) -> str:
        gemm = next(g for g, operands in PLANES_OF_GEMM.items() if (tensor_type, direction) in operands)
        name = getattr(self, direction) or getattr(self, gemm) or self.format
        if name is None:
            remedy = f"add {direction}, {gemm} or format ('identity' is high precision)"
            raise RecipeError(f"rule {self.to_dict()} names no format for {tensor_type} {direction}; {remedy}")
        return name


@dataclass(frozen=True, kw_only=True)
class RuleRecipe(Recipe):
    """A recipe of ordered rules; a role that none matches stays in high precision."""

    rules: tuple[Rule, ...]
    title: str = "rules"
    kind: ClassVar[str] = "rules"

    @property
    def name(self) -> str:
        return self.title

    def __call__(self, role: QuantizerRole) -> Quantizer:
        found = first_match(self.rules, role)
        if found is None and self.strict:
            remedy = "correct a rule, or end with one that has format = 'identity'"
            raise RecipeError(f"strict: no rule of recipe {self.title} matches {role}; {remedy}")
        return found or Quantizer()

    def to_dict(self) -> dict[str, Any]:
        head = {"name": self.title, "strict": self.strict, "backward_override": self.backward_override}
        rules = [rule.to_dict() for rule in self.rules]
        return {**{key: value for key, value in head.items() if value is not None}, "rules": rules}


def first_match(rules: Sequence[Rule], role: QuantizerRole) -> Quantizer | None:
    """The quantizer of the first rule that matches, or None."""
    return next((rule.quantizer(role) for rule in rules if rule.matches(role)), None)


OUTPUT_HEAD = tuple(
    Rule(module=pattern, format="identity") for pattern in ("lm_head", "*.lm_head", "output_head", "*.output_head")
)
"""The default rules of `convert`: the projection to the vocabulary stays in high precision."""

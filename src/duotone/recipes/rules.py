"""Rules: conditions on roles, and formats. The first rule that matches a role decides its formats."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, ClassVar

from duotone import formats
from duotone.errors import RecipeError, UserError, one_of, shown_fields
from duotone.recipes.conditions import check_layer, check_module_type, check_size, expression, glob, is_layer, is_size
from duotone.recipes.roles import (
    ANYWHERE,
    ATTENTION_TYPES,
    BOUNDARIES,
    GEMM_OF_PLANE,
    GEMMS,
    GRADIENTS,
    TENSOR_TYPES,
    QuantizerRole,
    Site,
)
from duotone.recipes.tables import Table
from duotone.tensor.history import History
from duotone.tensor.plane_encoder import SOURCES
from duotone.tensor.quantizer import Quantizer

DIRECTIONS = ("rowwise", "columnwise")
BY_PLACE = ("module", "module_regex", "layer")
SIZES = ("out_features", "in_features")
"""In the order of the weight's shape."""

TENSORS = (*TENSOR_TYPES, *BOUNDARIES, *ATTENTION_TYPES)
CHECKS: dict[str, Callable[[Any], object]] = {
    "tensor_type": partial(one_of, "tensor_type", allowed=TENSORS, error=RecipeError),
    "module_type": check_module_type,
    "layer": check_layer,
    **{size: partial(check_size, size) for size in SIZES},
    "module_regex": expression,
    **dict.fromkeys(("format", *DIRECTIONS, *GEMMS), formats.get),
}
"""What raises RecipeError for a wrong value of a field of a rule."""

Subject = tuple[QuantizerRole | None, Site]


@dataclass(frozen=True, kw_only=True, repr=False)
class Rule:
    """Conditions on roles, and the formats of those that meet all of them. A condition of None is always met.

    - `module`: a glob on the full name. `module_regex`: a regular expression on it. `module_type`: a glob.
    - `layer`: an index into the stack of layers or a range, from either end: 0, "-1", "0:2", "-2:".
    - `in_features`, `out_features`: the sizes of the weight: ">=4096", "<1024", "==4096", "%32" for multiples.
    - `tensor_type`: with "output" or "grad_input", the other conditions describe the module that makes the tensor. In
      all other rules they describe the module that consumes it.

    Formats are for both planes (`format`), for one plane (`rowwise`, `columnwise`), or for both operands of a GEMM
    (`fprop`, `dgrad`, `wgrad`). That of a plane goes before that of its GEMM, and that before `format`.
    """

    module: str | None = None
    module_regex: str | None = None
    module_type: str | None = None
    tensor_type: str | None = None
    layer: int | str | None = None
    in_features: str | None = None
    out_features: str | None = None
    format: str | None = None
    rowwise: str | None = None
    columnwise: str | None = None
    fprop: str | None = None
    dgrad: str | None = None
    wgrad: str | None = None
    columnwise_source: str = "original"

    why: ClassVar[str] = "kept in high precision by a rule"
    """The reason that plans show for a product with both operands in high precision by this rule."""

    def __repr__(self) -> str:
        return shown_fields(self)

    def __post_init__(self) -> None:
        self._check_fields()
        one_of("columnwise_source", self.columnwise_source, SOURCES, RecipeError)
        if self.tensor_type is not None:
            self._require_original(self.tensor_type)
        for tensor_type in (self.tensor_type,) if self.tensor_type else TENSOR_TYPES:
            for direction in DIRECTIONS:
                self._require_format(tensor_type, direction)

    def _check_fields(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not isinstance(value, str) and field.name != "layer" and value is not None:
                raise RecipeError(
                    f"{field.name} is {value!r}; every field of a rule is a string, layer also an integer"
                )
        for name, check in CHECKS.items():
            if getattr(self, name) is not None:
                check(getattr(self, name))

    def matches(self, role: QuantizerRole | None, site: Site = ANYWHERE) -> bool:
        """Whether the rule decides the role. RecipeError if it asks for a name or a layer that is not set."""
        if role is None or not self.concerns(role):
            return False
        condition = next((field for field in BY_PLACE if getattr(self, field) is not None), None)
        if condition and not site.named and not (condition == "module" and self._asks_for_end(role.name)):
            raise RecipeError(
                f"the rule {self.to_dict()} asks for {condition}, but the module of {role} has no place in a model: "
                "call duotone.assign_names(root) first, or leave the condition out"
            )
        return (
            (self.module is None or glob(self.module).match(role.name) is not None)
            and (self.module_regex is None or expression(self.module_regex).fullmatch(role.name) is not None)
            and (self.layer is None or is_layer(self.layer, site.layer, site.layers))
            and self._matches_shape(site.shape)
        )

    @property
    def asks_for_place(self) -> bool:
        """Whether the rule names modules, layers or sizes, so that it should match something in a model."""
        return any(getattr(self, field) is not None for field in (*BY_PLACE, *SIZES))

    def concerns(self, role: QuantizerRole) -> bool:
        """Whether the rule is for tensors of this type, wherever they are."""
        return (
            (self.module_type is None or glob(self.module_type).match(role.module_type) is not None)
            and (self.tensor_type is None or self.tensor_type == role.tensor_type)
            and all(self._format(role.tensor_type, direction) for direction in DIRECTIONS)
        )

    def _asks_for_end(self, name: str) -> bool:
        """Whether `module` is "*" and an end of names. A module without a place knows only the end of its name."""
        end, end_of_name = (self.module or "*")[1:], name[name.find(".") :] if "." in name else ""
        return self.module == f"*{end}" and 0 < len(end) <= len(end_of_name) and not set(end) & set("*?[")

    def _matches_shape(self, shape: tuple[int, ...] | None) -> bool:
        for axis, field in enumerate(SIZES):
            condition = getattr(self, field)
            if condition is not None and (shape is None or not is_size(condition, shape[axis])):
                return False
        return True

    def quantizer(self, role: QuantizerRole, history: History | None = None) -> Quantizer:
        """The quantizer of the rule. `history` are the parameters of delayed formats, None for the default ones."""
        if role.tensor_type == "grad_output":  # boundaries and attention have no product that reads both planes
            self._require_original(role.tensor_type)
        row, col = (formats.get(self._require_format(role.tensor_type, direction)) for direction in DIRECTIONS)
        quantizer = Quantizer(row, col, self.columnwise_source)
        return replace(quantizer, history=history or History()) if any(quantizer.delayed) else quantizer

    def _require_original(self, tensor_type: str) -> None:
        if self.columnwise_source != "original" and tensor_type in GRADIENTS:
            raise RecipeError(
                f"the rule {self.to_dict()} encodes the columnwise plane of {tensor_type} from its rowwise one, which "
                "is for inputs and weights alone: leave columnwise_source out, or add tensor_type or an earlier rule"
            )

    def to_dict(self) -> Table:
        """The rule as a table of a recipe file, without fields that are at their defaults."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) != f.default}

    def _format(self, tensor_type: str, direction: str) -> str | None:
        gemm = GEMM_OF_PLANE.get((tensor_type, direction))
        return getattr(self, direction) or (getattr(self, gemm) if gemm else None) or self.format

    def _require_format(self, tensor_type: str, direction: str) -> str:
        name = self._format(tensor_type, direction)
        if name is None:
            gemm = GEMM_OF_PLANE.get((tensor_type, direction))
            remedy = f"add {direction}, {gemm + ' ' if gemm else ''}or format ('identity' is high precision)"
            raise RecipeError(f"the rule {self.to_dict()} names no format for {tensor_type} {direction}; {remedy}")
        return name


def require_rules(rules: Sequence[Rule]) -> None:
    """UserError unless this is a sequence of rules."""
    if not isinstance(rules, Sequence):
        raise UserError(f"rules are a sequence of duotone.recipes.Rule; got {type(rules).__name__}: give () for none")
    wrong = [rule for rule in rules if not isinstance(rule, Rule)]
    if wrong:
        raise UserError(f"rules are duotone.recipes.Rule values; got {type(wrong[0]).__name__}: write Rule(format=...)")


def first_match(
    rules: Sequence[Rule],
    role: QuantizerRole | None,
    site: Site = ANYWHERE,
    history: History | None = None,
    slot: QuantizerRole | None = None,
) -> Quantizer | None:
    """The quantizer of the first rule that matches, or None.

    `role` is that of the tensor in its consumer, None if that is unknown. `slot` is its role in the module that makes
    it; rules that name "output" or "grad_input" match the slot.
    """
    decision = _first(rules, role, site, slot)
    return decision and decision[1].quantizer(decision[2], history)


def first_rule(rules: Sequence[Rule], role: QuantizerRole, site: Site = ANYWHERE) -> Rule | None:
    """The first rule that matches the role, or None."""
    decision = _first(rules, role, site, None)
    return decision and decision[1]


def unmatched(rules: Sequence[Rule], subjects: Iterable[Subject]) -> list[Rule]:
    """The rules that decide none of the subjects: they match none, or an earlier rule decides.

    A subject of tensor type "output" or "grad_input" is that slot of a module, with an unknown consumer.
    """
    used = {decision[0] for subject in subjects if (decision := _decides(rules, subject))}
    return [rule for place, rule in enumerate(rules) if place not in used]


def undecided(rules: Sequence[Rule], subjects: Iterable[Subject]) -> list[Subject]:
    """The subjects that no rule decides."""
    return [subject for subject in subjects if _decides(rules, subject) is None]


def _decides(rules: Sequence[Rule], subject: Subject) -> tuple[int, Rule, QuantizerRole] | None:
    role, site = subject
    is_slot = role is not None and role.tensor_type in BOUNDARIES
    return _first(rules, None if is_slot else role, site, role)


def _first(
    rules: Sequence[Rule], role: QuantizerRole | None, site: Site, slot: QuantizerRole | None
) -> tuple[int, Rule, QuantizerRole] | None:
    """The first rule that matches the role, or the slot of a boundary: its index, the rule, the matched role."""
    for place, rule in enumerate(rules):
        for candidate in (role, slot if rule.tensor_type in BOUNDARIES else None):
            if candidate is not None and rule.matches(candidate, site):
                return place, rule, candidate
    return None


OUTPUT_HEAD = tuple(
    Rule(module=pattern, format="identity") for pattern in ("lm_head", "*.lm_head", "output_head", "*.output_head")
)
"""The default of `convert(rules=...)`: no own rules. After own rules come these, which keep heads in high precision."""

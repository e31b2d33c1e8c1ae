"""The recipes that tables describe: those of ordered rules, and the built-in ones.

Each built-in recipe is a few lines from role to formats. Names and defaults are Transformer Engine's.
"""

from dataclasses import dataclass, fields
from typing import ClassVar

import torch

from duotone import formats
from duotone.errors import RecipeError, one_of
from duotone.recipes.delayed import FP8_FORMATS, DelayedOptions, fp8_element
from duotone.recipes.recipe import Recipe, as_recipe, table_of
from duotone.recipes.roles import ANYWHERE, LINEAR, SLOTS, QuantizerRole, Site
from duotone.recipes.rules import Rule, first_match, first_rule
from duotone.recipes.tables import Table, check_title
from duotone.tensor.history import History
from duotone.tensor.quantizer import Quantizer

ATTENTION_FIELDS = ("fp8_dpa", "fp8_mha")
"""The request of a recipe of rules to its base: see `asks_for`."""
FP32_MAX = torch.finfo(torch.float32).max


def uniform(name: str) -> Quantizer:
    """One format in both directions."""
    return Quantizer(formats.get(name), formats.get(name))


def _is(role: QuantizerRole | None, tensor_type: str) -> bool:
    return role is not None and role.tensor_type == tensor_type


@dataclass(frozen=True, kw_only=True)
class HighPrecision(Recipe):
    """No quantization: every GEMM in the dtype of its operands."""

    kind: ClassVar[str] = "bf16"

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        return Quantizer()


@dataclass(frozen=True, kw_only=True)
class Fp8Recipe(Recipe):
    """Base of the recipes of FP8 elements."""

    fp8_format: str = "E4M3"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("fp8_format", self.fp8_format, FP8_FORMATS, RecipeError)


@dataclass(frozen=True, kw_only=True)
class Fp32ScaledRecipe(Fp8Recipe):
    """Base of the recipes of fp32 scales. An amax below `amax_epsilon` counts as `amax_epsilon`."""

    power_of_two_scales: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        epsilon = self.amax_epsilon
        if isinstance(epsilon, bool) or not isinstance(epsilon, int | float) or not 0 <= epsilon <= FP32_MAX:
            raise RecipeError(
                f"amax_epsilon is {epsilon!r}; it must be a number from 0 on that fp32 has, such as 1e-12"
            )


@dataclass(frozen=True, kw_only=True)
class Float8CurrentScaling(Fp32ScaledRecipe):
    """FP8 with one scale per tensor, from the tensor's amax."""

    fp8_format: str = "HYBRID"
    kind: ClassVar[str] = "fp8-current"
    granularity: ClassVar[str] = "tensor"

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        stem = f"fp8_{fp8_element(self.fp8_format, role)}_{self.granularity}"
        return uniform(formats.with_floor(stem + "_pow2" * self.power_of_two_scales, self.amax_epsilon))


@dataclass(frozen=True, kw_only=True)
class Float8RowwiseScaling(Float8CurrentScaling):
    """FP8 with one scale per row of each plane; E4M3 for gradients too."""

    fp8_format: str = "E4M3"
    kind: ClassVar[str] = "fp8-rowwise"
    granularity: ClassVar[str] = "row"


@dataclass(frozen=True, kw_only=True)
class DelayedScaling(DelayedOptions, Recipe):
    """FP8 with one scale per tensor that follows from the amaxes of earlier steps; see `duotone.tensor.History`."""

    kind: ClassVar[str] = "fp8-delayed"

    def __post_init__(self) -> None:
        Recipe.__post_init__(self)
        super().__post_init__()
        if self.backward_override is not None:
            raise RecipeError(
                f"backward_override is {self.backward_override!r}; delayed scaling allows None only, as its backward "
                "would never see an amax: leave it out, or take fp8-current"
            )

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        return self.delayed_quantizer(role)


@dataclass(frozen=True, kw_only=True)
class Float8BlockScaling(Fp32ScaledRecipe):
    """FP8 with scales per 1x128 block of activations and gradients and per 128x128 block of weights.

    `wgrad_input_128x128` also gives 128x128 blocks to the columnwise plane of the input. wgrad then multiplies the same
    pair of blocks as fprop, which is faster.
    """

    power_of_two_scales: bool = True
    wgrad_input_128x128: bool = False
    kind: ClassVar[str] = "fp8-block"

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        square = _is(role, "weight"), _is(role, "weight") or (self.wgrad_input_128x128 and _is(role, "input"))
        stem, scales = f"fp8_{fp8_element(self.fp8_format, role)}", "_fp32" * (not self.power_of_two_scales)
        names = (f"{stem}_{'128x128' if wide else '1x128'}{scales}" for wide in square)
        row, col = (formats.get(formats.with_floor(name, self.amax_epsilon)) for name in names)
        return Quantizer(row, col)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Fp8Recipe):
    """MXFP8: E8M0 scales per 32 elements along the contraction; `weight_2d` shares one per 32x32 block of a weight."""

    weight_2d: bool = False
    kind: ClassVar[str] = "mxfp8"

    @property
    def alignment(self) -> int:
        return 32

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        square = self.weight_2d and role is not None and _is(role, "weight") and role.module_type in LINEAR
        return uniform(f"mxfp8_{fp8_element(self.fp8_format, role)}" + "_32x32" * square)


OVER_SIX = ("none", "weights", "activations", "all")


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4: 2-D scales for weights, Hadamard transform for wgrad's operands, stochastic rounding of gradients.

    - `row_scaled_activation`: fprop multiplies planes of the activation with one amax per row instead of per tensor.
    - `nvfp4_4over6`: blocks of "weights", "activations" or "all" choose between a scale for 4 and one for 6, whichever
      has the smaller error. Planes with a Hadamard transform never do.
    - `nvfp4_4over6_err_mode`: that error, "MAE" or "MSE".
    - `nvfp4_4over6_e4m3_use_256`: whose block scales end at 256 then instead of 448, in the same words.
    """

    disable_rht: bool = False
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    nvfp4_4over6: str = "none"
    nvfp4_4over6_e4m3_use_256: str = "all"
    nvfp4_4over6_err_mode: str = "MAE"
    kind: ClassVar[str] = "nvfp4"

    @property
    def alignment(self) -> int:
        return 128

    def __post_init__(self) -> None:
        super().__post_init__()
        for field in ("nvfp4_4over6", "nvfp4_4over6_e4m3_use_256"):
            one_of(field, getattr(self, field), OVER_SIX, RecipeError)
        one_of("nvfp4_4over6_err_mode", self.nvfp4_4over6_err_mode, ("MAE", "MSE"), RecipeError)

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        if _is(role, "weight"):
            stem = "nvfp4" if self.disable_2d_quantization else "nvfp4_16x16"
            return uniform(stem + self._over_six("weights"))
        rotation = "" if self.disable_rht else "_rht"
        if role is not None and role.tensor_type in SLOTS["backward"]:
            rounding = "" if self.disable_stochastic_rounding else "_sr"
            return Quantizer(formats.get("nvfp4" + rounding), formats.get("nvfp4" + rotation + rounding))
        over_six = self._over_six("activations")
        row = "nvfp4" + "_row" * self.row_scaled_activation + over_six
        return Quantizer(formats.get(row), formats.get("nvfp4" + (rotation or over_six)))

    def _over_six(self, whose: str) -> str:
        """The ending of the format's name for blocks that choose between 4 and 6, else ""."""
        if self.nvfp4_4over6 not in (whose, "all"):
            return ""
        wide = self.nvfp4_4over6_e4m3_use_256 not in (whose, "all")
        return "_4over6" + "_448" * wide + "_mse" * (self.nvfp4_4over6_err_mode == "MSE")


BUILTIN: dict[str, type[Recipe]] = {
    recipe.kind: recipe
    for recipe in (
        HighPrecision,
        Float8CurrentScaling,
        Float8RowwiseScaling,
        DelayedScaling,
        Float8BlockScaling,
        MXFP8BlockScaling,
        NVFP4BlockScaling,
    )
}


@dataclass(frozen=True, kw_only=True)
class RuleRecipe(Recipe):
    """A recipe of ordered rules. A role that no rule matches gets the quantizer of `base`, or stays in high precision.

    Only quantizers come from `base`. Options such as strict or evaluation are those of this recipe. `history` has the
    parameters of delayed formats, None for the defaults.
    """

    rules: tuple[Rule, ...]
    title: str = "rules"
    base: Recipe | None = None
    history: History | None = None
    kind: ClassVar[str] = "rules"

    def __post_init__(self) -> None:
        if not isinstance(self.rules, tuple) or not all(isinstance(rule, Rule) for rule in self.rules):
            raise RecipeError(f"rules is {self.rules!r}; give a tuple of duotone.recipes.Rule")
        check_title(self.title)
        if self.history is not None and not isinstance(self.history, History):
            raise RecipeError(f"history is {self.history!r}; give a duotone.tensor.History")
        if self.base is not None:
            object.__setattr__(self, "base", as_recipe("base", self.base))
        super().__post_init__()
        if self.base is None:
            return
        for field in fields(Recipe):
            of_base, of_self = getattr(self.base, field.name), getattr(self, field.name)
            if of_base not in (field.default, of_self) and field.name not in ATTENTION_FIELDS:
                remedy = f"and a base gives quantizers alone: set {field.name} in this recipe"
                raise RecipeError(f"base {self.base.name} has {field.name}, {remedy}")

    @property
    def name(self) -> str:
        return self.title

    @property
    def alignment(self) -> int:
        return 128

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        return self.quantizer(role)

    def quantizer(
        self, role: QuantizerRole | None, site: Site = ANYWHERE, slot: QuantizerRole | None = None
    ) -> Quantizer:
        quantizer = first_match(self.rules, role, site, self.history, slot)
        if quantizer is not None:
            return quantizer
        if self.base is not None:
            return self.base.quantizer(role, site, slot)
        if role is not None and self.strict:
            remedy = "correct a rule, or end with one that has format = 'identity'"
            raise RecipeError(f"strict: no rule of recipe {self.title} matches {role}; {remedy}")
        return Quantizer()

    def attention_quantizer(self, role: QuantizerRole, site: Site = ANYWHERE) -> Quantizer:
        """The quantizer of a rule or the base. Strict rules that do not name attention leave it in high precision."""
        quantizer = first_match(self.rules, role, site, self.history)
        return quantizer or (Quantizer() if self.base is None else self.base.attention_quantizer(role, site))

    def asks_for(self, role: QuantizerRole, site: Site = ANYWHERE) -> bool:
        """Also where the rule of the role names attention by its module type or its tensor type."""
        if super().asks_for(role, site):
            return True
        rule = first_rule(self.rules, role, site)
        if rule is None:
            return self.base is not None and self.base.asks_for(role, site)
        return not rule.matches(QuantizerRole(name=role.name), site)

    def to_dict(self) -> Table:
        head: Table = {"name": self.title, **table_of(self, Recipe)}
        if self.base is not None:
            head["base"] = self.base.to_dict()
        if self.history is not None:
            head["delayed"] = table_of(self.history)
        return {**head, "rules": [rule.to_dict() for rule in self.rules]}

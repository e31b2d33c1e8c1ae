"""A recipe: a frozen value that gives the quantizer for the role of a tensor."""

import inspect
import weakref
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union

import torch

from duotone.errors import RecipeError, one_of, qualified_name, shown_fields
from duotone.formats import IDENTITY
from duotone.numbered import Numbered, constant_in_traces
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site, in_slot, require_known
from duotone.recipes.tables import Table
from duotone.tensor.quantizer import Quantizer

T = TypeVar("T")
K = TypeVar("K", bound="str | tuple[object, ...]")
V = TypeVar("V")
RecipeLike = Union["Recipe", str, Path]
"""A recipe, its name, or the path of its file."""

OVERRIDES = (None, "high_precision", "dequantized")
MEASURED = "measured"
"""The value of `min_weight_elements` that stands for the entries of `duotone.dispatch.target`."""


class RecipeClass(type):
    """Checks the arguments of a recipe before its constructor gets them."""

    def __call__(cls: type[T], *args: object, **options: object) -> T:
        if "__dataclass_params__" in vars(cls):
            _check_arguments(cls, args, options)
        return type.__call__(cls, *args, **options)

    @property
    def __signature__(cls) -> inspect.Signature:
        """For `help` and editors: the constructor's own arguments."""
        _, *parameters = inspect.signature(cls.__init__).parameters.values()
        return inspect.Signature(parameters)


@dataclass(frozen=True, kw_only=True)
class Recipe(metaclass=RecipeClass):
    """Base of all recipes. `recipe(role) -> Quantizer`; a subclass defines `assign(role)`.

    The role is None for a boundary slot whose consumer is unknown.

    - `strict`: every fallback to high precision is an error before the first step.
    - `backward_override`: both backward GEMMs run in high precision, on the original operands ("high_precision") or on
      the dequantized operands of forward ("dequantized").
    - `emulate_mixed`: allows GEMMs of two formats that no hardware multiplies with each other. They run emulated.
    - `fp8_dpa`: the products of attention take the formats of the roles of module type "dpa". `fp8_mha`: so do the
      tensors at its boundaries.
    - `dpa_center_keys`: attention in low precision subtracts from keys their mean over all tokens. `dpa_rotate`: it
      multiplies query and key by a Hadamard matrix. In exact arithmetic neither changes the result, and both lower the
      error of quantization.
    - `evaluation`: the recipe of modules whose `training` is False. None: this one.
    - `fprop_fast_accum`, `dgrad_fast_accum`, `wgrad_fast_accum`: an FP8 product may use a faster accumulator of fewer
      bits.
    - `min_weight_elements`: linears with a smaller weight (K x N elements) stay in high precision if their products
      would run natively. "measured" takes the measured number for the device; 0 is off.
    - `dpa_min_tokens`: attention of fewer queries stays in high precision if it would run natively. "measured" takes
      what is faster on the device under `fp8_dpa`, unless `strict` or `fp8_mha` demand FP8; 0 is off.
    - `recompute_columnwise`: backward encodes columnwise planes again, from tensors that are in memory anyway. This
      concerns weights and the outputs of norms and activations. Less memory, the same bits, one more cast for each.
    - `propagate_nonfinite`: if a NaN or an infinity in an operand makes a result non-finite in high precision, it is
      non-finite here too. Without it, some formats hide such elements, as Transformer Engine does.
    """

    strict: bool = False
    backward_override: str | None = None
    emulate_mixed: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    dpa_center_keys: bool = False
    dpa_rotate: bool = False
    evaluation: "Recipe | None" = None
    fprop_fast_accum: bool = True
    dgrad_fast_accum: bool = False
    wgrad_fast_accum: bool = False
    min_weight_elements: int | str = 0
    dpa_min_tokens: int | str = "measured"
    recompute_columnwise: bool = False
    propagate_nonfinite: bool = True

    kind: ClassVar[str] = ""
    asks_by_slot = False
    """Whether slots of one role may get different quantizers, so that each slot asks."""
    key: ClassVar[str]
    """A name that equal recipes share in this process. Plans and compiled graphs use it as a key."""

    def __post_init__(self) -> None:
        one_of("backward_override", self.backward_override, OVERRIDES, RecipeError)
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise RecipeError(f"{field.name} is {getattr(self, field.name)!r}; allowed are true and false")
        for name, unit in (("min_weight_elements", "elements"), ("dpa_min_tokens", "tokens")):
            least = getattr(self, name)
            number = isinstance(least, int) and not isinstance(least, bool) and least >= 0
            if not number and least != MEASURED:
                raise RecipeError(f"{name} is {least!r}; give a number of {unit} from 0 on (0 is off), or {MEASURED!r}")
        if self.evaluation is not None:
            recipe = as_recipe("evaluation", self.evaluation)
            object.__setattr__(self, "evaluation", recipe)
            if recipe.evaluation is not None:
                raise RecipeError(
                    f"the evaluation recipe {recipe.name} has an evaluation recipe itself; leave that out"
                )
        _intern(self)

    def __getstate__(self) -> Table:
        return {name: value for name, value in self.__dict__.items() if name not in ("key", "_first")}

    def __setstate__(self, state: Table) -> None:
        vars(self).update(state)
        _intern(self)

    @property
    def name(self) -> str:
        """The kind, and the fields that differ from the defaults of the kind, except `strict`: it changes no result."""
        values = {f: getattr(self, f.name) for f in fields(self) if f.default is not MISSING and f.name != "strict"}
        changed = {f.name: value for f, value in values.items() if value != f.default}
        text = ", ".join(f"{name} = {getattr(value, 'name', plain(value))}" for name, value in changed.items())
        return f"{self.kind} ({text})" if text else self.kind

    def __repr__(self) -> str:
        return shown_fields(self)

    def __init_subclass__(cls, **options: object) -> None:
        super().__init_subclass__(**options)
        cls.__repr__ = Recipe.__repr__  # which a dataclass would replace

    @property
    def alignment(self) -> int:
        """See `align_size`."""
        return 16

    def __call__(self, role: QuantizerRole | None) -> Quantizer:
        """The quantizer of a role. RecipeError if a module of the role's type has no such tensor."""
        require_known(role)
        return self.assign(role)

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        """The quantizer of a role. A subclass defines it."""
        raise NotImplementedError(f"{type(self).__name__} does not define assign(role)")

    def quantizer(
        self, role: QuantizerRole | None, site: Site = ANYWHERE, slot: QuantizerRole | None = None
    ) -> Quantizer:
        """The quantizer of `role` for a module at `site`. Plans call this; recipes that look at the site override it.

        `slot` is the place of the tensor in the module that makes it, such as "grad_input". It decides if the role
        names no tensor of a linear: if the consumer is unknown (None) or attention.
        """
        return self(in_slot(role, slot))

    def attention_quantizer(self, role: QuantizerRole, site: Site = ANYWHERE) -> Quantizer:
        """The quantizer of a role of attention, asked by its products.

        A recipe for all tensors alike leaves dO V^T and the gradient of the scores in high precision, the products
        whose errors reach the gradients of query and key most. With `fp8_mha` dO arrives quantized for all products.
        """
        quantizer = self.quantizer(role, site)
        if role.tensor_type == "dp":
            return Quantizer()
        is_exact = role.tensor_type == "do" and not self.fp8_mha
        return replace(quantizer, rowwise=IDENTITY) if is_exact else quantizer

    def asks_for(self, role: QuantizerRole, site: Site = ANYWHERE) -> bool:
        """Whether a role of attention runs in low precision. A recipe for all tensors alike means linears only."""
        return self.fp8_dpa or self.fp8_mha

    def to_dict(self) -> Table:
        """JSON-ready; `duotone.recipes.from_dict` reads it back."""
        return {"recipe": self.kind, **table_of(self)}


ELSEWHERE = {
    "fp8_format": "its tensors have the formats that it gives each of them: leave it out",
    "fp4_format": "NVFP4 has one element, E2M1: leave it out",
    "use_power_2_scales": "write power_of_two_scales",
    "use_f32_scales": "write power_of_two_scales, which is its opposite",
    "fp8_gemm_fprop": "write fprop_fast_accum",
    "fp8_gemm_dgrad": "write dgrad_fast_accum",
    "fp8_gemm_wgrad": "write wgrad_fast_accum",
    "fp8_quant_fwd_inp": "write power_of_two_scales and amax_epsilon",
    "fp8_quant_fwd_weight": "write power_of_two_scales and amax_epsilon",
    "fp8_quant_bwd_grad": "write power_of_two_scales and amax_epsilon",
    "override_linear_precision": "write backward_override = 'high_precision'",
}
"""Options of Transformer Engine, and what to write here instead."""


def _check_arguments(kind: type, args: tuple[object, ...], options: Table) -> None:
    """RecipeError unless a recipe of that class takes the arguments."""
    names = [field.name for field in fields(kind) if field.init]
    if args:
        raise RecipeError(f"{kind.__name__} takes its fields by name; allowed are {', '.join(names)}")
    for name in options:
        if name not in names:
            remedy = ELSEWHERE.get(name) or f"allowed are {', '.join(names)}"
            raise RecipeError(f"{kind.__name__} has no {name}; {remedy}")


_FIRST: "weakref.WeakKeyDictionary[Recipe, weakref.ref[Recipe]]" = weakref.WeakKeyDictionary()
"""A recipe: the first that was equal to it."""
_RECIPES: Numbered[Recipe] = Numbered()


def _intern(recipe: Recipe) -> None:
    """Give a recipe the key of its equals. RecipeError if a field cannot be hashed.

    Every recipe keeps the first of its equals alive, so that the key finds one as long as any of them lives.
    """
    if torch.compiler.is_dynamo_compiling():
        raise RecipeError(f"{type(recipe).__name__} is built in compiled code; build it outside, or give a name")
    try:
        reference = _FIRST.get(recipe)
    except TypeError as error:
        raise RecipeError(f"{type(recipe).__name__} is no value: {error}; give fields that can be hashed") from None
    first = None if reference is None else reference()
    if first is None:
        object.__setattr__(recipe, "key", _RECIPES.add(recipe))
        _FIRST[recipe] = weakref.ref(recipe)
    else:
        object.__setattr__(recipe, "key", first.key)
        object.__setattr__(recipe, "_first", first)


def recipe_of(key: str) -> Recipe:
    """A recipe of that key."""
    return _RECIPES[key]


_IN_GRAPHS: "dict[str, Recipe]" = {}
"""Recipes without functions that a trace asked for, by key. They stay, so that a later equal has the key of graphs."""


def keep_for_graphs(key: str) -> None:
    """Keep the recipe of that key, unless it holds functions: a program may make those anew for each step."""
    recipe = _RECIPES[key]
    if not _has_functions(recipe):
        _IN_GRAPHS[key] = recipe


def _has_functions(recipe: Recipe) -> bool:
    values = vars(recipe).values()
    return any(_has_functions(value) if isinstance(value, Recipe) else callable(value) for value in values)


def drop_dead(table: dict[K, V]) -> None:
    """Remove the entries of recipes that no longer exist. Keys of `table` are keys of recipes, or begin with one."""
    for key in [key for key in table if (key if isinstance(key, str) else key[0]) not in _RECIPES]:
        del table[key]


def align_size(recipe: RecipeLike) -> int:
    """The tokens of each group of a grouped linear are padded to a multiple of this. Calls no factory."""
    return as_recipe("align_size", recipe).alignment


def table_of(value: Any, kind: Any = None) -> Table:
    """The fields of a dataclass for JSON, or only those of its base `kind`, without those that are None."""
    table = {field.name: plain(getattr(value, field.name)) for field in fields(kind or value)}
    return {name: part for name, part in table.items() if part is not None}


def plain(value: object) -> object:
    """A field for JSON: a recipe as its table, a function as its name, which cannot be read back."""
    if isinstance(value, Recipe):
        return value.to_dict()
    if callable(value):
        return qualified_name(value)
    return value


def as_recipe(taker: str, value: "RecipeLike") -> "Recipe":
    """`value`, or the recipe of that name or file. RecipeError, which names `taker`, if it is neither."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str | Path):
        return _loaded(str(value))
    if isinstance(value, type) and issubclass(value, Recipe):
        raise RecipeError(f"{taker} takes a recipe; got the class {value.__name__}: write {value.__name__}()")
    if isinstance(value, dict):
        raise RecipeError(f"{taker} takes a recipe or its name; got a dict: use duotone.recipes.from_dict")
    raise RecipeError(
        f"{taker} takes a recipe or its name; got {type(value).__name__}: use one of the classes of duotone.recipes"
    )


@constant_in_traces
def _loaded(name_or_path: str) -> "Recipe":
    from duotone.recipes.library import load  # which imports this file

    return load(name_or_path)

"""A recipe: a frozen value that answers, for the role of a tensor, which quantizer makes its planes."""

import weakref
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union

from duotone.errors import RecipeError
from duotone.numbered import Numbered
from duotone.recipes.roles import ANYWHERE, QuantizerRole, Site, in_slot, require_known
from duotone.renamed import old_field, warn_renamed
from duotone.tensor.quantizer import Quantizer

T = TypeVar("T")
RecipeLike = Union["Recipe", str, Path]
"""A recipe, its name, or the path of its file."""

OVERRIDES = (None, "high_precision", "dequantized")
MEASURED = "measured"
"""What `min_weight_elements` is for the entries of `duotone.dispatch.worth`."""


RENAMED = {"min_gemm_work": "min_weight_elements", "square_wgrad_input": "wgrad_input_128x128"}
"""Old names of fields, which still work."""


class RecipeClass(type):
    """Checks the arguments of a recipe before its constructor takes them, and renames old ones."""

    def __call__(cls: type[T], *args: Any, **options: Any) -> T:
        if "__dataclass_params__" in vars(cls):
            options = with_new_names(options)
            _check_arguments(cls, args, options)
        return type.__call__(cls, *args, **options)


@dataclass(frozen=True, kw_only=True)
class Recipe(metaclass=RecipeClass):
    """Base of all recipes. `recipe(role) -> Quantizer`; a role of None is a boundary slot with an unknown consumer.
    A subclass defines `assign(role)`.

    `strict` turns every fallback to high precision into an error before the first step. `backward_override` runs both
    backward GEMMs in high precision: on the original operands ("high_precision") or on the dequantized operands of
    forward ("dequantized"). `emulate_mixed` allows GEMMs of two quantized formats that no hardware multiplies with each
    other; they run emulated. `fp8_dpa` asks for attention's products, `fp8_mha` also for its boundaries, in the formats
    of the roles of module type "dpa". `evaluation` is the recipe of modules whose `training` is False, None this one.
    `fprop_fast_accum` and its like allow an FP8 product that has a faster accumulator of fewer bits to use it.
    `min_weight_elements` leaves linears in high precision whose weight, K x N, has fewer elements, where native
    products would run: a number, or "measured" for what was measured on such a device; 0 is off. `recompute_columnwise`
    lets backward make the columnwise planes of weights, and of what norms and activations give linears, of tensors that
    are kept anyway: less memory, the same bits, a cast more each.

    `propagate_nonfinite` makes the result of a product non-finite where an operand holds NaN or an infinity and high
    precision would give a non-finite result. Without it, some formats hide such elements, as numerics of Transformer
    Engine do.
    """

    strict: bool = False
    backward_override: str | None = None
    emulate_mixed: bool = False
    fp8_dpa: bool = False
    fp8_mha: bool = False
    evaluation: "Recipe | None" = None
    fprop_fast_accum: bool = True
    dgrad_fast_accum: bool = False
    wgrad_fast_accum: bool = False
    min_weight_elements: int | str = 0
    recompute_columnwise: bool = False
    propagate_nonfinite: bool = True

    kind: ClassVar[str] = ""
    asks_by_slot = False
    """Whether slots of one role may get different answers, so that each slot is asked by itself."""
    key: ClassVar[str]
    """A name that equal recipes share in this process: plans and compiled graphs are kept by it."""

    min_gemm_work = old_field("min_gemm_work", "min_weight_elements")

    def __post_init__(self) -> None:
        if self.backward_override not in OVERRIDES:
            allowed = "None, 'high_precision', 'dequantized'"
            raise RecipeError(f"backward_override {self.backward_override!r} is unknown; allowed are {allowed}")
        for field in fields(self):
            if field.type is bool and not isinstance(getattr(self, field.name), bool):
                raise RecipeError(f"{field.name} is {getattr(self, field.name)!r}; allowed are true and false")
        self._check_work()
        self._check_evaluation()
        _intern(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("key", "_first")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({RENAMED.get(name, name): value for name, value in state.items()})
        _intern(self)

    def _check_work(self) -> None:
        given = self.min_weight_elements
        number = isinstance(given, int) and not isinstance(given, bool) and given >= 0
        if not number and given != MEASURED:
            raise RecipeError(
                f"min_weight_elements is {given!r}; give a number of elements from 0 on (0 is off), or {MEASURED!r}"
            )

    def _check_evaluation(self) -> None:
        if self.evaluation is None:
            return
        recipe = as_recipe("evaluation", self.evaluation)
        object.__setattr__(self, "evaluation", recipe)
        if recipe.evaluation is not None:
            raise RecipeError(f"the evaluation recipe {recipe.name} has an evaluation recipe itself; leave that out")

    @property
    def name(self) -> str:
        """The kind, and the fields that are not as the kind has them; not `strict`, which changes no result."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.default not in (MISSING, getattr(self, f.name))}
        own.pop("strict", None)
        changed = ", ".join(f"{field} = {getattr(value, 'name', value)}" for field, value in own.items())
        return f"{self.kind} ({changed})" if changed else self.kind

    @property
    def alignment(self) -> int:
        """See `align_size`."""
        return 16

    def __call__(self, role: QuantizerRole | None) -> Quantizer:
        """What `assign` says. RecipeError where a module of the role's type has no such tensor."""
        require_known(role)
        return self.assign(role)

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        """The quantizer of a role: what a recipe defines."""
        raise NotImplementedError(f"{type(self).__name__} does not define assign(role)")

    def quantizer(
        self, role: QuantizerRole | None, site: Site = ANYWHERE, slot: QuantizerRole | None = None
    ) -> Quantizer:
        """What a module at `site` gets for `role`: what plans ask. Recipes that look at the site override it.

        `slot` is the module's own place for the tensor, such as the "grad_input" of the linear of that name. It decides
        where the role names no tensor of a linear: None, a consumer that is not known, or attention.
        """
        del site
        return self(in_slot(role, slot))

    def asks_for(self, role: QuantizerRole, site: Site = ANYWHERE) -> bool:
        """Whether a role of attention is to run in low precision: formats for all alike are meant for linears."""
        del role, site
        return self.fp8_dpa or self.fp8_mha

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; `duotone.recipes.from_dict` reads it back."""
        values = {f.name: plain(getattr(self, f.name)) for f in fields(self)}
        return {"recipe": self.kind, **{key: value for key, value in values.items() if value is not None}}


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
"""What Transformer Engine's users may write, and what says the same here."""


def with_new_names(options: dict[str, Any]) -> dict[str, Any]:
    """Fields of a recipe by the names that they have now, with a DeprecationWarning for each old one.

    An old name goes before the new one, which `dataclasses.replace` gives too.
    """
    old = {RENAMED[name]: value for name, value in options.items() if name in RENAMED}
    for name in RENAMED.keys() & options.keys():
        warn_renamed(f"the recipe field {name}", RENAMED[name], stacklevel=4)
    return {name: value for name, value in options.items() if name not in RENAMED} | old


def _check_arguments(kind: type, args: tuple[Any, ...], given: dict[str, Any]) -> None:
    """RecipeError unless a recipe of that class takes them."""
    known = [field.name for field in fields(kind) if field.init]  # type: ignore[arg-type]
    if args:
        raise RecipeError(f"{kind.__name__} takes its fields by name; allowed are {', '.join(known)}")
    for name in given:
        if name not in known:
            remedy = ELSEWHERE.get(name) or f"allowed are {', '.join(known)}"
            raise RecipeError(f"{kind.__name__} has no {name}; {remedy}")


_FIRST: "weakref.WeakKeyDictionary[Recipe, weakref.ref[Recipe]]" = weakref.WeakKeyDictionary()
"""A recipe: the first that was equal to it."""
_RECIPES: Numbered[Recipe] = Numbered()


def _intern(recipe: Recipe) -> None:
    """Give a recipe the key of its equals; RecipeError where a field cannot be hashed.

    Every recipe keeps the first of its equals alive, so that the key finds one as long as any of them lives.
    """
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


def drop_dead(table: dict[Any, Any]) -> None:
    """Take out what belongs to recipes that nobody holds any more; keys are the key of a recipe, or begin with it."""
    for key in [key for key in table if (key if isinstance(key, str) else key[0]) not in _RECIPES]:
        del table[key]


def align_size(recipe: RecipeLike) -> int:
    """Tokens per group of a grouped linear are padded to a multiple of this; asks no factory."""
    return as_recipe("align_size", recipe).alignment


def plain(value: Any) -> Any:
    """A field as JSON holds it: a recipe as its table, a function as its name, which nothing reads back."""
    if isinstance(value, Recipe):
        return value.to_dict()
    if callable(value):
        return f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    return value


def as_recipe(taker: str, value: "RecipeLike") -> "Recipe":
    """`value`, or the recipe of that name or file. RecipeError where it is neither; `taker` is who asks."""
    if isinstance(value, Recipe):
        return value
    if isinstance(value, str | Path):
        return _loaded(str(value))
    raise RecipeError(
        f"{taker} takes a recipe or its name; got {type(value).__name__}: use one of the classes of duotone.recipes"
    )


def _loaded(name_or_path: str) -> "Recipe":
    from duotone.recipes.library import load  # which imports this file

    return load(name_or_path)


# What torch.compiler.assume_constant_result sets; calling it would import the compiler with the library.
_loaded._dynamo_marked_constant = True  # type: ignore[attr-defined]


def one_of(field: str, value: Any, allowed: tuple[Any, ...]) -> None:
    """Raise RecipeError unless `value` is allowed."""
    if value not in allowed:
        raise RecipeError(f"{field} {value!r} is unknown; allowed are {', '.join(map(repr, allowed))}")

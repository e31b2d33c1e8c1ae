"""A recipe from a function: any mapping from role to quantizer that a user writes in Python."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from duotone.errors import RecipeError, UserError, require_integers
from duotone.recipes.delayed import DelayedScalingRequest
from duotone.recipes.recipe import Recipe
from duotone.recipes.roles import ANYWHERE, GRADIENTS, QuantizerRole, Site
from duotone.recipes.tables import CUSTOM
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import BOTH, Planes, Usage
from duotone.tensor.quantizer import Quantizer

Factory = Callable[[QuantizerRole | None], object]
BOUNDARY = "a boundary slot whose consumer is unknown (role None)"


@dataclass(frozen=True, kw_only=True)
class CustomRecipe(Recipe):
    """`qfactory(role)` returns a `Quantizer`, a handle such as `duotone.MXFP8Quantizer()`, or a request.

    - It is called once per slot when a module builds its plan, never per step.
    - The role of a boundary slot whose consumer is unknown is None.
    - A grouped linear has the slots of every expert. Their formats must agree.
    - An object with `rowwise`, `columnwise` and `encode` is a quantizer too.
    """

    qfactory: Factory
    quantization_alignment: int = 128
    kind: ClassVar[str] = CUSTOM
    asks_by_slot = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.qfactory) or hasattr(self.qfactory, "quantize"):
            raise RecipeError(f"qfactory must be callable with a role; got {type(self.qfactory).__name__}")
        require_integers(1, RecipeError, quantization_alignment=self.quantization_alignment)

    @property
    def alignment(self) -> int:
        return self.quantization_alignment

    def assign(self, role: QuantizerRole | None) -> Quantizer:
        slot = BOUNDARY if role is None else str(role)
        try:
            answer = self.qfactory(role)
        except Exception as error:
            text = " ".join(str(error).split())
            raise RecipeError(f"qfactory raised {type(error).__name__} for {slot}: {text}; correct it") from error
        if isinstance(answer, DelayedScalingRequest):
            return answer.quantizer(role)
        value = getattr(answer, "value", answer)
        missing = [attribute for attribute in ("rowwise", "columnwise", "encode") if not hasattr(value, attribute)]
        if missing or isinstance(value, type):
            remedy = "return a Quantizer (IdentityQuantizer() is high precision)"
            raise RecipeError(f"qfactory returned {_words(answer)} for {slot}; {remedy}")
        _refuse_unused(answer, slot)
        if getattr(value, "columnwise_source", "original") != "original" and role and role.tensor_type in GRADIENTS:
            raise RecipeError(
                f"qfactory returned for {role} a quantizer whose columnwise plane encodes the rowwise one, which is "
                "for inputs and weights alone: leave columnwise_source out"
            )
        return value if isinstance(value, Quantizer) else _adapted(value, slot)

    def quantizer(
        self, role: QuantizerRole | None, site: Site = ANYWHERE, slot: QuantizerRole | None = None
    ) -> Quantizer:
        """The result of the function for the role. The role is None if the consumer of a boundary slot is unknown."""
        return self(role)

    def attention_quantizer(self, role: QuantizerRole, site: Site = ANYWHERE) -> Quantizer:
        return self(role)


@dataclass(frozen=True)
class AdaptedQuantizer(Quantizer):
    """An object with `rowwise`, `columnwise` and `encode` as the quantizer that plans expect."""

    inner: Any = None

    @property
    def is_stochastic(self) -> bool:
        return getattr(self.inner, "is_stochastic", Quantizer(self.rowwise, self.columnwise).is_stochastic)

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        return self.inner.encode(x, usage, ctx)


def _refuse_unused(quantizer: object, slot: str) -> None:
    """RecipeError for a subclass that overrides `quantize`, which no module would call."""
    kind = type(quantizer)
    quantize = getattr(kind, "quantize", None)
    is_own = quantize is not None and not quantize.__module__.startswith("duotone.")
    if is_own and issubclass(kind, Quantizer) and kind.encode is Quantizer.encode:
        raise RecipeError(
            f"qfactory returned {_words(quantizer)} for {slot}, which overrides quantize alone; modules call encode: "
            "override that instead"
        )
    if is_own and not hasattr(kind, "encode") and isinstance(getattr(quantizer, "value", None), Quantizer):
        raise RecipeError(
            f"qfactory returned {_words(quantizer)} for {slot}, a handle that overrides quantize; modules call "
            "the encode of its value: give it a subclass of Quantizer with an encode"
        )


def _adapted(value: Any, slot: str) -> Quantizer:
    source, history = getattr(value, "columnwise_source", "original"), getattr(value, "history", None)
    try:
        return AdaptedQuantizer(value.rowwise, value.columnwise, source, history, value)
    except UserError as error:
        raise RecipeError(f"qfactory returned {_words(value)} for {slot}: {error}") from None


def _words(answer: object) -> str:
    if answer is None:
        return "None"
    return f"the class {answer.__name__}" if isinstance(answer, type) else type(answer).__name__

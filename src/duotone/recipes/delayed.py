"""Requests of a factory for delayed scaling, and the check that the slots of one module have equal requests."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum

from torch import Tensor

from duotone import formats
from duotone.errors import RecipeError, UserError, one_of, shown, shown_fields
from duotone.recipes.roles import GRADIENTS, QuantizerRole
from duotone.recipes.tables import Table
from duotone.tensor.history import History
from duotone.tensor.quantizer import Quantizer


class Format(StrEnum):
    """Names of `fp8_format`, equal to the strings: E4M3, E5M2, or HYBRID, with E5M2 only for gradients.

    E2M1 is the element of NVFP4, which has no choice.
    """

    HYBRID = "HYBRID"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    E2M1 = "E2M1"


FP8_FORMATS = ("HYBRID", "E4M3", "E5M2")


def fp8_element(fp8_format: str, role: QuantizerRole | None) -> str:
    """HYBRID is E5M2 for gradients and E4M3 for all other tensors."""
    if fp8_format == "HYBRID":
        return "e5m2" if role is not None and role.tensor_type in GRADIENTS else "e4m3"
    return fp8_format.lower()


@dataclass(frozen=True, kw_only=True)
class DelayedOptions:
    """The element, and the parameters of `duotone.tensor.History`. RecipeError for a value that is not allowed."""

    fp8_format: str = "HYBRID"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, History], Tensor] | None = None
    reduce_amax: bool = True
    skip_nonfinite_amax: bool = True
    spike_factor: float = History.spike_factor
    first_scale_from_amax: bool = True

    def __repr__(self) -> str:
        return shown_fields(self)

    def __post_init__(self) -> None:
        one_of("fp8_format", self.fp8_format, FP8_FORMATS, RecipeError)
        self.delayed_quantizer(None)

    def delayed_quantizer(self, role: QuantizerRole | None) -> Quantizer:
        """Both planes in the element of the role, under a scale from the history."""
        options = {field.name: getattr(self, field.name) for field in fields(History)}
        algorithm = self.scaling_factor_compute_algo
        if algorithm is not None and not callable(algorithm):
            raise RecipeError(
                f"scaling_factor_compute_algo is {algorithm!r}; leave it out, or give a function, which only Python can"
            )
        fmt = formats.get(f"fp8_{fp8_element(self.fp8_format, role)}_delayed")
        return Quantizer(fmt, fmt, history=history(options))


@dataclass(frozen=True, kw_only=True, repr=False)
class DelayedScalingRequest(DelayedOptions):
    """A factory returns this for a slot whose scale follows from the amaxes of earlier steps."""

    def quantizer(self, role: QuantizerRole | None) -> Quantizer:
        """Both planes in the element of the role."""
        return self.delayed_quantizer(role)


def history(options: Table) -> History:
    """The parameters of delayed scaling. RecipeError for a value that is not allowed."""
    if not isinstance(options.get("reduce_amax", True), bool):
        raise RecipeError(f"reduce_amax is {options['reduce_amax']!r}; allowed are true and false")
    try:
        return History(**options)
    except UserError as error:
        raise RecipeError(str(error)) from None


def check_requests(quantizers: Mapping[str, Quantizer]) -> None:
    """RecipeError unless all slots of one module with delayed scaling have the same parameters: they share a history.

    `quantizers` are by slot.
    """
    histories = {slot: q.history for slot, q in quantizers.items() if getattr(q, "history", None) is not None}
    first = next(iter(histories), "")
    for slot, other in histories.items():
        for field in fields(History):
            values = getattr(histories[first], field.name), getattr(other, field.name)
            if values[0] != values[1]:
                value, other_value = map(shown, values)
                raise RecipeError(
                    f"delayed scaling of {first} has {field.name} = {value} and of {slot} {other_value}; slots of "
                    "one module share a history: give them the same"
                )

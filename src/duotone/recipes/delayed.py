"""Delayed scaling as a factory asks for it, and the check that the slots of one module ask for the same."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Any

from torch import Tensor

from duotone import formats
from duotone.errors import RecipeError, UserError
from duotone.recipes.recipe import one_of
from duotone.recipes.roles import GRADIENTS, QuantizerRole
from duotone.tensor.history import History
from duotone.tensor.quantizer import Quantizer


class Format(StrEnum):
    """Names of `fp8_format`, equal to the strings: E4M3, E5M2, or HYBRID, which is E5M2 for gradients alone.

    E2M1 is the element of NVFP4, which has no choice.
    """

    HYBRID = "HYBRID"
    E4M3 = "E4M3"
    E5M2 = "E5M2"
    E2M1 = "E2M1"


FP8_FORMATS = ("HYBRID", "E4M3", "E5M2")


def fp8_element(fp8_format: str, role: QuantizerRole | None) -> str:
    """HYBRID is E5M2 for gradients and E4M3 for all else."""
    if fp8_format == "HYBRID":
        return "e5m2" if role is not None and role.tensor_type in GRADIENTS else "e4m3"
    return fp8_format.lower()


@dataclass(frozen=True, kw_only=True)
class DelayedScalingRequest:
    """What a factory returns for a slot whose scale follows from the amaxes of earlier steps."""

    fp8_format: str = "HYBRID"
    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, Any], Tensor] | None = None
    reduce_amax: bool = True
    skip_nonfinite_amax: bool = True
    spike_factor: float = History.spike_factor
    first_scale_from_amax: bool = True

    def __post_init__(self) -> None:
        one_of("fp8_format", self.fp8_format, FP8_FORMATS)
        history_of(self)

    def quantizer(self, role: QuantizerRole | None) -> Quantizer:
        """Both planes in the element of the role."""
        return delayed_quantizer(fp8_element(self.fp8_format, role), history_of(self))


def history_of(holder: Any) -> History:
    """The parameters that `holder` has as fields of the same names. Raises RecipeError where one is not allowed."""
    values = {field.name: getattr(holder, field.name) for field in fields(History)}
    if not isinstance(values["reduce_amax"], bool):
        raise RecipeError(f"reduce_amax is {values['reduce_amax']!r}; allowed are true and false")
    algorithm = values["scaling_factor_compute_algo"]
    if algorithm is not None and not callable(algorithm):
        raise RecipeError(
            f"scaling_factor_compute_algo is {algorithm!r}; leave it out, or give a function, which only Python can"
        )
    try:
        return History(**values)
    except UserError as error:
        raise RecipeError(str(error)) from None


def delayed_quantizer(element: str, history: History) -> Quantizer:
    fmt = formats.get(f"fp8_{element}_delayed")
    return Quantizer(fmt, fmt, history=history)


def check_requests(quantizers: Mapping[str, Any]) -> None:
    """Raise RecipeError unless all slots of one module that scale with delay share their parameters.

    `quantizers` are by slot; they share one history, so that a length or a rule of its own for one slot cannot be.
    """
    histories = {slot: found for slot, q in quantizers.items() if (found := getattr(q, "history", None)) is not None}
    if not histories:
        return
    first, wanted = next(iter(histories.items()))
    for slot, history in histories.items():
        for field in fields(History):
            mine, other = getattr(wanted, field.name), getattr(history, field.name)
            if mine != other:
                raise RecipeError(
                    f"delayed scaling of {first} has {field.name} = {mine!r} and of {slot} {other!r}; "
                    "slots of one module share a history: give them the same"
                )

"""History: the parameters of delayed scaling, how a scale follows from the amaxes of earlier steps."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor, isfinite

from duotone.errors import UserError, shown_fields


def clips(amax: Tensor, scale: Tensor, largest: float | Tensor) -> Tensor:
    """Whether scales take amaxes so far above the largest magnitude of an element that no rounding gives it, bool.

    Up to 464 the nearest code of E4M3 is 448, and E5M2's largest code reaches further. Below that a new scale would
    gain nothing, and an average whose parts round up would grow with each of its scales.
    """
    return isfinite(amax) & (amax * scale > largest * (464 / 448))


ALGORITHMS = ("max", "most_recent")
LARGEST_MARGIN = 16
"""At margin 16 the amax maps to the third smallest magnitude of E4M3. At -16 all but the smallest values saturate."""

LONGEST = 2**20
"""The longest history in steps. Every slot of every module has one, so more would take gigabytes."""


@dataclass(frozen=True)
class History:
    """scale = MAX 2^-margin / amax, with amax the largest ("max") or newest ("most_recent") of the history.

    - `amax_history_len`: entries, the one that fills in this step included.
    - `amax_compute_algo`: may be a function from the history (L, n), newest last, to amax (n,).
    - `scaling_factor_compute_algo(amax, scale, fp8_max, history)`: returns the new scale (n,) instead of the formula.
    - `reduce_amax`: take the maximum over the amax reduction group of the autocast.
    - `skip_nonfinite_amax`: an amax that is infinite or NaN does not enter the history. Such amaxes are counted.
    - `spike_factor`: an amax above this times the largest other entry enters as that product. Such amaxes are counted.
      0 turns this off.
    - `first_scale_from_amax`: a new slot scales its first tensor by the amax of that tensor, not by 1.
    """

    margin: int = 0
    amax_history_len: int = 1024
    amax_compute_algo: str | Callable[[Tensor], Tensor] = "max"
    scaling_factor_compute_algo: Callable[[Tensor, Tensor, Tensor, "History"], Tensor] | None = None
    reduce_amax: bool = True
    skip_nonfinite_amax: bool = True
    spike_factor: float = 16.0
    first_scale_from_amax: bool = True

    def __repr__(self) -> str:
        return shown_fields(self)

    def __post_init__(self) -> None:
        if not isinstance(self.margin, int) or isinstance(self.margin, bool):
            raise UserError(f"margin is {self.margin!r}; it must be an integer number of powers of two")
        if abs(self.margin) > LARGEST_MARGIN:
            effect = "flush every value to zero" if self.margin > 0 else "saturate every value"
            limits = f"give an integer from {-LARGEST_MARGIN} to {LARGEST_MARGIN}, such as 0"
            raise UserError(f"margin is {self.margin}; a scale of MAX 2^-margin / amax would {effect}: {limits}")
        length = self.amax_history_len
        if not isinstance(length, int) or isinstance(length, bool) or not 1 <= length <= LONGEST:
            raise UserError(
                f"amax_history_len is {length!r}; it must be an integer of at least 1 and at most {LONGEST}"
            )
        if not callable(self.amax_compute_algo) and self.amax_compute_algo not in ALGORITHMS:
            allowed = f"{', '.join(ALGORITHMS)}, or a function of the history"
            raise UserError(f"amax_compute_algo {self.amax_compute_algo!r} is unknown; allowed are {allowed}")
        for name in ("skip_nonfinite_amax", "first_scale_from_amax"):
            if not isinstance(getattr(self, name), bool):
                raise UserError(f"{name} is {getattr(self, name)!r}; allowed are true and false")
        factor = self.spike_factor
        if isinstance(factor, bool) or not isinstance(factor, int | float) or not (factor == 0 or 1 < factor <= 2**64):
            raise UserError(f"spike_factor is {factor!r}; it must be 0, which turns it off, or from above 1 to 2^64")

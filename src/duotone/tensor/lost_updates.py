"""A warning for updates that a quantized tensor rounds away, of averages of weights and of optimizers."""

import warnings

import torch
from torch import Tensor

from duotone.capture import is_capturing
from duotone.formats import IDENTITY
from duotone.tensor.plane_tensor import Decodable


def values_before(t: Decodable) -> Tensor | None:
    """Return the values of `t` in fp32 before an operation writes it, if this write is one to look at, else None.

    The first writes are, and then pairs that become rare, because a look waits for the device. Of a pair as `mul_` and
    `add_` one alone may lose its move. Values that are traced, captured or on meta cannot be looked at. Formats that
    round stochastically follow small moves on average.
    """
    if t.is_inference() or t.is_meta or is_capturing():
        return None
    whole = t.whole
    rounds = all(fmt is None or (fmt is not IDENTITY and not fmt.is_stochastic) for fmt in whole.formats)
    is_sampled = (t._version >> 2).bit_count() <= 1  # an operation raises the version by two, a copy by one
    is_real = all(type(part) is Tensor for part in whole.parts)
    return t.values(torch.float32) if rounds and is_real and is_sampled else None


LOST = 0.2
"""The share of an update above which its loss is told. An average with a decay of 0.9 loses 0.26 of each in E4M3."""


def warn_if_lost(before: Tensor, values: Tensor, after: Tensor) -> None:
    """Warn if rounding loses more than `LOST` of what an operation moves: the norm of its error over that of the move.

    `before`, `values` and `after` have one shape: the values before the write, those written, and those stored.
    """
    errors, moves = after - values, values - before
    lost, move = (float(torch.dot(each.flatten(), each.flatten())) ** 0.5 for each in (errors, moves))
    if lost > LOST * move > 0:
        share = f"{lost / move:.0%}" if lost < move else "all"
        warnings.warn(
            f"{share} of this update is lost, because a quantized tensor rounds to the nearest code: averages and "
            "optimizers that repeat such updates do not arrive; average in a plain tensor (t.dequantize()), or train "
            "with duotone.optim.AdamW, which keeps masters",
            stacklevel=7,
        )

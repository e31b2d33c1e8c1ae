"""One step of AdamW on an fp32 master, in plain torch: the twin of the kernels in `duotone.kernels.adamw`.

With gradient g, moments m and v, master p and the numbers of `Rates` (Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019, algorithm 2), in this order, every operation rounded to fp32 by itself:

    m = m + (g - m) (1 - beta1)
    v = v beta2 + (g (1 - beta2)) g
    p = p (1 - lr weight_decay) - (m step_size) / (sqrt(v) correction + eps)

So the CPU and CUDA give the same bits.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from duotone.optim.rates import Rates


class State(NamedTuple):
    """What a step reads and, but for the gradient, writes: the shape of the parameter, contiguous, fp32.

    The gradient may be in any floating dtype, and need not be contiguous.
    """

    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    master: Tensor


def update(state: State, rates: Rates) -> None:
    """One step, in place."""
    grad, m, v, p = state
    sign, decay, first, beta2, second, step_size, correction, eps = rates
    g = grad.to(torch.float32) * sign
    m.add_((g - m).mul_(first))
    v.mul_(beta2).add_((g * second).mul_(g))
    root = v.to(torch.float64).sqrt_().to(torch.float32)  # MKL's root of fp32 is not always the nearest
    p.mul_(decay).sub_((m * step_size).div_(root.mul_(correction).add_(eps)))

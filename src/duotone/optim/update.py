"""One step of AdamW on an fp32 master, in plain torch: the twin of the kernels in `duotone.kernels.adamw`.

With gradient g, moments m and v, master p and the numbers of `Rates` (Loshchilov and Hutter, "Decoupled Weight Decay
Regularization", 2019, algorithm 2), in this order, every operation rounded to fp32 by itself:

    m = m + (g - m) (1 - beta1)
    v = v beta2 + (g (1 - beta2)) g
    p = p (1 - lr weight_decay) - (m step_size) / (sqrt(v) correction + eps)

So the CPU and CUDA give the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

Group = dict[str, Any]
"""A parameter group of torch: "params" and hyperparameters by name."""
Saved = dict[str, Any]
"""The state of one parameter: "step", "exp_avg", "exp_avg_sq" and, if it has one, "master"."""


class Rates(NamedTuple):
    """What one step multiplies by: Python floats, computed on the host, each rounded to fp32 where it is used."""

    sign: float
    """-1 where the objective is maximized."""
    decay: float
    """1 - lr weight_decay."""
    first: float
    """1 - beta1."""
    beta2: float
    second: float
    """1 - beta2."""
    step_size: float
    """lr / (1 - beta1^t)."""
    correction: float
    """1 / sqrt(1 - beta2^t)."""
    eps: float

    @staticmethod
    def of(group: Group, step: float) -> "Rates":
        """The numbers of a parameter group at step t = 1, 2, ..."""
        lr, (beta1, beta2) = float(group["lr"]), map(float, group["betas"])
        return Rates(
            sign=-1.0 if group["maximize"] else 1.0,
            decay=1 - lr * group["weight_decay"],
            first=1 - beta1,
            beta2=beta2,
            second=1 - beta2,
            step_size=lr / (1 - beta1**step),
            correction=(1 - beta2**step) ** -0.5,
            eps=float(group["eps"]),
        )


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

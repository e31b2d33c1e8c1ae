"""What one step of AdamW multiplies by: the numbers of a parameter group at one step, made on the host."""

from typing import Any, NamedTuple


class Rates(NamedTuple):
    """Python floats, each rounded to fp32 where it is used."""

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
    def of(group: dict[str, Any], step: float) -> "Rates":
        """Those of a parameter group at step t = 1, 2, ..."""
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

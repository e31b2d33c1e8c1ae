"""Activations and their derivatives, as torch's eager operations compute and round them.

A gated one takes (*lead, 2K): the first half is activated and multiplies the second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.casts import has_kernels
from duotone.errors import UserError

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer

aten = torch.ops.aten
QUICK = 1.702
"""The slope of the sigmoid that stands for the normal distribution in quick GELU."""


EXACT = ("relu", "srelu", "silu")
"""Functions whose kernels compute as eager torch does."""


@dataclass(frozen=True)
class Activation:
    """`value(x)` and `gradient(dy, x)`, of x (*lead, K), or of (*lead, 2K) where `gated`.

    `kernel` names the function in `duotone.kernels.activations`, "" if none is.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    gated: bool = False
    kernel: str = ""

    @property
    def is_exact(self) -> bool:
        """Whether a separate launch of the kernel pays: it has torch's bits, and eager torch takes several if gated."""
        return self.gated and self.kernel in EXACT

    def __call__(self, x: Tensor) -> Tensor:
        """`value`, by one kernel on CUDA if that has the same bits."""
        producer = self.produced(x) if self.is_exact else None
        return self.value(x) if producer is None else _materialized(producer, x)

    def differentiate(self, dy: Tensor, x: Tensor) -> Tensor:
        """Like a call, for `gradient`."""
        producer = self.produced_gradient(dy, x) if self.is_exact else None
        return self.gradient(dy, x) if producer is None else _materialized(producer, x)

    def produced(self, x: Tensor) -> "FusedProducer | None":
        """A producer with which a cast kernel computes `value` itself. None if no kernel can."""
        if not self.kernel or not has_kernels(x):
            return None
        from duotone.kernels import activations

        return activations.value(self.kernel, x.reshape(-1, x.shape[-1]).contiguous(), self.gated)

    def produced_gradient(self, dy: Tensor, x: Tensor) -> "FusedProducer | None":
        """Like `produced`, for `gradient`."""
        if not self.kernel or not has_kernels(x) or dy.dtype is not x.dtype:
            return None
        from duotone.kernels import activations

        flat, of_x = (t.reshape(-1, t.shape[-1]).contiguous() for t in (dy, x))
        return activations.gradient(self.kernel, flat, of_x, self.gated)


def _materialized(producer: "FusedProducer", like: Tensor) -> Tensor:
    """The matrix, with the leading dimensions of `like`."""
    from duotone.kernels import activations

    return activations.materialize(producer).view(*like.shape[:-1], producer.shape[1])


def gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the tanh form of GELU."""
    return aten.gelu_backward(dy, x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    """x * sigmoid(1.702 x)."""
    return x * torch.sigmoid(QUICK * x)


def quick_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `quick_gelu`."""
    gate = torch.sigmoid(QUICK * x)
    return dy * gate + aten.sigmoid_backward(dy * x, gate) * QUICK


def relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of ReLU."""
    return aten.threshold_backward(dy, x, 0)


def squared_relu(x: Tensor) -> Tensor:
    """relu(x) squared."""
    return F.relu(x).square()


def squared_relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of `squared_relu`."""
    return relu_gradient(dy * (2 * F.relu(x)), x)


def sigmoid_gradient(dy: Tensor, x: Tensor) -> Tensor:
    """The gradient of the sigmoid."""
    return aten.sigmoid_backward(dy, torch.sigmoid(x))


UNARY: dict[str, Activation] = {
    "gelu": Activation(partial(F.gelu, approximate="tanh"), gelu_gradient, kernel="gelu"),
    "qgelu": Activation(quick_gelu, quick_gelu_gradient),
    "relu": Activation(F.relu, relu_gradient, kernel="relu"),
    "srelu": Activation(squared_relu, squared_relu_gradient, kernel="srelu"),
    "silu": Activation(F.silu, aten.silu_backward, kernel="silu"),
}


def _gated(unary: Activation) -> Activation:
    """unary(a) * b for x = [a, b]."""

    def value(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return unary.value(a) * b

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((unary.gradient(dy * b, a), dy * unary.value(a)), -1)

    return Activation(value, gradient, gated=True, kernel=unary.kernel)


def _inside(x: Tensor, high: float, low: float | None) -> Tensor:
    return x <= high if low is None else (x >= low) & (x <= high)


def _clamp(x: Tensor, high: float, low: float | None = None) -> Tensor:
    """x within its limits. The derivative at a limit is 1: that of torch's clamp is 1 in torch 2.13 and 0 in 2.15."""
    clamped = x.clamp(low, high)
    return x.where(_inside(x, high, low), clamped) if torch.is_grad_enabled() else clamped


def clamped_swiglu(limit: float = 7.0, alpha: float = QUICK) -> Activation:
    """a sigmoid(alpha a) (b + 1) for x = [min(a, limit), clamp(b, -limit, limit)]."""

    def value(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a, b = _clamp(a, limit), _clamp(b, limit, -limit)
        return a * torch.sigmoid(alpha * a) * (b + 1)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        a, b = _clamp(first, limit), _clamp(second, limit, -limit)
        gate = torch.sigmoid(alpha * a)
        inner = dy * (b + 1)
        da = inner * gate + aten.sigmoid_backward(inner * a, gate) * alpha
        db = dy * (a * gate)
        inside = _inside(first, limit, None), _inside(second, limit, -limit)
        return torch.cat((da.where(inside[0], 0), db.where(inside[1], 0)), -1)

    return Activation(value, gradient, gated=True)


def situglu(beta1: float = 4.0, beta2: float = 25.0) -> Activation:
    """beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) for x = [a, b], in fp32: SwiGLU with soft caps."""

    def value(x: Tensor) -> Tensor:
        a, b = _wide(x).chunk(2, -1)
        return (beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * (beta2 * torch.tanh(b / beta2))).to(x.dtype)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        a, b = _wide(x).chunk(2, -1)
        dy, gate, first, second = _wide(dy), torch.sigmoid(a), torch.tanh(a / beta1), torch.tanh(b / beta2)
        inner = dy * (beta2 * second)
        da = aten.tanh_backward(inner * gate * beta1, first) / beta1
        da = da + aten.sigmoid_backward(inner * (beta1 * first), gate)
        db = aten.tanh_backward(dy * (beta1 * first * gate) * beta2, second) / beta2
        return torch.cat((da, db), -1).to(x.dtype)

    return Activation(value, gradient, gated=True)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


PARAMETRIC: dict[str, tuple[Callable[..., Activation], tuple[str, str]]] = {
    "clamped_swiglu": (clamped_swiglu, ("limit", "alpha")),
    "situglu": (situglu, ("beta1", "beta2")),
}
"""Activations with parameters, and the names of these."""

ACTIVATIONS: dict[str, Activation] = {
    **UNARY,
    "glu": _gated(Activation(torch.sigmoid, sigmoid_gradient)),
    "geglu": _gated(UNARY["gelu"]),
    "qgeglu": _gated(UNARY["qgelu"]),
    "reglu": _gated(UNARY["relu"]),
    "sreglu": _gated(UNARY["srelu"]),
    "swiglu": _gated(UNARY["silu"]),
    **{name: make() for name, (make, _) in PARAMETRIC.items()},
}


def activation(name: str, params: Mapping[str, float] | None = None) -> Activation:
    """The activation of that name. Only activations in PARAMETRIC take parameters. UserError for other names."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is unknown; allowed are {', '.join(ACTIVATIONS)}")
    make, parameters = PARAMETRIC.get(name, (None, ()))
    unknown = set(params or ()) - set(parameters)
    if unknown:
        allowed = " and ".join(parameters) or "nothing"
        raise UserError(f"activation_params has {sorted(unknown)[0]!r}; {name} takes {allowed}")
    return make(**params) if make and params else ACTIVATIONS[name]

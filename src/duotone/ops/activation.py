"""Activations and their derivatives, as torch's eager operations compute and round them.

A gated one takes (*lead, 2K): the first half is activated and multiplies the second.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.linear.stage import Kept, Stage
from duotone.ops.op import Op, Signal

aten = torch.ops.aten
QUICK = 1.702
"""The slope of the sigmoid that stands for the normal distribution in quick GELU."""


@dataclass(frozen=True)
class Activation:
    """`value(x)` and `gradient(dy, x)`, of x (*lead, K), or of (*lead, 2K) where `gated`."""

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor], Tensor]
    gated: bool = False


def gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return aten.gelu_backward(dy, x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(QUICK * x)


def quick_gelu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    gate = torch.sigmoid(QUICK * x)
    return dy * gate + aten.sigmoid_backward(dy * x, gate) * QUICK


def relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return aten.threshold_backward(dy, x, 0)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


def squared_relu_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return relu_gradient(dy * (2 * F.relu(x)), x)


def sigmoid_gradient(dy: Tensor, x: Tensor) -> Tensor:
    return aten.sigmoid_backward(dy, torch.sigmoid(x))


UNARY: dict[str, Activation] = {
    "gelu": Activation(partial(F.gelu, approximate="tanh"), gelu_gradient),
    "qgelu": Activation(quick_gelu, quick_gelu_gradient),
    "relu": Activation(F.relu, relu_gradient),
    "srelu": Activation(squared_relu, squared_relu_gradient),
    "silu": Activation(F.silu, aten.silu_backward),
}


def _gated(unary: Activation) -> Activation:
    """unary(a) * b for x = [a, b]."""

    def value(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return unary.value(a) * b

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return torch.cat((unary.gradient(dy * b, a), dy * unary.value(a)), -1)

    return Activation(value, gradient, gated=True)


def clamped_swiglu(limit: float = 7.0, alpha: float = QUICK) -> Activation:
    """a sigmoid(alpha a) (b + 1) for x = [min(a, limit), clamp(b, -limit, limit)]."""

    def value(x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        a, b = a.clamp(max=limit), b.clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + 1)

    def gradient(dy: Tensor, x: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        a, b = first.clamp(max=limit), second.clamp(-limit, limit)
        gate = torch.sigmoid(alpha * a)
        inner = dy * (b + 1)
        da = inner * gate + aten.sigmoid_backward(inner * a, gate) * alpha
        db = dy * (a * gate)
        inside = (second >= -limit) & (second <= limit)
        return torch.cat((da.where(first <= limit, 0), db.where(inside, 0)), -1)

    return Activation(value, gradient, gated=True)


ACTIVATIONS: dict[str, Activation] = {
    **UNARY,
    "glu": _gated(Activation(torch.sigmoid, sigmoid_gradient)),
    "geglu": _gated(UNARY["gelu"]),
    "qgeglu": _gated(UNARY["qgelu"]),
    "reglu": _gated(UNARY["relu"]),
    "sreglu": _gated(UNARY["srelu"]),
    "swiglu": _gated(UNARY["silu"]),
    "clamped_swiglu": clamped_swiglu(),
}


def activation(name: str, params: Mapping[str, float] | None = None) -> Activation:
    """The activation of that name; only clamped_swiglu takes parameters, `limit` and `alpha`."""
    if name not in ACTIVATIONS:
        raise UserError(f"activation {name!r} is unknown; allowed are {', '.join(ACTIVATIONS)}")
    unknown = set(params or ()) - ({"limit", "alpha"} if name == "clamped_swiglu" else set())
    if unknown:
        allowed = "limit and alpha" if name == "clamped_swiglu" else "nothing"
        raise UserError(f"activation_params has {sorted(unknown)[0]!r}; {name} takes {allowed}")
    return clamped_swiglu(**params) if params else ACTIVATIONS[name]


@dataclass(frozen=True, eq=False)
class ActivationStage(Stage):
    """x (*lead, K or 2K) -> (*lead, K); keeps x where a backward follows."""

    activation: Activation
    keeps: bool
    hands_over = True

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return self.activation.value(x), (x,) if self.keeps else ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (self.activation.gradient(dy, kept[0]),)


class ActivationOp(Op, nn.Module):
    """The activation `kind`."""

    def __init__(self, kind: str, params: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self.kind, self.params = kind, dict(params or {})
        self._build()

    def _build(self) -> None:
        made = activation(self.kind, self.params)
        self.gated = made.gated
        self._by_keeps = {keeps: ActivationStage(made, keeps) for keeps in (False, True)}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_by_keeps"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._build()

    def link(self, signal: Signal, is_first_microbatch: bool | None) -> tuple[Stage, Signal]:
        device, dtype, width, rows, tracked, _ = signal
        if self.gated and width is not None:
            if width % 2:
                raise UserError(f"{self.kind} takes an even last dimension, two halves; got {width}")
            width //= 2
        return self._by_keeps[tracked], Signal(device, dtype, width, rows, tracked)

    def extra_repr(self) -> str:
        return self.kind


class _Named(ActivationOp):
    """An activation whose kind is its class."""

    of: str

    def __init__(self) -> None:
        super().__init__(self.of)


def _named(name: str, kind: str) -> type[_Named]:
    return type(name, (_Named,), {"of": kind, "__module__": __name__, "__doc__": f"The activation {kind}."})


GELU, GEGLU, GLU = _named("GELU", "gelu"), _named("GEGLU", "geglu"), _named("GLU", "glu")
QGELU, QGEGLU = _named("QGELU", "qgelu"), _named("QGEGLU", "qgeglu")
ReLU, ReGLU = _named("ReLU", "relu"), _named("ReGLU", "reglu")
SReLU, SReGLU = _named("SReLU", "srelu"), _named("SReGLU", "sreglu")
SiLU, SwiGLU = _named("SiLU", "silu"), _named("SwiGLU", "swiglu")


class ClampedSwiGLU(ActivationOp):
    """The activation clamped_swiglu."""

    def __init__(self, *, limit: float = 7.0, alpha: float = QUICK) -> None:
        super().__init__("clamped_swiglu", {"limit": limit, "alpha": alpha})

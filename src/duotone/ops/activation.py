"""Activations as stages and as ops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from duotone.dispatch.activations import QUICK, Activation, activation
from duotone.errors import UserError
from duotone.linear.stage import Kept, Stage
from duotone.ops.op import Op, Signal


@dataclass(frozen=True, eq=False)
class ActivationStage(Stage):
    """x (*lead, K or 2K) -> (*lead, K); keeps x where a backward follows."""

    activation: Activation
    keeps: bool
    hands_over = True
    refusal = ""

    def replay(self, x: Any, operands: Sequence[Any], kept: Kept | None) -> tuple[Tensor, ...]:
        return (self.activation.value(x),)

    def forward(self, x: Tensor, *operands: Any) -> tuple[Any, ...]:
        return self.activation(x), self.keep(x)

    def keep(self, x: Tensor) -> Kept:
        return (x,) if self.keeps else ()

    def backward(self, dy: Any, kept: Kept, needs: tuple[bool, ...], *extra: Any) -> tuple[Tensor | None, ...]:
        return (self.activation.differentiate(dy, kept[0]),)

    def produced(self, x: Tensor) -> Any:
        """The output as a matrix that the cast makes on the way, or None where it cannot."""
        return self.activation.produced(x)


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

"""Activations as stages and as ops."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from duotone.dispatch.activations import QUICK, Activation, activation
from duotone.errors import UserError
from duotone.modules.basic import ProducerStage
from duotone.pipeline.op import Op, TensorInfo
from duotone.pipeline.rows import in_parts
from duotone.pipeline.stage import Gradients, Needs, Saved, Stage

if TYPE_CHECKING:
    from duotone.kernels.activations import FusedProducer
    from duotone.sharding.activation_layout import ActivationLayout


@dataclass(frozen=True, eq=False)
class ActivationStage(ProducerStage):
    """x (*lead, K or 2K) -> (*lead, K). Keeps x if a backward follows."""

    activation: Activation
    keeps: bool
    row_part: str = ""
    refusal = ""

    @property
    def is_bindable(self) -> bool:  # type: ignore[override]
        return self.activation.kernel != ""  # else a user's functions may do what no signature decides

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (self.activation.value(x),)

    def forward(self, x: Tensor) -> tuple[Tensor, Saved]:
        return self.activation(x), self.keep(x)

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        return (self.activation.differentiate(dy, saved[0]),)

    def fused_producer(self, x: Tensor) -> "FusedProducer | None":
        return self.activation.produced(x)

    def fused_gradient(self, dy: Tensor, x: Tensor) -> "FusedProducer | None":
        """The gradient, as a matrix that the cast kernel computes itself; None if it cannot."""
        return self.activation.produced_gradient(dy, x)


@dataclass(frozen=True, eq=False)
class ScaledActivationStage(Stage):
    """x (*lead, K or 2K), a scale of each row (*lead) -> the activation times the scales, (*lead, K), in x's dtype."""

    activation: Activation
    keeps: bool
    row_part: str = ""
    arity = (1,)
    refusal = ""

    def replay(self, x: Tensor, operands: Sequence[Tensor], saved: Saved | None) -> tuple[Tensor, ...]:
        return (_scaled(self.activation.value(x), operands[0]),)

    def forward(self, x: Tensor, scales: Tensor) -> tuple[Tensor, Saved]:
        return _scaled(self.activation(x), scales), (x, scales) if self.keeps else ()

    def backward(self, dy: Tensor, saved: Saved, needs: Needs) -> Gradients:
        x, scales = saved
        of_scales = None
        if needs[1]:
            of_scales = (self.activation(x) * dy).sum(-1, dtype=scales.dtype).view(scales.shape)
        return self.activation.differentiate(_scaled(dy, scales), x), of_scales


def _scaled(x: Tensor, scales: Tensor) -> Tensor:
    return (x * scales.reshape(x.shape[:-1]).unsqueeze(-1)).to(x.dtype)


class ActivationOp(Op, nn.Module):
    """The activation `kind`."""

    stage_type: type[ActivationStage] | type[ScaledActivationStage] = ActivationStage

    def __init__(self, kind: str, params: Mapping[str, float] | None = None) -> None:
        super().__init__()
        self._kind, self._params = kind, dict(params or {})
        self._build()

    @property
    def kind(self) -> str:
        """The name of the activation."""
        return self._kind

    @property
    def params(self) -> Mapping[str, float]:
        """The numbers of the activation by name."""
        return MappingProxyType(self._params)

    def _build(self) -> None:
        function = activation(self.kind, self.params)
        self.gated = function.gated
        self._by_keeps = {keeps: self._stage(function, keeps) for keeps in (False, True)}

    def _stage(self, function: Activation, keeps: bool) -> Stage:
        stage, alone = self.stage_type(function, keeps), self.stage_type is ScaledActivationStage
        if not function.kernel:  # of a user, who may give two functions one name
            return stage
        name = f"{self.kind} {sorted(self.params.items())} {keeps}{' scaled' * alone}"
        return in_parts(stage, name, (keeps,), keeps, is_home=alone)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in super().__getstate__().items() if name != "_by_keeps"}

    def __setstate__(self, state: dict[str, object]) -> None:
        super().__setstate__(state)
        self._build()

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        device, dtype, width, rows, tracked, _, index, _ = info
        if self.gated and width is not None:
            if width % 2:
                raise UserError(f"{self.kind} takes an even last dimension, two halves; got {width}")
            width //= 2
        return self._by_keeps[tracked], TensorInfo(device, dtype, width, rows, tracked, index=index)

    def output_layout(self, x: "ActivationLayout") -> "ActivationLayout":
        if self.gated and x.cuts_last:
            raise UserError(f"{self.kind} takes whole rows, two halves each; got a DTensor of {x.placement!r}")
        return x._replace(shape=(*x.shape[:-1], x.shape[-1] // 2)) if self.gated else x

    def extra_repr(self) -> str:
        return self.kind


class ScaledActivationOp(ActivationOp):
    """The activation `kind` times a scale of each row, a further input (*lead) such as the weights of a router.

    The two halves of a gated activation lie side by side: UserError for a `glu_interleave_size`.
    """

    stage_type = ScaledActivationStage
    extra_inputs = 1

    def __init__(
        self, kind: str, params: Mapping[str, float] | None = None, glu_interleave_size: int | None = None
    ) -> None:
        if glu_interleave_size is not None:
            raise UserError(
                f"glu_interleave_size is {glu_interleave_size}; {kind} takes its halves side by side: leave it out, "
                "and order the rows of the linear before it so"
            )
        super().__init__(kind, params)

    def link(self, info: TensorInfo, is_first_microbatch: bool | Tensor | None) -> tuple[Stage, TensorInfo]:
        return super().link(info._replace(requires_grad=torch.is_grad_enabled()), is_first_microbatch)

    def accept(self, stage: Stage, info: TensorInfo, extra: Sequence[object]) -> Sequence[object]:
        (scales,) = extra
        if not isinstance(scales, Tensor) or not scales.is_floating_point() or scales.device.type != info.device:
            raise UserError(f"{self.kind} takes a floating tensor of scales on {info.device}; got {_words(scales)}")
        if info.rows not in (None, scales.numel()):
            raise UserError(f"{self.kind} takes a scale for each of {info.rows} rows; got {_words(scales)}")
        return extra


def _words(x: object) -> str:
    return f"{tuple(x.shape)} in {x.dtype} on {x.device.type}" if isinstance(x, Tensor) else type(x).__name__


def _named(name: str, kind: str) -> type[ActivationOp]:
    def __init__(self: ActivationOp) -> None:
        ActivationOp.__init__(self, kind)

    members = {"__init__": __init__, "__module__": __name__, "__doc__": f"The activation {kind}."}
    return type(name, (ActivationOp,), members)


def _scaled_by_rows(name: str, kind: str) -> type[ScaledActivationOp]:
    def __init__(self: ScaledActivationOp, *, glu_interleave_size: int | None = None, **params: float) -> None:
        ScaledActivationOp.__init__(self, kind, params, glu_interleave_size)

    words = f"The activation {kind} times a scale of each row; see `ScaledActivationOp`."
    return type(name, (ScaledActivationOp,), {"__init__": __init__, "__module__": __name__, "__doc__": words})


GELU, GEGLU, GLU = _named("GELU", "gelu"), _named("GEGLU", "geglu"), _named("GLU", "glu")
QGELU, QGEGLU = _named("QGELU", "qgelu"), _named("QGEGLU", "qgeglu")
ReLU, ReGLU = _named("ReLU", "relu"), _named("ReGLU", "reglu")
SReLU, SReGLU = _named("SReLU", "srelu"), _named("SReGLU", "sreglu")
SiLU, SwiGLU = _named("SiLU", "silu"), _named("SwiGLU", "swiglu")
ScaledSReLU, ScaledSwiGLU = _scaled_by_rows("ScaledSReLU", "srelu"), _scaled_by_rows("ScaledSwiGLU", "swiglu")
ScaledSiTUGLU = _scaled_by_rows("ScaledSiTUGLU", "situglu")
ScaledClampedQGeGLU = _scaled_by_rows("ScaledClampedQGeGLU", "clamped_swiglu")


class ClampedSwiGLU(ActivationOp):
    """The activation clamped_swiglu."""

    def __init__(self, *, limit: float = 7.0, alpha: float = QUICK) -> None:
        super().__init__("clamped_swiglu", {"limit": limit, "alpha": alpha})


class SiTUGLU(ActivationOp):
    """The activation situglu."""

    def __init__(self, *, beta1: float = 4.0, beta2: float = 25.0) -> None:
        super().__init__("situglu", {"beta1": beta1, "beta2": beta2})

"""The subject `mlp`: forward and backward of norm, linear, activation and linear, no biases."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from bench.subjects import layer
from bench.timing.case import BASE, Candidate, Case, Settings, Shape, Subject, written
from bench.timing.duel import clock_for
from duotone.modules import LayerNormMLP
from duotone.recipes import Recipe


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


@dataclass(frozen=True)
class Kind:
    """A norm and an activation, by Duotone's names and as plain torch."""

    normalization: str
    activation: str
    norm: Callable[..., nn.Module]
    function: Callable[[Tensor], Tensor]
    widening: int


KINDS = {
    "LayerNorm + GELU": Kind("LayerNorm", "gelu", nn.LayerNorm, gelu, 1),
    "RMSNorm + SwiGLU": Kind("RMSNorm", "swiglu", nn.RMSNorm, swiglu, 2),
}
EPS = 1e-5


class PlainMLP(nn.Module):
    """The same from torch's modules."""

    def __init__(self, kind: Kind, width: int, hidden: int, device: str) -> None:
        super().__init__()
        options = {"device": device, "dtype": layer.DTYPE}
        self.function = kind.function
        self.norm = kind.norm(width, eps=EPS, **options)
        self.up = nn.Linear(width, kind.widening * hidden, bias=False, **options)
        self.down = nn.Linear(hidden, width, bias=False, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(self.norm(x))))


def candidates(settings: Settings, shape: Shape, kind: Kind) -> list[Candidate]:
    tokens, width, hidden = shape
    shared = layer.inputs(settings.device, tokens, width, width)

    def layer_norm_mlp(recipe: Recipe) -> nn.Module:
        return LayerNormMLP(
            width,
            hidden,
            eps=EPS,
            bias=False,
            normalization=kind.normalization,
            activation=kind.activation,
            device=settings.device,
            params_dtype=layer.DTYPE,
            recipe=recipe,
        )

    plain = layer.of_torch(lambda: PlainMLP(kind, width, hidden, settings.device), shared)
    return [*plain, *layer.of_recipes(layer_norm_mlp, shared, settings)]


def cases(settings: Settings, shape: Shape) -> list[Case]:
    return [
        Case(
            f"mlp, {name}",
            written(shape),
            BASE,
            clock_for(settings.device),
            lambda kind=kind: candidates(settings, shape, kind),
        )
        for name, kind in KINDS.items()
    ]


MLP = Subject(
    "mlp",
    "Forward and backward of norm + MLP, with GELU and with SwiGLU: TOKENS, WIDTH to HIDDEN and back.",
    ("TOKENS", "WIDTH", "HIDDEN"),
    {"cuda": ((8192, 4096, 14336),), "cpu": ((128, 128, 256),)},
    cases,
)

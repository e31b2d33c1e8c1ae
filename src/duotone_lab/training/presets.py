"""Named sizes of the laboratory: a model, its batch and its schedule."""

import math
from dataclasses import dataclass, replace

from duotone.errors import UserError

DEFAULT_RECIPES = ("bf16", "fp8-current", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd")
"""The recipes of a comparison by default."""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes of the byte-level GPT. `hidden` is the width of the SwiGLU, `context` the longest sequence."""

    layers: int
    dim: int
    heads: int
    hidden: int
    context: int
    tied: bool


@dataclass(frozen=True)
class Preset:
    """A model, its batch (sequences a step), steps, peak learning rate, warm-up and held-out batches."""

    name: str
    model: ModelConfig
    batch: int
    steps: int
    learning_rate: float
    warmup: int
    heldout_batches: int

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a batch."""
        return self.batch * self.model.context

    def resized(
        self, *, learning_rate: float | None = None, batch: int | None = None, context: int | None = None
    ) -> "Preset":
        """The preset with those sizes where they are not None; UserError unless they are positive."""
        sizes = {"learning_rate": learning_rate, "batch": batch, "context": context}
        changes = {name: size for name, size in sizes.items() if size is not None}
        if wrong := next((name for name, size in changes.items() if not 0 < size < math.inf), None):
            raise UserError(f"{wrong.replace('_', ' ')} {changes[wrong]} is not a positive number: give one")
        model = replace(self.model, context=changes.pop("context", self.model.context))
        return replace(self, model=model, **changes)


_DEMO = ModelConfig(layers=2, dim=128, heads=2, hidden=256, context=128, tied=False)
_TINY = ModelConfig(layers=2, dim=64, heads=2, hidden=96, context=32, tied=True)
_SMALL = ModelConfig(layers=12, dim=768, heads=12, hidden=2048, context=1024, tied=False)
PRESETS = {
    "demo": Preset("demo", _DEMO, batch=16, steps=100, learning_rate=1e-3, warmup=10, heldout_batches=8),
    "tiny": Preset("tiny", _TINY, batch=4, steps=8, learning_rate=1e-3, warmup=2, heldout_batches=2),
    "small": Preset("small", _SMALL, batch=16, steps=2000, learning_rate=6e-4, warmup=100, heldout_batches=16),
}


def get(name: str) -> Preset:
    """The preset called `name`; UserError if there is none."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name]

"""What a run of the laboratory trains, for how long, and at which learning rates."""

import math
from dataclasses import asdict, dataclass, replace

import torch

from duotone.errors import UserError
from duotone_lab.training import models
from duotone_lab.training.presets import Preset

FLOOR = 0.1
"""The learning rate ends at this share of its peak."""


@dataclass(frozen=True)
class TrainConfig:
    """What is trained and for how long. `data` are paths, none for the text that Python ships; `model` is a name."""

    preset: Preset
    steps: int
    seed: int = 0
    device: str = "cpu"
    data: tuple[str, ...] = ()
    model: str = models.DEFAULT

    def learning_rate(self, step: int) -> float:
        """The learning rate after `step` steps: linear warm-up, then half a cosine to a tenth of the peak."""
        warmup = min(self.preset.warmup, self.steps // 2)
        if step < warmup:
            return self.preset.learning_rate * (step + 1) / (warmup + 1)
        along = (step - warmup) / max(1, self.steps - warmup)
        return self.preset.learning_rate * (FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * along)))

    def length_note(self, steps: int, completed: int) -> str:
        """What changes because the `completed` steps belonged to a run of `steps` steps; "" if nothing does."""
        before = replace(self, steps=steps)
        if all(before.learning_rate(step) == self.learning_rate(step) for step in range(completed)):
            return ""
        return (
            f"steps 1 to {completed} had the learning rates of a run of {steps} steps, and from step {completed + 1} "
            f"on they are those of a run of {self.steps}: the result is not that of one uninterrupted run of "
            f"{self.steps}"
        )

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; a checkpoint holds it."""
        return {**asdict(self), "data": list(self.data)}


def require_device(name: str) -> None:
    """UserError unless this machine can train on the device `name`, "cpu" or "cuda"."""
    if name not in ("cpu", "cuda"):
        raise UserError(f"unknown device {name!r}: choose cpu or cuda; duotone plan takes other GPUs as --arch")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("no CUDA device is available here: choose --device cpu, or install a CUDA build of torch")

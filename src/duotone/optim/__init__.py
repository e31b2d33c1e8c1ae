"""Optimizers that write quantized parameters."""

from duotone.optim.adamw import AdamW

FusedAdamW = AdamW

__all__ = ["AdamW", "FusedAdamW"]

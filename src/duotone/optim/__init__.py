"""Optimizers that write quantized parameters."""

from duotone.optim.adamw import AdamW

__all__ = ["AdamW"]

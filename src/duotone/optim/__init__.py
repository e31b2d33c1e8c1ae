"""Optimizers that write quantized parameters."""

from duotone.optim.adamw import AdamW as AdamW

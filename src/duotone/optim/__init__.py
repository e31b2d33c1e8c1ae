"""Optimizers that write quantized parameters."""

from duotone.optim.adamw import AdamW
from duotone.optim.cut_masters import quantize_master_weights

FusedAdamW = AdamW

__all__ = ["AdamW", "FusedAdamW", "quantize_master_weights"]

"""Optimizers that write quantized parameters."""

from duotone.optim.adamw import AdamW, FusedAdam
from duotone.optim.cut_masters import quantize_master_weights

FusedAdamW = AdamW

__all__ = ["AdamW", "FusedAdam", "FusedAdamW", "quantize_master_weights"]

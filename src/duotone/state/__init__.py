"""Mutable state: the autocast stack, delayed-scaling states, and the seeds of stochastic rounding."""

from duotone.state.autocast_context import autocast
from duotone.state.parameters import quantized_model_init
from duotone.state.seeds import load_rng_state, rng_state

__all__ = ["autocast", "load_rng_state", "quantized_model_init", "rng_state"]

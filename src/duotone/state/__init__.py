"""What mutates: the autocast stack, delayed-scaling states, and the seeds of stochastic rounding."""

from duotone.state.autocast_context import autocast as autocast
from duotone.state.parameters import quantized_model_init as quantized_model_init
from duotone.state.seeds import load_rng_state as load_rng_state
from duotone.state.seeds import rng_state as rng_state

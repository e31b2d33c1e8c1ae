"""The few things that mutate: the autocast stack, and the seeds of stochastic rounding."""

from duotone.state.autocast import autocast as autocast
from duotone.state.seeds import load_rng_state as load_rng_state
from duotone.state.seeds import rng_state as rng_state

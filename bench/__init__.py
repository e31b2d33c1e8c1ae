"""Benchmarks of a clone: `duotone bench` times layers, casts and training steps; the scripts answer a question each."""

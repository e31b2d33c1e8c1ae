"""What `duotone bench` measures: layers, casts, host time and training steps."""

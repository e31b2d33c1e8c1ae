"""Timing of layers, casts and training steps next to plain torch; no display code."""

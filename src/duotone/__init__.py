"""Duotone: low-precision training for PyTorch in which each direction of each tensor has a format of its own."""

"""Triton kernels: pure functions of plain CUDA tensors, each with a plain-torch twin of the same bits.

Importing this package imports Triton; only `dispatch` does, when a CUDA tensor arrives.
"""

__all__: list[str] = []

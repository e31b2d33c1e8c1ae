"""Planes, quantizers and the one tensor subclass that carries two planes."""

from duotone.tensor import aten_ops, graph_casts, pickling  # noqa: F401 (fill tables)  # pyright: ignore[reportUnusedImport]
from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.history import History
from duotone.tensor.plane import BOTH, Plane, Planes, Usage
from duotone.tensor.quantized import QuantizedTensor, clear, prepare_for_saving, restore_from_saved
from duotone.tensor.quantizer import Quantizer

__all__ = [
    "BOTH", "LOCAL", "History", "Plane", "Planes", "QuantizeContext", "QuantizedTensor", "Quantizer", "Usage",
    "clear", "prepare_for_saving", "restore_from_saved",
]  # fmt: skip

"""Planes, quantizers and the one tensor subclass that carries two planes."""

from duotone.tensor import ops as ops
from duotone.tensor import pickling as pickling
from duotone.tensor.context import LOCAL as LOCAL
from duotone.tensor.context import QuantizeContext as QuantizeContext
from duotone.tensor.history import History as History
from duotone.tensor.plane import BOTH as BOTH
from duotone.tensor.plane import Plane as Plane
from duotone.tensor.plane import Planes as Planes
from duotone.tensor.plane import Usage as Usage
from duotone.tensor.quantized import QuantizedTensor as QuantizedTensor
from duotone.tensor.quantizer import Quantizer as Quantizer
from duotone.tensor.saving import clear as clear
from duotone.tensor.saving import prepare_for_saving as prepare_for_saving
from duotone.tensor.saving import restore_from_saved as restore_from_saved

"""Planes, quantizers and the one tensor subclass that carries two planes."""

from duotone.tensor.plane import Plane as Plane
from duotone.tensor.quantized import QuantizedTensor as QuantizedTensor
from duotone.tensor.quantizer import BOTH as BOTH
from duotone.tensor.quantizer import Planes as Planes
from duotone.tensor.quantizer import Quantizer as Quantizer
from duotone.tensor.quantizer import Usage as Usage
from duotone.tensor.vocabulary import HybridQuantizer as HybridQuantizer
from duotone.tensor.vocabulary import IdentityQuantizer as IdentityQuantizer

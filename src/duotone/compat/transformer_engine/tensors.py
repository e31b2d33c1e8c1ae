"""Tensor classes of Transformer Engine, for `isinstance`: each stands for quantized tensors of some formats."""

import re

from duotone.errors import UserError
from duotone.tensor import QuantizedTensor


class FormatsOfTensors(type):
    """A class whose instances are the quantized tensors with a plane in a format whose name matches `pattern`."""

    pattern: str

    def __instancecheck__(cls, instance: object) -> bool:
        planes = instance.planes if isinstance(instance, QuantizedTensor) else ()
        return any(plane is not None and re.match(cls.pattern, plane.format.name) for plane in planes)

    def __call__(cls, *_: object, **__: object) -> None:
        raise UserError(f"{cls.__name__} is not built by hand in Duotone; call a quantizer: duotone.Quantizer.quantize")


class Float8Tensor(metaclass=FormatsOfTensors):
    """FP8 with one scale for the tensor."""

    pattern = r"fp8_\w+_(tensor|delayed)"


class Float8BlockwiseQTensor(metaclass=FormatsOfTensors):
    """FP8 with scales of blocks."""

    pattern = r"fp8_\w+_(1x128|128x128)"


class MXFP8Tensor(metaclass=FormatsOfTensors):
    """MXFP8."""

    pattern = "mxfp8"


class NVFP4Tensor(metaclass=FormatsOfTensors):
    """NVFP4."""

    pattern = "nvfp4"

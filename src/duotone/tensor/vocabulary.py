"""Quantizers under their Transformer Engine names: handles with default usages around a frozen `Quantizer` value."""

from typing import Any

from torch import Tensor

from duotone import formats
from duotone.errors import UserError
from duotone.tensor.quantized import QuantizedTensor, quantize
from duotone.tensor.quantizer import Quantizer, Usage


class QuantizerHandle:
    """A `Quantizer` value with mutable default usages; handles are equal where their values are."""

    def __init__(self, value: Quantizer, *, rowwise: bool = True, columnwise: bool = True) -> None:
        self.value = value
        self._usage = Usage(rowwise, columnwise)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change the planes that later calls make; existing tensors stay as they are."""
        row, col = self._usage
        self._usage = Usage(row if rowwise is None else rowwise, col if columnwise is None else columnwise)

    def get_usages(self) -> dict[str, bool]:
        return self._usage._asdict()

    def quantize(
        self, tensor: Tensor, *, out: QuantizedTensor | None = None, seed: Tensor | None = None
    ) -> QuantizedTensor:
        """(*lead, K) -> a quantized tensor; `out` is rewritten in place and returned."""
        return out.quantize_(tensor, seed) if out is not None else quantize(tensor, self.value, self._usage, seed)

    __call__ = quantize

    def update_quantized(self, source: Tensor, target: QuantizedTensor) -> QuantizedTensor:
        return target.quantize_(source)

    def copy(self) -> "QuantizerHandle":
        return QuantizerHandle(self.value, rowwise=self._usage.rowwise, columnwise=self._usage.columnwise)

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, QuantizerHandle) and self.value == other.value

    def __hash__(self) -> int:
        return hash(self.value)

    def __repr__(self) -> str:
        row, col = self.value.rowwise, self.value.columnwise
        return f"{type(self).__name__}(rowwise={row and row.name}, columnwise={col and col.name})"


def _uniform(name: str) -> Quantizer:
    return Quantizer(formats.get(name), formats.get(name))


class IdentityQuantizer(QuantizerHandle):
    """High precision in both directions."""

    def __init__(self, **usage: bool) -> None:
        super().__init__(Quantizer(), **usage)


class Float8CurrentScalingQuantizer(QuantizerHandle):
    """FP8 with one scale per tensor, from the tensor's own amax. `fp8_dtype` is "e4m3" or "e5m2"."""

    def __init__(self, fp8_dtype: str = "e4m3", *, force_pow_2_scales: bool = False, **usage: bool) -> None:
        super().__init__(_uniform(f"fp8_{fp8_dtype}_tensor" + "_pow2" * force_pow_2_scales), **usage)


class Float8BlockQuantizer(QuantizerHandle):
    """FP8 with a scale per 1x128 (`block_scaling_dim` 1) or 128x128 (2) block."""

    def __init__(
        self,
        fp8_dtype: str = "e4m3",
        *,
        block_scaling_dim: int = 2,
        force_pow_2_scales: bool = True,
        **usage: bool,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise UserError(f"block_scaling_dim is 1 (1x128) or 2 (128x128); got {block_scaling_dim}")
        block = {1: "1x128", 2: "128x128"}[block_scaling_dim]
        super().__init__(_uniform(f"fp8_{fp8_dtype}_{block}" + "_fp32" * (not force_pow_2_scales)), **usage)


class MXFP8Quantizer(QuantizerHandle):
    """MXFP8: E8M0 scales of 32 elements, or of 32x32 with `with_2d_quantization`."""

    def __init__(self, fp8_dtype: str = "e4m3", *, with_2d_quantization: bool = False, **usage: bool) -> None:
        super().__init__(_uniform(f"mxfp8_{fp8_dtype}" + "_32x32" * with_2d_quantization), **usage)


class NVFP4Quantizer(QuantizerHandle):
    """NVFP4; the Hadamard transform applies to the columnwise plane alone."""

    def __init__(
        self,
        *,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        **usage: bool,
    ) -> None:
        stem, rounding = "nvfp4" + "_16x16" * with_2d_quantization, "_sr" * stochastic_rounding
        value = Quantizer(formats.get(stem + rounding), formats.get(stem + "_rht" * with_rht + rounding))
        super().__init__(value, **usage)


class HybridQuantizer(QuantizerHandle):
    """The rowwise plane as `rowwise_quantizer` makes it, the columnwise one as `columnwise_quantizer` does."""

    def __init__(
        self,
        *,
        rowwise_quantizer: QuantizerHandle,
        columnwise_quantizer: QuantizerHandle,
        columnwise_source: str = "original",
        **usage: bool,
    ) -> None:
        for direction, child in (("rowwise", rowwise_quantizer), ("columnwise", columnwise_quantizer)):
            if not isinstance(child, QuantizerHandle):
                raise TypeError(f"{direction}_quantizer must be a quantizer; got {type(child).__name__}")
        value = Quantizer(rowwise_quantizer.value.rowwise, columnwise_quantizer.value.columnwise, columnwise_source)
        super().__init__(value, **usage)

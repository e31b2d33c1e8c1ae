"""Quantizers under their Transformer Engine names: handles with default usages around a frozen `Quantizer` value."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from duotone import formats
from duotone.dispatch.stages import amax_of
from duotone.errors import RecipeError, UserError
from duotone.formats.scaled_format import check_values
from duotone.recipes.builtin import uniform
from duotone.tensor.context import LOCAL, QuantizeContext, Slot
from duotone.tensor.history import History
from duotone.tensor.paired import paired
from duotone.tensor.plane import Usage
from duotone.tensor.plane_tensor import matrix_shape
from duotone.tensor.quantized import QuantizedTensor
from duotone.tensor.quantizer import Quantizer

ELSEWHERE = {
    "fp4_dtype": "NVFP4 has one element, E2M1: leave it out",
    "with_post_rht_amax": "amaxes are always those of what is encoded: leave it out",
    "with_random_sign_mask": "the signs of the Hadamard transform are fixed: leave it out",
    "with_amax_reduction": "give quantize a QuantizeContext with a shard",
    "amax_reduction_group": "give quantize a QuantizeContext with a shard",
    "internal": "every result is a tensor: leave it out",
    "optimize_for_gemm": "kernels lay scales out themselves: leave it out",
    "device": "results are on the device of what is quantized: leave it out",
}
"""Arguments of Transformer Engine's quantizers that Duotone does not have -> what to do instead."""


def _usage(side: str) -> property:
    return property(
        lambda handle: getattr(handle._usage, side),
        lambda handle, value: handle.set_usage(**{side: value}),
        doc=f"Whether later calls make the {side} plane. It may be set, like with `set_usage`.",
    )


class QuantizerHandle:
    """A `Quantizer` value with mutable default usages.

    Handles are equal if their values are. A handle that is bound to a delayed-scaling slot compares by identity.
    """

    slots: tuple[Slot | None, Slot | None] = (None, None)
    """Delayed scaling of the rowwise and the columnwise plane. The first serves both if the second is None."""

    def __init__(self, value: Quantizer, *, rowwise: bool = True, columnwise: bool = True, **unknown: object) -> None:
        for name in unknown:
            remedy = ELSEWHERE.get(name, "its usages are rowwise and columnwise")
            raise UserError(f"{type(self).__name__} has no {name}; {remedy}")
        self.value = value
        self._usage = Usage(rowwise, columnwise)

    def __setattr__(self, name: str, value: object) -> None:
        """UserError for a name that no handle has. Subclasses of users may add attributes."""
        is_known = name in ("value", "_usage") or hasattr(type(self), name)
        if not is_known and type(self).__module__ == __name__:
            allowed = "allowed are rowwise_usage and columnwise_usage"
            remedy = "write into the tensor in place" if hasattr(self, name) else ELSEWHERE.get(name, allowed)
            raise UserError(f"{name} of {type(self).__name__} cannot be set; {remedy}")
        super().__setattr__(name, value)

    def set_usage(self, *, rowwise: bool | None = None, columnwise: bool | None = None) -> None:
        """Change which planes later calls compute. Existing tensors do not change."""
        row, col = self._usage
        self._usage = Usage(row if rowwise is None else rowwise, col if columnwise is None else columnwise)

    def get_usages(self) -> dict[str, bool]:
        """The planes that `quantize` computes by default: {"rowwise": bool, "columnwise": bool}."""
        return self._usage._asdict()

    rowwise_usage = _usage("rowwise")
    columnwise_usage = _usage("columnwise")

    def quantize(
        self,
        tensor: Tensor,
        *,
        out: QuantizedTensor | None = None,
        dtype: torch.dtype | None = None,
        ctx: QuantizeContext = LOCAL,
        seed: Tensor | None = None,
    ) -> QuantizedTensor:
        """(*lead, K) -> a quantized tensor. With `out`, rewrite and return it. `dtype` is ignored."""
        return self.value.quantize(tensor, out=out, usage=self._usage, ctx=self._context(ctx, seed))

    __call__ = quantize

    def multi_quantize(self, tensors: Sequence[Tensor]) -> list[QuantizedTensor]:
        """`quantize` of each, in order."""
        return [self.quantize(tensor) for tensor in tensors]

    def update_quantized(
        self,
        source: Tensor,
        target: QuantizedTensor,
        *,
        noop_flag: Tensor | None = None,
        ctx: QuantizeContext = LOCAL,
        seed: Tensor | None = None,
    ) -> QuantizedTensor:
        """Rewrite the planes of `target` that the usages name. If `noop_flag` is not 0, no byte changes."""
        ctx = self._context(ctx, seed)
        return self.value.quantize(source, out=target, usage=self._usage, noop_flag=noop_flag, ctx=ctx)

    def make_empty(self, shape: tuple[int, ...], **kwargs: Any) -> QuantizedTensor:
        """A quantized tensor of this shape with uninitialised buffers. Keywords are those of `Quantizer.make_empty`."""
        return self.value.make_empty(tuple(shape), usage=self._usage, **kwargs)

    def calibrate(self, tensor: Tensor) -> None:
        """Record the amax if a delayed-scaling slot is bound. Encodes nothing."""
        for slot in self.slots:
            if slot is not None:
                slot.scale_for(tensor.detach().reshape(matrix_shape(tensor.shape)))

    def is_quantizable(self, tensor: Tensor) -> bool:
        """Whether a shard of this shape ends on block boundaries, so that it may be quantized before a gather."""
        shape = matrix_shape(tensor.shape)
        sides = ((self.value.rowwise, shape), (self.value.columnwise, shape[::-1]))
        return all(f is None or not any(n % a for n, a in zip(s, f.alignment, strict=True)) for f, s in sides)

    def is_requantization_safe(self) -> bool:
        """Whether quantizing the same tensor twice gives the same bits."""
        return self.value.with_usage(*self._usage).is_requantization_safe and (
            self._usage.rowwise or self.value.columnwise_source == "original" or self.value.is_requantization_safe
        )

    def copy(self) -> "QuantizerHandle":
        """Another handle of the same value, usages and slot."""
        return copy.copy(self)

    def _context(self, ctx: QuantizeContext, seed: Tensor | None) -> QuantizeContext:
        slots = self.slots if self._is_bound else ctx.slots
        return replace(ctx, slots=slots, seed=ctx.seed if seed is None else seed)

    @property
    def _is_bound(self) -> bool:
        return self.slots != (None, None)

    def __eq__(self, other: object) -> bool:
        if self._is_bound or not isinstance(other, QuantizerHandle) or other._is_bound:
            return self is other
        return self.value == other.value

    def __hash__(self) -> int:
        return id(self) if self._is_bound else hash(self.value)

    def __repr__(self) -> str:
        row, col = self.value.rowwise, self.value.columnwise
        return f"{type(self).__name__}(rowwise={row and row.name}, columnwise={col and col.name})"


Fp8Dtype = str | torch.dtype
FP8_DTYPES = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}


def fp8_element(fp8_dtype: Fp8Dtype) -> str:
    """ "e4m3" or "e5m2", from either or from its torch dtype. RecipeError for anything else."""
    element = FP8_DTYPES.get(fp8_dtype, fp8_dtype)  # type: ignore[call-overload]
    if element not in FP8_DTYPES.values():
        allowed = "'e4m3', 'e5m2', torch.float8_e4m3fn and torch.float8_e5m2"
        raise RecipeError(f"fp8_dtype {fp8_dtype!r} is unknown; allowed are {allowed}")
    return element


class IdentityQuantizer(QuantizerHandle):
    """High precision in both directions."""

    def __init__(self, **usage: bool) -> None:
        super().__init__(Quantizer(), **usage)


class Float8Quantizer(QuantizerHandle):
    """FP8 under a delayed scale. `scale` and `amax` are fp32 with one element each, shared and never copied.

    `quantize` multiplies by `scale` and raises `amax` to the largest magnitude of its input.
    """

    scale: Tensor
    amax: Tensor

    def __init__(self, scale: Tensor, amax: Tensor, fp8_dtype: Fp8Dtype = "e4m3", **usage: bool) -> None:
        for name, value in (("scale", scale), ("amax", amax)):
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
                raise UserError(f"Float8Quantizer takes its {name} as a tensor with one element; got {got}")
        check_values("Float8Quantizer", scale, amax)
        fmt = formats.get(f"fp8_{fp8_element(fp8_dtype)}_delayed")
        super().__init__(Quantizer(fmt, fmt, history=History()), **usage)
        vars(self).update(scale=scale, amax=amax)
        self.slots = (TensorSlot(scale, amax), None)


class TensorSlot(Slot):
    """A slot over two tensors of the user."""

    def __init__(self, scale: Tensor, amax: Tensor) -> None:
        self.scale, self.amax = scale, amax

    def scale_for(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.amax.copy_(torch.maximum(self.amax, amax_of(x).reshape(self.amax.shape)))
        return self.scale.reshape(1).clone()


class Float8CurrentScalingQuantizer(QuantizerHandle):
    """FP8 with one scale per tensor, from its amax. An amax counts as at least `amax_epsilon`."""

    def __init__(
        self,
        fp8_dtype: Fp8Dtype = "e4m3",
        *,
        force_pow_2_scales: bool = False,
        amax_epsilon: float = 0.0,
        **usage: bool,
    ) -> None:
        stem = f"fp8_{fp8_element(fp8_dtype)}_tensor" + "_pow2" * force_pow_2_scales
        super().__init__(uniform(formats.with_floor(stem, amax_epsilon)), **usage)


class Float8BlockQuantizer(QuantizerHandle):
    """FP8 with a scale per 1x128 (`block_scaling_dim` 1) or 128x128 (2) block."""

    def __init__(
        self,
        fp8_dtype: Fp8Dtype = "e4m3",
        *,
        block_scaling_dim: int = 2,
        force_pow_2_scales: bool = True,
        amax_epsilon: float = 0.0,
        **usage: bool,
    ) -> None:
        if block_scaling_dim not in (1, 2):
            raise UserError(f"block_scaling_dim is 1 (1x128) or 2 (128x128); got {block_scaling_dim}")
        block = {1: "1x128", 2: "128x128"}[block_scaling_dim]
        stem = f"fp8_{fp8_element(fp8_dtype)}_{block}" + "_fp32" * (not force_pow_2_scales)
        super().__init__(uniform(formats.with_floor(stem, amax_epsilon)), **usage)


class MXFP8Quantizer(QuantizerHandle):
    """MXFP8: E8M0 scales of 32 elements, or of 32x32 with `with_2d_quantization`."""

    def __init__(self, fp8_dtype: Fp8Dtype = "e4m3", *, with_2d_quantization: bool = False, **usage: bool) -> None:
        super().__init__(uniform(f"mxfp8_{fp8_element(fp8_dtype)}" + "_32x32" * with_2d_quantization), **usage)


class NVFP4Quantizer(QuantizerHandle):
    """NVFP4. The Hadamard transform applies to the columnwise plane only."""

    def __init__(
        self,
        *,
        with_rht: bool = False,
        with_2d_quantization: bool = False,
        stochastic_rounding: bool = False,
        row_scaled_nvfp4: bool = False,
        nvfp4_use_4over6: bool = False,
        nvfp4_e4m3_max: int = 448,
        nvfp4_4over6_err_mode: str = "MAE",
        **usage: bool,
    ) -> None:
        if nvfp4_e4m3_max not in (448, 256) or nvfp4_4over6_err_mode not in ("MAE", "MSE"):
            got = f"{nvfp4_e4m3_max!r} and {nvfp4_4over6_err_mode!r}"
            raise UserError(f"nvfp4_e4m3_max is 448 or 256 and nvfp4_4over6_err_mode MAE or MSE; got {got}")
        if nvfp4_use_4over6 and (with_rht or stochastic_rounding):
            raise UserError("nvfp4_use_4over6 was given with with_rht or stochastic_rounding; choose one of them")
        if row_scaled_nvfp4 and (with_rht or with_2d_quantization or stochastic_rounding):
            raise UserError(
                "row_scaled_nvfp4 allows no with_rht, with_2d_quantization or stochastic_rounding; omit them"
            )
        if row_scaled_nvfp4 and not usage.get("rowwise", True):
            raise UserError("row_scaled_nvfp4 was given with rowwise=False; its scales are those of the rows: keep it")
        stem = "nvfp4" + "_16x16" * with_2d_quantization + "_row" * row_scaled_nvfp4
        if nvfp4_use_4over6:
            stem += "_4over6" + "_448" * (nvfp4_e4m3_max == 448) + "_mse" * (nvfp4_4over6_err_mode == "MSE")
        rounding = "_sr" * stochastic_rounding
        value = Quantizer(formats.get(stem + rounding), formats.get(stem + "_rht" * with_rht + rounding))
        super().__init__(value, **usage)


class HybridQuantizer(QuantizerHandle):
    """The rowwise plane of `rowwise_quantizer` and the columnwise plane of `columnwise_quantizer`.

    Both are handles or values. Subclasses of `Quantizer` may override `encode`.
    """

    def __init__(
        self,
        *,
        rowwise_quantizer: QuantizerHandle | Quantizer,
        columnwise_quantizer: QuantizerHandle | Quantizer,
        columnwise_source: str = "original",
        **usage: bool,
    ) -> None:
        children = {"rowwise": rowwise_quantizer, "columnwise": columnwise_quantizer}
        for direction, child in children.items():
            if not isinstance(child, QuantizerHandle | Quantizer):
                raise TypeError(
                    f"{direction}_quantizer must be a quantizer; got {type(child).__name__} "
                    "(a request for delayed scaling works only as a top-level slot: use a delayed format in Quantizer)"
                )
        if rowwise_quantizer is columnwise_quantizer and isinstance(rowwise_quantizer, QuantizerHandle):
            raise UserError("rowwise_quantizer and columnwise_quantizer are the same object; make two quantizers")
        row, col = (child.value if isinstance(child, QuantizerHandle) else child for child in children.values())
        super().__init__(paired(row, col, columnwise_source), **usage)
        of_row, of_col = (getattr(child, "slots", (None, None)) for child in children.values())
        self.slots = (of_row[0], of_col[1] or of_col[0])

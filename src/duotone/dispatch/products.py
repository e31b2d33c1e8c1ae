"""Products of decoded operands: torch's GEMMs in bf16 and fp32, their epilogues and their rules.

An emulated rule is exact except for the order of the fp32 sum, unless the rule says something else.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.casts import DTYPES, PLAIN_TYPES, decoded, has_kernels, is_predicted
from duotone.dispatch.rule import GemmProblem, GemmRule, Operand
from duotone.dispatch.stages import stages_for
from duotone.dispatch.target import decodes_in_kernels
from duotone.formats import Epilogue, Factors
from duotone.formats.geometry import crop
from duotone.graph_ops import define_op


def factors(plane: Operand) -> Factors:
    """An operand as values that are exact in bf16 and a scale that follows the product."""
    codes = plane.parts["codes"]
    scales = plane.format.epilogue is Epilogue.NONE
    values = decoded(plane.format, plane.parts, torch.bfloat16, scales) if codes.is_cuda else None
    return plane.format.factors(plane.parts, stages_for(codes), values)


def scaled(y: Tensor, a: Factors, b: Factors) -> Tensor:
    """Apply epilogue scales to an fp32 product: one fl(fl(a b) constant) if both are per tensor, else rows after it.

    Two scales that vary follow `ordered`, so a huge one and a tiny one give the finite value that they stand for.
    """
    if a.epilogue_scale is b.epilogue_scale is None:
        return y
    constant = 1.0 / (a.divisor * b.divisor)
    scales = [scale for scale in (a.epilogue_scale, b.epilogue_scale) if scale is not None]
    if all(scale.numel() == 1 for scale in scales):
        alpha = scales[0].reshape(()) if len(scales) == 1 else scales[0].reshape(()) * scales[1].reshape(())
        return y * (alpha * constant if constant != 1.0 else alpha)
    if constant != 1.0:
        y = y * torch.full((), constant, dtype=torch.float32, device=y.device)
    rows = None if a.epilogue_scale is None else a.epilogue_scale.reshape(-1, 1)
    cols = None if b.epilogue_scale is None else b.epilogue_scale.reshape(1, -1)
    if rows is not None and cols is not None:
        if 1 in (rows.numel(), cols.numel()):
            return y * (rows * cols)
        y, cols = ordered(y, rows, cols)
        return y * cols
    y = y if rows is None else y * rows
    return y if cols is None else y * cols


def ordered(y: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Return fl(y first) and `second`, the factor that is left. Where that product is infinite, the factors change
    places.

    `y` is fp32 (M, N), the factors broadcast to it. The factors never meet: 0 in `y` stays 0 beside two huge ones.
    """
    product = y * first
    overflows = product.isinf()
    return torch.where(overflows, y * second, product), torch.where(overflows, first, second)


def finish(y: Tensor, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """fp32 (M, N), plus `bias` (N,) in fp32, rounded once."""
    y = y if bias is None else y + bias.to(torch.float32)
    return y if y.dtype is out_dtype else y.to(out_dtype)  # torch 2.11 loses gradients behind a cast that does nothing


def _mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    # No setting of the process asks for bf16 instructions here: other threads would multiply under it too.
    return torch.mm(a.to(torch.float32), b.to(torch.float32).t())


def _empty_fp32(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=torch.float32)


define_op("mm_fp32(Tensor a, Tensor b) -> Tensor", _mm_fp32, _empty_fp32)


def mm_fp32(a: Tensor, b: Tensor) -> Tensor:
    """bf16 or fp16 (M, K) and (N, K) -> fp32 (M, N) = a b^T, accumulated in fp32."""
    return torch.ops.duotone.mm_fp32(a, b)


def mm_into(a: Tensor, b: Tensor, out: Tensor, adds: bool) -> bool:
    """a b^T of (M, K) and (N, K), written over `out` (M, N) or, `adds`, added to it: a sum in fp32, rounded once.

    Returns False, and writes nothing, if torch has no such product.
    """
    same = out.device == a.device and type(out) in PLAIN_TYPES and out.is_contiguous()
    if not (a.is_cuda and same and out.dtype in (a.dtype, torch.float32)):
        return False
    if out.dtype is a.dtype:
        torch.addmm(out, a, b.t(), beta=int(adds), out=out)
    else:
        torch.addmm(out, a, b.t(), out.dtype, beta=int(adds), out=out)
    return True


class HighPrecision(GemmRule):
    """Both operands in high precision: torch's own product."""

    name = "torch"

    def reject(self, problem: GemmProblem) -> str:
        return "" if problem.epilogues == {Epilogue.HIGH_PRECISION} else "an operand is quantized"

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return _linear(a.parts["codes"], b.parts["codes"], out_dtype, bias)

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        if not mm_into(a.parts["codes"], b.parts["codes"], out, adds):
            super().run_into(a, b, out, adds)


class ExactBf16(GemmRule):
    """A plain bf16 GEMM: both decoded operands are exact in bf16, and nothing follows the product."""

    name = "decode, bf16 product"
    native = False

    def reject(self, problem: GemmProblem) -> str:
        if problem.epilogues != {Epilogue.NONE}:
            return "a scale has to follow the product"
        if problem.dtype != torch.bfloat16:
            return f"the result is {problem.dtype}, not bf16"
        return _other_transform(problem)

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        if bias is not None or out_dtype is not torch.bfloat16:
            return FP32_EPILOGUE.run(a, b, out_dtype, bias)
        left, right = _same_length(factors(a).values, factors(b).values)
        return torch.mm(left, right.t())

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        if not mm_into(*_same_length(factors(a).values, factors(b).values), out, adds):
            super().run_into(a, b, out, adds)


class Fp32Epilogue(GemmRule):
    """Operands are exact in bf16. The product stays in fp32; scales per tensor or row, bias and one rounding follow."""

    name = "decode, fp32 product and epilogue"
    native = False

    def reject(self, problem: GemmProblem) -> str:
        if not problem.epilogues <= {Epilogue.NONE, Epilogue.TENSOR, Epilogue.ROW}:
            return "a scale varies along the contraction, or an operand is in high precision"
        return _other_transform(problem)

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        left, right = factors(a), factors(b)
        y = mm_fp32(*_same_length(left.values, right.values))
        if y.is_cuda and is_predicted(y) and decodes_in_kernels(y.get_device()):
            return torch.empty_like(y, dtype=out_dtype)
        if y.is_cuda and has_kernels(y) and out_dtype in DTYPES:
            return self._in_one_kernel(y, left, right, bias, torch.empty_like(y, dtype=out_dtype), False)
        return finish(scaled(y, left, right), out_dtype, bias)

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        if has_kernels(out) and out.is_contiguous() and out.device == a.parts["codes"].device:
            left, right = factors(a), factors(b)
            self._in_one_kernel(mm_fp32(*_same_length(left.values, right.values)), left, right, None, out, adds)
        else:
            super().run_into(a, b, out, adds)

    def _in_one_kernel(
        self, y: Tensor, left: Factors, right: Factors, bias: Tensor | None, out: Tensor, adds: bool
    ) -> Tensor:
        from duotone.kernels.epilogue import finish as in_one_kernel

        return in_one_kernel(
            y, left.epilogue_scale, right.epilogue_scale, 1.0 / (left.divisor * right.divisor), bias, out, adds
        )


class BlockPromotion(GemmRule):
    """fp32 scales along the contraction: a raw product per block, promoted into an fp32 sum, as Hopper's kernels do."""

    name = "decode, fp32 product per block"
    native = False

    def reject(self, problem: GemmProblem) -> str:
        if Epilogue.BLOCK not in problem.epilogues or Epilogue.HIGH_PRECISION in problem.epilogues:
            return "no fp32 scale varies along the contraction"
        widths = {f.block.cols for f in (problem.a, problem.b) if f.epilogue is Epilogue.BLOCK}
        return "the blocks of the operands differ in width" if len(widths) > 1 else _other_transform(problem)

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        left, right = factors(a), factors(b)
        width = (a if a.format.epilogue is Epilogue.BLOCK else b).format.block.cols
        values_a, values_b = _same_length(left.values, right.values)
        total = values_a.new_zeros((a.shape[0], b.shape[0]), dtype=torch.float32)
        for j in range(-(-a.shape[1] // width)):
            cut = slice(j * width, (j + 1) * width)
            scales = [_block_scales(a, left, j, (-1, 1)), _block_scales(b, right, j, (1, -1))]
            if a.format.block.rows > b.format.block.rows:
                scales.reverse()  # the scale that varies faster comes first
            total = _promote(total, mm_fp32(values_a[:, cut], values_b[:, cut]), scales)
        rest_a, rest_b = _without_blocks(a, left), _without_blocks(b, right)
        return finish(scaled(total, rest_a, rest_b), out_dtype, bias)


class DecodeToHighPrecision(GemmRule):
    """One operand in high precision: the other is decoded to its dtype, a product of full operands. Rounds the decoded
    operand to that dtype, which is exact for formats without an fp32 scale."""

    name = "decode, high-precision product"
    native = False
    note = "the quantized operand is decoded to the other's dtype"

    def reject(self, problem: GemmProblem) -> str:
        return "" if Epilogue.HIGH_PRECISION in problem.epilogues else "no operand is in high precision"

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        dtype = (a if a.format.epilogue is Epilogue.HIGH_PRECISION else b).parts["codes"].dtype
        return _linear(a.dequantize(dtype), b.dequantize(dtype), out_dtype, bias)


class Unrotate(GemmRule):
    """Different transforms or block widths: both operands are decoded in full, unrotated, and multiplied in fp32."""

    name = "decode and unrotate, fp32 product"
    native = False
    note = "the operands' transforms or block widths differ, so both are decoded to fp32 first"

    def reject(self, problem: GemmProblem) -> str:
        return ""

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        return finish(torch.mm(a.dequantize(torch.float32), b.dequantize(torch.float32).t()), out_dtype, bias)


EXACT_BF16, FP32_EPILOGUE = ExactBf16(), Fp32Epilogue()


def _linear(
    a: Tensor, b: Tensor, out_dtype: torch.dtype, bias: Tensor | None, product: Callable[..., Tensor] = F.linear
) -> Tensor:
    """torch's own product. For narrow operands and another dtype, such as `main_grad`'s, one that stays in fp32."""
    if bias is None and out_dtype is not a.dtype and a.dtype.itemsize == 2:
        y = mm_fp32(a, b)
    else:
        y = product(a, b, bias)
    return y if y.dtype is out_dtype else y.to(out_dtype)


def _promote(total: Tensor, product: Tensor, scales: list[Tensor | None]) -> Tensor:
    """fma(fl(product * s1), s2, total), s1 and s2 `ordered`; float64 holds the product of two fp32 exactly."""
    first, *second = [scale for scale in scales if scale is not None]
    product, last = ordered(product, first, second[0]) if second else (product, first)
    return torch.addcmul(total.double(), product.double(), last.double()).float()


def _block_scales(plane: Operand, split: Factors, j: int, shape: tuple[int, int]) -> Tensor | None:
    """The scales of block column j, one for each row of the operand; None if it has no block scales."""
    if plane.format.epilogue is not Epilogue.BLOCK or split.epilogue_scale is None:
        return None
    scales = split.epilogue_scale[:, j : j + 1].repeat_interleave(plane.format.block.rows, 0)
    return crop(scales, plane.shape[0], 1).view(shape)


def _without_blocks(plane: Operand, split: Factors) -> Factors:
    scale = None if plane.format.epilogue is Epilogue.BLOCK else split.epilogue_scale
    return Factors(split.values, scale, split.divisor)


def _same_length(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Pad the shorter contraction with zeros: packed and Hadamard formats keep a padded length."""
    missing = a.shape[1] - b.shape[1]
    if missing:
        a, b = F.pad(a, (0, max(0, -missing))), F.pad(b, (0, max(0, missing)))
    return a, b


def _other_transform(problem: GemmProblem) -> str:
    return "" if problem.a.transform == problem.b.transform else "the operands' transforms differ"

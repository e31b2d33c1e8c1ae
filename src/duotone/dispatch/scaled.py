"""Scaled products: cuBLAS multiplies FP8 codes with scales per tensor, per row or per block of 128."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch import segment_products as products
from duotone.dispatch.casts import contiguous_rows
from duotone.dispatch.rule import GemmProblem, JoinedOperand, JoinedWeights, Operand, Product
from duotone.dispatch.segment_products import STEP, cublas_writes, dtype_of_product
from duotone.dispatch.target import BLOCKS_SINCE, HOPPER, scales_rows_to_fp32
from duotone.formats import ROW, TENSOR, Block, Format, ScaleCodec
from duotone.formats.elements import FP8_DTYPES

if TYPE_CHECKING:
    from duotone.kernels.segment_cast import Segments

BLOCK = 128
SQUARE = Block(BLOCK, BLOCK)
QUAD = 4
"""cuBLAS wants the number of 128 x 128 scales along the contraction to be a multiple of this."""
FP8_SINCE = (8, 9)
SINCE = ".".join(map(str, BLOCKS_SINCE))


def _block_mm(
    a: Tensor,
    scale_a: Tensor,
    kind_a: int,
    b: Tensor,
    scale_b: Tensor,
    kind_b: int,
    bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    no_swizzle: list[int] = []
    scales = [scale_a], [kind_a], no_swizzle, [scale_b], [kind_b], no_swizzle
    return torch._scaled_mm_v2(a, b.t(), *scales, bias, dtype, (), False)  # type: ignore[reportPrivateImportUsage]


def _scaling(fmt: Format) -> Block | None:
    """The block of an fp32 scale. None for other scales and for a transform."""
    return fmt.block if fmt.scale_codec.family == ScaleCodec.FP32.family and not fmt.transform else None


def _refusal(problem: GemmProblem) -> str:
    """Why cuBLAS cannot multiply the codes with any scales, or ""."""
    if problem.target.device != "cuda":
        return "it runs on CUDA"
    if problem.target.arch < FP8_SINCE:
        return f"it needs compute capability 8.9, and this device has {'.'.join(map(str, problem.target.arch))}"
    if not FP8_DTYPES.issuperset(problem.elements) or problem.elements == (torch.float8_e5m2, torch.float8_e5m2):
        return "it takes E4M3 with E4M3 or E5M2"
    return ""


@dataclass(frozen=True)
class ScaledProduct(products.GroupedRule):
    """torch._scaled_mm with a scale per tensor or per row of each operand.

    `fast` accumulates with fewer bits and truncates: same-sign sums shrink, by 7 % over K = 4096.
    """

    name: str
    fast: bool

    def reject(self, problem: GemmProblem) -> str:
        if problem.fast != self.fast:
            return "the recipe asks for the other accumulation"
        scalings = {_scaling(problem.a), _scaling(problem.b)}
        if not scalings <= {TENSOR, ROW}:
            return "it takes one fp32 scale per tensor or per row"
        if refusal := _refusal(problem):
            return refusal
        dtype = dtype_of_product(problem.dtype, ROW in scalings, problem.target.scales_rows_to_fp32)
        if dtype is torch.bfloat16 and problem.dtype is not dtype:
            return f"with scales per row it gives bf16 on this device, not {problem.dtype}"
        return ""

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        rows, cols = a.shape[0], b.shape[0]
        if 0 in (rows, cols, a.shape[1]):
            return _empty_product(a, b, out_dtype, bias)
        left = _codes(a, 0, STEP)
        right = _codes(b, -cols % STEP, STEP)
        scale_a, scale_b, per_row = self._scales(a, b, rows, right.shape[0])
        fused = bias is not None and _takes_bias(bias, cols, out_dtype)
        dtype = out_dtype if bias is None or fused else torch.float32
        if dtype is not torch.bfloat16:
            dtype = dtype_of_product(dtype, per_row, scales_rows_to_fp32(left.get_device()))
        # Autograd does nothing here, but would take host time.
        with torch._C._AutoDispatchBelowAutograd():
            y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
                left,
                right.t(),
                scale_a=scale_a,
                scale_b=scale_b.t() if per_row else scale_b,
                bias=bias if fused else None,
                out_dtype=dtype,
                use_fast_accum=self.fast,
            )
        if y.dtype is out_dtype and right.shape[0] == cols and (bias is None or fused):
            return y
        return _cut(y, cols, out_dtype, None if fused else bias)

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        rows, cols = out.shape
        if cublas_writes(a.parts["codes"], out) and a.shape[1]:
            from duotone.kernels.cublas import Side, multiply

            scale_a, scale_b, per_row = self._scales(a, b, rows, cols)
            kind = ROW if per_row else TENSOR
            left, right = Side(_codes(a, 0, STEP), scale_a, kind), Side(_codes(b, 0, STEP), scale_b, kind)
            if multiply(left, right, out, self.fast, adds):
                return
        super().run_into(a, b, out, adds)

    def refuse_segments(self, problem: GemmProblem, shape: tuple[int, ...]) -> str:
        if any(n % STEP or n == 0 for n in shape):
            return f"it takes weights whose sizes are multiples of {STEP}"
        same = problem.a.block.rows == problem.b.block.rows
        return "" if same else "it takes operands with a scale per tensor both, or per row both"

    def run_segments(
        self,
        a: JoinedOperand,
        b: JoinedWeights,
        segments: "Segments",
        out_dtype: torch.dtype,
        biases: Sequence[Tensor | None],
    ) -> Tensor:
        if segments.grouped:
            return super().run_segments(a, b, segments, out_dtype, biases)
        return products.rows_of_each(a, b, segments, self.fast, out_dtype, biases)

    def segment_products(self, a: JoinedOperand, b: JoinedOperand, segments: "Segments") -> Sequence[Product]:
        return products.columns_of_each(a, b, segments, self.fast)

    def _scales(self, a: Operand, b: Operand, rows: int, cols: int) -> tuple[Tensor, Tensor, bool]:
        """Decode scales, both of one element or, True, (rows, 1) and (cols, 1)."""
        scale_a, scale_b = a.parts["scale"], b.parts["scale"]
        if a.format.block.rows == b.format.block.rows == 0:
            return scale_a, scale_b, False
        return _per_row(scale_a, rows), _per_row(scale_b, cols), True


class BlockScaledProduct(products.GroupedRule):
    """torch's product of operands with a scale per 1 x 128 or, one of them, per 128 x 128 block; promoted to fp32 sums
    after each block, so never fast."""

    name = "cuBLAS FP8 block product"
    scalings = frozenset({Block(1, BLOCK), SQUARE})
    separates_segments = False

    def reject(self, problem: GemmProblem) -> str:
        scalings = {_scaling(problem.a), _scaling(problem.b)}
        if not scalings <= self.scalings or scalings == {SQUARE}:
            return "it takes fp32 scales per 1x128 block, one of them per 128x128"
        if refusal := _refusal(problem):
            return refusal
        hopper = problem.target.arch[0] == HOPPER[0] and problem.target.has_new_cublas
        return "" if hopper else f"cuBLAS has it for compute capability 9.0 alone, since CUDA {SINCE}"

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        cols = b.shape[0]
        if 0 in (a.shape[0], cols, a.shape[1]):
            return _empty_product(a, b, out_dtype, bias)
        kinds = _block_kind(a.format), _block_kind(b.format)
        more = -a.shape[0] % STEP if a.format.block.rows == 1 else 0
        left = _codes(a, more, BLOCK)
        right = _codes(b, -cols % STEP, BLOCK)
        scales = _block_scales(a, left.shape[0]), _block_scales(b, right.shape[0])
        fused = bias is not None and _takes_bias(bias, cols, out_dtype)
        direct = out_dtype is torch.bfloat16 and (bias is None or fused)
        dtype = out_dtype if direct else torch.float32
        y = _block_mm(left, scales[0], kinds[0], right, scales[1], kinds[1], bias if fused else None, dtype)
        return _cut(y[: a.shape[0]] if more else y, cols, out_dtype, None if fused else bias)

    def refuse_segments(self, problem: GemmProblem, shape: tuple[int, ...]) -> str:
        if any(n % BLOCK or n == 0 for n in shape):
            return f"it takes weights whose sizes are multiples of {BLOCK}"
        return "" if problem.a.block.rows == 1 else "it takes 1x128 blocks of the first operand"

    def run_into(self, a: Operand, b: Operand, out: Tensor, adds: bool) -> None:
        rows, cols = out.shape
        if cublas_writes(a.parts["codes"], out) and a.shape[1] and not rows % STEP:
            from duotone.kernels.cublas import Side, multiply

            left, right = (
                Side(_codes(one, 0, BLOCK), _block_scales(one, n), one.format.block)
                for one, n in ((a, rows), (b, cols))
            )
            if multiply(left, right, out, False, adds):
                return
        super().run_into(a, b, out, adds)


def _takes_bias(bias: Tensor, cols: int, out_dtype: torch.dtype) -> bool:
    """Whether the product adds the bias. It does so before it rounds."""
    return out_dtype is bias.dtype is torch.bfloat16 and not cols % STEP


def _cut(y: Tensor, cols: int, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    """The columns without padding, with the bias added in fp32 and one rounding."""
    if y.shape[1] != cols:
        y = y[:, :cols]
    if bias is not None:
        y = y + bias.to(torch.float32)
    return y if y.dtype is out_dtype else y.to(out_dtype)


def _empty_product(a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None) -> Tensor:
    y = torch.zeros((a.shape[0], b.shape[0]), dtype=torch.float32, device=a.parts["codes"].device)
    return _cut(y, b.shape[0], out_dtype, bias)


def _codes(plane: Operand, more_rows: int, step: int) -> Tensor:
    """The codes with contiguous rows, padded with zeros to sizes that cuBLAS takes."""
    codes, dtype = plane.parts["codes"], plane.format.code_dtype
    assert dtype is not None
    if codes.dtype is dtype and not (more_rows or plane.shape[1] % step) and codes.is_contiguous():
        return codes
    more_cols = -codes.shape[1] % step
    if more_cols or more_rows:
        codes = F.pad(codes.view(torch.uint8), (0, more_cols, 0, more_rows))
    if not codes.is_contiguous():
        codes = contiguous_rows(codes.view(torch.uint8))
    return codes.view(dtype)


def _per_row(scale: Tensor, rows: int) -> Tensor:
    """fp32 (rows, 1) decode scales. Those of padded rows are 1."""
    if scale.shape == (rows, 1):
        return scale.contiguous()
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(rows, 1).contiguous()
    scale = scale.reshape(-1, 1)
    return F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0) if rows > scale.shape[0] else scale.contiguous()


def _block_kind(fmt: Format) -> int:
    """torch.nn.functional.ScalingType of 1x128 and of 128x128 blocks."""
    return 4 if fmt.block.rows == 1 else 5


def _block_scales(plane: Operand, rows: int) -> Tensor:
    """Decode scales as cuBLAS reads them: (M, K/128) strides (1, M), or (K/128 in fours, M/128) strides (1, that)."""
    scale = plane.parts["scale"]
    if plane.format.block.rows == 1:
        if rows > scale.shape[0]:
            scale = F.pad(scale, (0, 0, 0, rows - scale.shape[0]), value=1.0)
        return scale if scale.stride() == (1, rows) else scale.t().contiguous().t()
    missing = -scale.shape[1] % QUAD
    return (F.pad(scale, (0, missing), value=1.0) if missing else scale.contiguous()).t()

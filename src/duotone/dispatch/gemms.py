"""GEMM rules: the one product a b^T, chosen by table, rejected with reasons.

Both operands are planes, contraction last. `RULES` are asked in order; the first without a reason against it runs.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from duotone.dispatch.products import (
    EXACT_BF16,
    FP32_EPILOGUE,
    BlockPromotion,
    DecodeToHighPrecision,
    HighPrecision,
    Unrotate,
    finish,
    scaled,
)
from duotone.dispatch.rule import GemmProblem, GemmRule, Operand
from duotone.dispatch.scaled import BlockScaledProduct, ScaledProduct
from duotone.errors import UserError
from duotone.formats import Factors, ScaleCodec
from duotone.formats.elements import FP8_DTYPES

BLACKWELL = (10, 0)
UNPROVEN = "unproven: no one has run this product on such a device yet"
TILE_ROWS, TILE_COLS = 128, 4
"""Block scales travel in tiles of 128 rows x 4 block columns."""


def swizzled(scale: Tensor) -> Tensor:
    """Scales (M, blocks) -> the flat order of tensor cores, padded with zeros to whole tiles.

    Tiles follow each other along a row; within one, scale (r, c) is byte 16 (r mod 32) + 4 (r div 32) + c (cuBLAS,
    "1D block scaling factors layout").
    """
    rows, cols = scale.shape
    scale = F.pad(scale, (0, -cols % TILE_COLS, 0, -rows % TILE_ROWS))
    down, across = scale.shape[0] // TILE_ROWS, scale.shape[1] // TILE_COLS
    tiles = scale.reshape(down, 4, 32, across, TILE_COLS)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


@dataclass(frozen=True)
class NativeBlocks(GemmRule):
    """A block-scaled product of capability 10 and above: codec of its scales, elements in a block, torch's dtypes.

    It follows the documented layouts of torch and cuBLAS. Nobody has run it on such a device yet.
    """

    name: str
    codec: ScaleCodec
    width: int
    per_byte: int
    codes: torch.dtype | None
    scales: torch.dtype
    note = UNPROVEN

    def reject(self, problem: GemmProblem) -> str:
        if problem.target.arch < BLACKWELL:
            return "it needs compute capability 10.0 or above"
        for fmt in (problem.a, problem.b):
            if fmt.scale_codec != self.codec or fmt.block.cols != self.width:
                return f"it takes {self.codec.value} scales over {self.width} elements"
            if self.codes is None and fmt.code_dtype not in FP8_DTYPES:
                return "it takes FP8 codes"
        if problem.a.transform != problem.b.transform:
            return "the operands' transforms differ"
        e5m2 = torch.float8_e5m2
        return "it takes E5M2 with E4M3 only" if problem.elements == (e5m2, e5m2) else ""

    def run(self, a: Operand, b: Operand, out_dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
        rows, cols = a.shape[0], b.shape[0]
        if 0 in (rows, cols, a.shape[1]):
            y = torch.zeros((rows, cols), dtype=torch.float32, device=a.parts["codes"].device)
            return finish(y, out_dtype, bias)
        left, right = self._operand(a), self._operand(b)
        y = torch._scaled_mm(  # type: ignore[reportPrivateImportUsage]
            left[0], right[0].t(), scale_a=left[1], scale_b=right[1], out_dtype=torch.float32
        )[:rows, :cols]
        return finish(scaled(y, _epilogue(a), _epilogue(b)), out_dtype, bias)

    def _operand(self, plane: Operand) -> tuple[Tensor, Tensor]:
        """Codes and swizzled scales, padded to whole tiles with codes of zero."""
        codes, scale = plane.parts["codes"], plane.parts["scale"]
        rows = plane.shape[0]
        more_cols = -codes.shape[1] % (TILE_COLS * self.width // self.per_byte)
        codes = F.pad(codes, (0, more_cols, 0, -rows % TILE_ROWS)).contiguous()
        if scale.shape[0] != rows:
            scale = scale.repeat_interleave(plane.format.block.rows, 0)[:rows]
        dtype = self.codes or plane.format.code_dtype
        assert dtype is not None
        return codes.view(dtype), swizzled(scale).view(self.scales)


def _epilogue(plane: Operand) -> Factors:
    """The scales that follow the product. The codes stand in the place of the values, which nothing reads."""
    return plane.format.factors(plane.parts, values=plane.parts["codes"])


MXFP8 = NativeBlocks("MXFP8 product", ScaleCodec.E8M0, 32, 1, None, torch.float8_e8m0fnu)
NVFP4 = NativeBlocks("NVFP4 product", ScaleCodec.TWO_LEVEL, 16, 2, torch.float4_e2m1fn_x2, torch.float8_e4m3fn)


RULES: list[GemmRule] = [
    HighPrecision(),
    ScaledProduct("cuBLAS FP8 product", fast=False),
    ScaledProduct("cuBLAS FP8 product, fast accumulation", fast=True),
    BlockScaledProduct(),
    MXFP8,
    NVFP4,
    EXACT_BF16,
    FP32_EPILOGUE,
    BlockPromotion(),
    DecodeToHighPrecision(),
    Unrotate(),
]


def choose(problem: GemmProblem) -> tuple[GemmRule, str]:
    """The rule that runs, and one line on why: what is unusual about it, or why nothing native ran."""
    for rule in RULES:
        if not rule.reject(problem):
            if rule.native:
                return rule, rule.note
            where = f"no native rule for {problem.a.name} x {problem.b.name} on {problem.target}"
            return rule, f"{where}; {rule.note}" if rule.note else where
    raise UserError(f"no GEMM rule multiplies {problem.a.name} with {problem.b.name} on {problem.target}")

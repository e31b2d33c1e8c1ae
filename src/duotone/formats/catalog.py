"""The formats that ship, each one a row."""

from duotone.formats.elements import E2M1, E2M3, E3M2, E4M3, E5M2, Element
from duotone.formats.geometry import ROW, TENSOR, Block
from duotone.formats.identity import IDENTITY
from duotone.formats.registry import register
from duotone.formats.scale_rule import ErrorNorm
from duotone.formats.scaled_format import ScaledFormat
from duotone.formats.scales import E8M0Scale, FourOverSixScale, Fp32Scale, TwoLevelScale


def _fp8(element: Element) -> None:
    stem = f"fp8_{element.name}"
    for block in (TENSOR, ROW):
        register(ScaledFormat(f"{stem}_{block.name}", element, block, Fp32Scale()))
        register(ScaledFormat(f"{stem}_{block.name}_pow2", element, block, Fp32Scale(power_of_two=True)))
    register(ScaledFormat(f"{stem}_delayed", element, TENSOR, Fp32Scale(), is_delayed=True))
    for block in (Block(1, 128), Block(128, 128)):
        rule = Fp32Scale(power_of_two=True, overflow="input")
        register(ScaledFormat(f"{stem}_{block.name}", element, block, rule))
        register(ScaledFormat(f"{stem}_{block.name}_fp32", element, block, Fp32Scale(overflow="input")))
    register(ScaledFormat(f"{stem}_1x128_e8m0", element, Block(1, 128), E8M0Scale()))


def _mx() -> None:
    for element in (E4M3, E5M2):
        register(ScaledFormat(f"mxfp8_{element.name}", element, Block(1, 32), E8M0Scale()))
        register(ScaledFormat(f"mxfp8_{element.name}_32x32", element, Block(32, 32), E8M0Scale()))
    for element in (E2M3, E3M2):
        register(ScaledFormat(f"mxfp6_{element.name}", element, Block(1, 32), E8M0Scale()))
    register(ScaledFormat("mxfp4", E2M1, Block(1, 32), E8M0Scale()))


def _nvfp4() -> None:
    line, square = Block(1, 16), Block(16, 16)
    for stem, block in (("nvfp4", line), ("nvfp4_16x16", square)):
        for rotation in (False, True):
            for stochastic in (False, True):
                name = stem + "_rht" * rotation + "_sr" * stochastic
                register(ScaledFormat(name, E2M1, block, TwoLevelScale(), rotation, stochastic))
    register(ScaledFormat("nvfp4_row", E2M1, line, TwoLevelScale(per_row=True)))
    for stem, block, per_row in (("nvfp4", line, False), ("nvfp4_16x16", square, False), ("nvfp4_row", line, True)):
        for block_max, mark in ((256.0, ""), (448.0, "_448")):
            for search in ErrorNorm:
                name = f"{stem}_4over6{mark}" + "_mse" * (search is ErrorNorm.MSE)
                rule = FourOverSixScale(block_max, per_row, search)
                register(ScaledFormat(name, E2M1, block, rule))


register(IDENTITY)
_fp8(E4M3)
_fp8(E5M2)
_mx()
_nvfp4()

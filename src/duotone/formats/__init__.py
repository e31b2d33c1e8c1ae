"""What a plane is: element codecs, block geometry, scale rules, and encode and decode in plain torch."""

from duotone.formats import catalog, elements
from duotone.formats.format import Format
from duotone.formats.geometry import ROW, TENSOR, Block, Factors, Parts, PartSpec
from duotone.formats.identity import IDENTITY
from duotone.formats.registry import get, names, register, with_floor
from duotone.formats.scale_rule import Epilogue, ErrorNorm, ScaleCodec
from duotone.formats.scaled_format import ScaledFormat

__all__ = [
    "IDENTITY", "ROW", "TENSOR", "Block", "Epilogue", "ErrorNorm", "Factors", "Format", "PartSpec", "Parts",
    "ScaleCodec", "ScaledFormat", "catalog", "elements", "get", "names", "register", "with_floor",
]  # fmt: skip

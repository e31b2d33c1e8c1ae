"""What a plane is: element codecs, block geometry, scale rules, and encode and decode in plain torch."""

from duotone.formats import catalog, elements
from duotone.formats.format import Format, ScaledFormat
from duotone.formats.identity import IDENTITY
from duotone.formats.parts import Factors, Parts, PartSpec
from duotone.formats.registry import get, names, register, with_floor

__all__ = [
    "IDENTITY", "Factors", "Format", "PartSpec", "Parts", "ScaledFormat", "catalog", "elements", "get", "names",
    "register", "with_floor",
]  # fmt: skip

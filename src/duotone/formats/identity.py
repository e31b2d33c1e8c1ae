"""Identity: high precision as a format, so that no other code has to ask whether a tensor is quantized."""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.formats.elements import PLAIN, Stages
from duotone.formats.format import Format, check_matrix, require_parts
from duotone.formats.geometry import TENSOR, Factors, Parts, PartSpec


@dataclass(frozen=True, repr=False)
class Identity(Format):
    """The plane is the matrix itself, an alias. The columnwise plane is a strided view."""

    name: str = "identity"
    block = TENSOR
    stored = ("identity",)

    def __reduce__(self) -> str:
        return "IDENTITY"

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]:
        """One buffer, in the dtype of the matrix."""
        return {"codes": PartSpec((rows, cols), None, 1, 1)}

    def encode(self, x: Tensor, *, plane: str = "row", **_: object) -> Parts:
        check_matrix(self.name, x, plane)
        return {"codes": x}

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages | None = None) -> Tensor:
        require_parts(self, parts)
        return parts["codes"].to(dtype)

    def ceiling(self, parts: Parts) -> Tensor:
        return torch.full_like(parts["codes"], torch.inf, dtype=torch.float32)

    def factors(self, parts: Parts, stages: Stages = PLAIN, values: Tensor | None = None) -> Factors:
        return Factors(parts["codes"], None, 1.0)

    def derive(self, parts: Parts, cols: int | None = None) -> Parts:
        require_parts(self, parts)
        return {"codes": parts["codes"].t()}

    def describe(self) -> dict[str, object]:
        return {
            "name": self.name,
            "element": "high precision",
            "block": "none",
            "scale": "none",
            "transform": "",
            "rounding": "none",
            "columnwise": "view",
            "bits_per_element": "input",
        }


IDENTITY = Identity()

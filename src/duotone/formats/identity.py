"""Identity: high precision as a format, so that nothing above has to ask whether a tensor is quantized."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from duotone.errors import UserError
from duotone.formats.checks import check_matrix, require_parts
from duotone.formats.geometry import TENSOR, Block
from duotone.formats.parts import Factors, Parts, PartSpec, Shard
from duotone.formats.stages import PLAIN, Stages


@dataclass(frozen=True)
class Identity:
    """The matrix itself, aliased; its columnwise plane is a strided view."""

    name: str = "identity"
    precision = 32
    is_stochastic = False
    is_delayed = False
    largest = float("inf")
    code_dtype = None
    family = "high precision"
    alignment = (1, 1)
    transform = ""
    outer_extent = "high precision"
    spans_rows = False
    scale_codec = scale_search = ""
    is_derivable = True
    stored = ("identity",)

    def __reduce__(self) -> str:
        return "IDENTITY"

    def __deepcopy__(self, memo: Any) -> "Identity":
        return self

    def with_epsilon(self, epsilon: float, name: str) -> "Identity":
        del epsilon, name
        raise UserError("identity has no amax floor; choose a format with fp32 scales")

    @property
    def outer_block(self) -> Block:
        return TENSOR

    def scale_limits(self, dtype: torch.dtype) -> tuple[float, float, float]:
        del dtype
        return float("inf"), 1.0, 0.0

    def parts(self, rows: int, cols: int) -> dict[str, PartSpec]:
        """One buffer, in the dtype of the matrix."""
        return {"codes": PartSpec((rows, cols), None, 1, 1)}

    def encode(
        self,
        x: Tensor,
        *,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
        seed: Tensor | int | None = None,
        plane: str = "row",
        shard: Shard | None = None,
        stages: Stages = PLAIN,
        propagate: bool = False,
    ) -> Parts:
        del scale, amax, seed, shard, stages, propagate
        check_matrix(self.name, x, plane)
        return {"codes": x}

    def decode(self, parts: Parts, dtype: torch.dtype, stages: Stages = PLAIN) -> Tensor:
        del stages
        require_parts(self.name, ("codes",), parts)
        return parts["codes"].to(dtype)

    def rotate(self, x: Tensor) -> Tensor:
        return x

    def ceiling(self, parts: Parts) -> Tensor:
        return torch.full_like(parts["codes"], torch.inf, dtype=torch.float32)

    def unrotate(self, values: Tensor, cols: int) -> Tensor:
        return values[:, :cols]

    def factors(self, parts: Parts, stages: Stages = PLAIN, inner: Tensor | None = None) -> Factors:
        del stages, inner
        return Factors(parts["codes"], None, 1.0)

    def derive(self, parts: Parts, cols: int | None = None) -> Parts:
        del cols
        require_parts(self.name, ("codes",), parts)
        return {"codes": parts["codes"].t()}

    def describe(self) -> dict[str, Any]:
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

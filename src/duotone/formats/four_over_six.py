"""4-over-6: an NVFP4 block may map its amax to 4 instead of 6, whichever loses less (the evenly spaced end of E2M1).

Both candidates are encoded, and the block's error decides; on a tie 6 stays. The error is summed in element order, each
operation rounded by itself, so that every backend agrees.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from duotone.formats.elements import E4M3
from duotone.formats.scale_rule import Blocked, ErrorNorm, Scaled
from duotone.formats.scales import TwoLevelScale
from duotone.formats.stages import divide


@dataclass(frozen=True)
class FourOverSixScale(TwoLevelScale):
    """A block takes the scale of the smaller error `search`, summed over its elements."""

    block_max: float = 256.0
    search: ErrorNorm | None = ErrorNorm.MAE

    @property
    def name(self) -> str:
        norm = "MSE" if self.search is ErrorNorm.MSE else "MAE"
        return f"{super().name}, 4-over-6 by {norm}, block max {self.block_max:g}"

    def from_amax(self, x: Blocked, amax: Tensor | None = None) -> Scaled:
        g, global_scale = self.global_amax(x, amax)
        to_six = divide(x.amax, x.element.max) * global_scale
        four = self.store(to_six * 1.5, global_scale, g, x)
        six = self.store(to_six, global_scale, g, x)
        pick_four = self._error(four, x) < self._error(six, x)
        scale = torch.where(self.repeated(pick_four, x), four.parts["scale"], six.parts["scale"])
        return Scaled(torch.where(pick_four, four.multiplier, six.multiplier), {"scale": scale, "amax": g})

    def _error(self, candidate: Scaled, x: Blocked) -> Tensor:
        """fp32 (grid): the candidate's error, summed along each row of a block, then over its rows by halves."""
        codes = x.stages.cast(x.blocks, candidate.multiplier[:, None, :, None], x.element)
        scale = E4M3.decode(candidate.parts["scale"])[:: x.block.rows]
        g = candidate.parts["amax"][:, None]
        value = x.element.widen(codes) * scale[:, None, :, None]
        difference = divide(value * g[..., None, None], self.divisor) - x.blocks.to(torch.float32)
        terms = difference * difference if self.search is ErrorNorm.MSE else difference.abs()
        total = terms[..., 0]
        for i in range(1, terms.shape[-1]):
            total = total + terms[..., i]
        while total.shape[1] > 1:
            half = total.shape[1] // 2
            total = total[:, :half] + total[:, half:]
        return total[:, 0]

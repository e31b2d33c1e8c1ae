"""Pick: the number of queries from which attention in codes is faster than in high precision."""

from typing import NamedTuple

import torch
from torch import Tensor

from duotone.attention.heads import token_axis
from duotone.attention.masks import MaskType
from duotone.attention.ranks import Ranks
from duotone.dispatch.attention import HALF, MEASURED, MEASURED_HEADS, NEVER, AttentionProblem, LeastTokens
from duotone.pipeline.op import is_autocast
from duotone.recipes.recipe import Recipe

RING_TOKENS = 16384
"""With so many queries of a rank, codes of all keys were faster than torch's ring, without gradients.

With gradients they never were (bench/results/2026-11-23-h200x2-attention-ranks.txt).
"""


class Pick(NamedTuple):
    """Whether measurements decide what runs in low precision, and the least number of queries, as `least_tokens`."""

    is_measured: bool
    least: LeastTokens

    @staticmethod
    def of(problem: AttentionProblem, recipe: Recipe, ranks: str, device: str) -> "Pick":
        """Let the `ranks` that share a sequence agree, by a collective: their GPUs may be of two kinds."""
        min_tokens = _min_tokens(recipe)
        pick = Pick(problem.is_measured(min_tokens), problem.least_tokens(min_tokens))
        group = Ranks.named(ranks)
        if group is None or not min_tokens:
            return pick
        is_measured, *numbers = group.largest((pick.is_measured, *pick.least), device)
        least = LeastTokens(*numbers)
        if is_measured:
            least = least._replace(forward=max(least.forward, RING_TOKENS), training=NEVER)
        return Pick(bool(is_measured), least)

    def takes(
        self, heads: tuple[Tensor, Tensor, Tensor], layout: str, seen: Tensor | None, kind: MaskType, trains: bool
    ) -> bool:
        """Whether a call runs in low precision.

        Under an unknown mask kernels cannot leave out tiles, and are not faster.
        """
        queries, keys = (x.shape[token_axis(layout)] for x in heads[:2])
        is_padded = seen is not None and seen.dtype is not torch.int32 and kind.padding
        tokens = self.least.for_call(trains, seen is not None, is_padded and not kind.causal)
        if queries < tokens or not self.is_measured:
            return queries >= tokens
        pairs, device = heads[0].numel() // heads[0].shape[-1] * keys, heads[0].device.type
        dtype = torch.get_autocast_dtype(device) if is_autocast(device) else heads[0].dtype
        leaves_out = is_padded or seen is None or seen.dtype is torch.int32
        return leaves_out and dtype in HALF and pairs >= MEASURED_HEADS * tokens**2


def _min_tokens(recipe: Recipe) -> int | str:
    """`dpa_min_tokens`. 0 for "measured" if the recipe is strict, or names attention by rules or `fp8_mha`."""
    demands = recipe.strict or recipe.fp8_mha or not recipe.fp8_dpa
    return 0 if recipe.dpa_min_tokens == MEASURED and demands else recipe.dpa_min_tokens

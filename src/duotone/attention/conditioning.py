"""Changes of query and key before they are quantized. In exact arithmetic the output of attention stays the same."""

import torch
from torch import Tensor

from duotone.attention.ranks import Ranks
from duotone.recipes.recipe import Recipe


def conditioned(recipe: Recipe, query: Tensor, key: Tensor, axis: int, ranks: Ranks | None) -> tuple[Tensor, Tensor]:
    """Query and key after the changes that the recipe asks for, in their dtypes. `axis` is the axis of the tokens.

    - Subtracting one vector from all keys of a head changes each row of scores by a constant, which the softmax
      ignores. `ranks` share the tokens.
    - An orthonormal matrix on both query and key does not change the scores (QuaRot, arXiv 2404.00456).
    """
    if recipe.dpa_center_keys:
        mean = key.mean(axis, keepdim=True, dtype=torch.float32)
        key = (key - (mean if ranks is None else ranks.mean(mean))).to(key.dtype)
    if recipe.dpa_rotate:
        matrix = hadamard(query.shape[-1], query.device)
        query, key = (_rotated(x, matrix) for x in (query, key))
    return query, key


def hadamard(width: int, device: torch.device) -> Tensor:
    """fp32 (n, n), orthonormal, for the largest power of two n that divides the width."""
    matrix = torch.ones((1, 1), device=device)
    while width % (2 * matrix.shape[0]) == 0:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * matrix.shape[0] ** -0.5


def _rotated(x: Tensor, matrix: Tensor) -> Tensor:
    pieces = torch.unflatten(x.float(), -1, (-1, matrix.shape[0]))
    return (pieces @ matrix).flatten(-2).to(x.dtype)

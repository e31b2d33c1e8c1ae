"""The steps of encode and decode that touch every element, in plain torch: the meaning that every faster form keeps.

Blocked tensors are (grid rows, rows, grid cols, cols), as `Block.view` makes them. A backend replaces a stage by a
subclass of `Stages` with the same bits; formats only order the stages.
"""

import torch
from torch import Tensor

from duotone.formats import hadamard, philox
from duotone.formats.elements import Element, pack_pairs, unpack_pairs


def block_amax(blocks: Tensor) -> Tensor:
    """Blocked input -> fp32 (grid rows, grid cols): max |x|, NaN ignored, 0 where a block is empty."""
    if blocks.numel() == 0:
        return blocks.new_zeros((blocks.shape[0], blocks.shape[2]), dtype=torch.float32)
    magnitude = blocks.abs()
    magnitude = torch.where(magnitude == magnitude, magnitude, 0.0)
    return magnitude.amax(dim=(1, 3)).to(torch.float32)


def cast(blocks: Tensor, multiplier: Tensor, element: Element) -> Tensor:
    """Codes, one to a byte, of fl(x * multiplier); `multiplier` fp32 broadcasts to the blocks."""
    return element.encode(blocks.to(torch.float32) * multiplier)


def cast_stochastic(blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
    """As `cast`, rounding with `bits` uint8 of the blocks' shape."""
    return element.encode(element.round_stochastic(blocks.to(torch.float32) * multiplier, bits))


def values(codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
    """fl(value(code) * factor) in `dtype`; `codes` blocked, one to a byte."""
    return (element.decode(codes) * factor).to(dtype)


class Stages:
    """The plain-torch stages. Stateless; `name` says in plans which backend casts."""

    name = "torch"

    def amax(self, blocks: Tensor) -> Tensor:
        return block_amax(blocks)

    def cast(self, blocks: Tensor, multiplier: Tensor, element: Element) -> Tensor:
        return cast(blocks, multiplier, element)

    def cast_stochastic(self, blocks: Tensor, multiplier: Tensor, bits: Tensor, element: Element) -> Tensor:
        return cast_stochastic(blocks, multiplier, bits, element)

    def values(self, codes: Tensor, factor: Tensor, element: Element, dtype: torch.dtype) -> Tensor:
        return values(codes, factor, element, dtype)

    def rotate(self, x: Tensor) -> Tensor:
        return hadamard.rotate(x)

    def random_bytes(self, seed: Tensor, rows: int, cols: int, plane: int) -> Tensor:
        return philox.random_bytes(seed, rows, cols, plane)

    def pack(self, codes: Tensor) -> Tensor:
        return pack_pairs(codes)

    def unpack(self, packed: Tensor) -> Tensor:
        return unpack_pairs(packed)


PLAIN = Stages()

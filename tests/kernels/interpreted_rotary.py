"""Checks: heads turned and turned back by a kernel, against the operations of eager torch."""

import torch
from interpreting import Check

from duotone.attention.rotary import _turned, _turned_back
from duotone.kernels.rotary import turn

SHAPES = ((2, 5, 3, 8), (1, 4, 16, 128), (2, 3, 40, 96), (1, 1, 1, 2))


def checks(everything: bool) -> Check:
    """Heads of one matrix with query, key and value, more heads than a program has, and a width of no power of two."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for batch, tokens, heads, width in SHAPES:
            t = torch.randn(batch, tokens, 3, heads, width, generator=generator).to(dtype)[:, :, 1]
            cos, sin = torch.randn(2, tokens, width, generator=generator)
            for back, plain in ((False, _turned), (True, _turned_back)):
                out = torch.empty(t.shape, dtype=dtype)
                turn(t, out, cos, sin, back)
                yield f"{dtype} {tuple(t.shape)} {back}", out, plain(t, cos[:, None], sin[:, None])

"""Checks: FP8 attention in Triton's interpreter, against the blocks of keys in plain torch.

The interpreter adds products in fp32 and takes powers as numpy does, so a code of a probability may fall to the other
side of a boundary: results agree within a bound.
"""

import itertools

import torch
from interpreting import Check

from duotone import formats
from duotone.attention.blockwise import Blocks, attend
from duotone.attention.head_planes import TileOperand
from duotone.kernels import attention
from duotone.tensor.quantizer import Quantizer

E4M3 = formats.get("fp8_e4m3_tensor")
TILES = 64, 128, 4
BOUND = 3e-3
"""Largest difference as a part of the largest output, with the blocks of 128 keys of plain torch."""


def encoded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes in the shape of x, the factor that decodes them, and their values."""
    parts = E4M3.encode(x.reshape(-1, x.shape[-1]))
    codes = parts["codes"].view(torch.float8_e4m3fn).view(x.shape)
    return codes, parts["scale"], codes.float() * parts["scale"]


def checks(everything: bool) -> Check:
    """Whole and ragged blocks, groups of heads, both widths, and scales of scores that turn or end their order."""
    sizes = [(64, 128, 1), (70, 130, 2)] + [(130, 64, 1), (200, 200, 2)] * everything
    usual = itertools.product(sizes, (False, True), attention.WIDTHS)
    cases = [(size, causal, width, width**-0.5) for size, causal, width in usual]
    for (queries, keys, batch), causal, width, scale in [*cases, *(((70, 130, 2), True, 64, s) for s in (-0.3, 0.0))]:
        heads, groups = 2, 1
        q = torch.randn(batch, queries, heads, width)
        k, v = (torch.randn(batch, keys, groups, width) for _ in range(2))
        (qc, qs, qv), (kc, ks, kv), (vc, vs, vv) = map(encoded, (q, k, v))
        columns = vc.permute(2, 3, 0, 1).contiguous()
        codes, scales = (qc, kc, columns), (qs, ks, vs)
        out, lse = attention.attend(codes, scales, None, (scale, causal, True, torch.float32), TILES)
        blocks = Blocks(scale, causal, 0.0, None, None, torch.float32)
        heads5 = (x.permute(0, 2, 1, 3).unflatten(1, (groups, -1)) for x in (qv, kv, vv))
        same, logs = attend(*heads5, blocks, TileOperand(Quantizer(E4M3, E4M3), limit=1.0), None)
        where = f"{queries} {keys} {causal} {width} {scale:.2f}"
        difference = (out.permute(0, 2, 1, 3) - same.flatten(1, 2)).abs().amax() / same.abs().amax()
        yield f"output {where}: {difference.item():.1e}", bool(difference < BOUND)
        yield f"lse {where}", torch.allclose(lse, logs.flatten(1, 2).squeeze(-1), atol=1e-4)

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
from duotone.attention.low_precision import grouped
from duotone.attention.masks import packed, padded, spans, whole
from duotone.dispatch.attention import sight
from duotone.kernels import attention
from duotone.tensor.context import LOCAL
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


def some_spans(tokens: int) -> list[torch.Tensor]:
    """A window, packed sequences with padding behind them in a window, and sequences of other lengths in a batch."""
    sides = whole(tokens, torch.device("cpu")), whole(tokens, torch.device("cpu"))
    first = packed(torch.tensor([0, 20, 20, 150, 190]), tokens, True)
    lengths = torch.tensor([[tokens - 61], [3]])
    second = padded(torch.arange(tokens) < lengths), padded(torch.arange(tokens) < lengths.flip(0))
    return [spans(sides, (50, 7), False), spans((first, first), (90, 0), True), spans(second, (-1, -1), False)]


def some_masks(batch: int, heads: int, queries: int, keys: int) -> list[torch.Tensor]:
    """Of all pairs, of the keys of each batch, and a band of each head; each leaves some queries without keys."""
    pairs = torch.rand(1, 1, queries, keys) < 0.3
    pairs[..., 5:9, :] = False
    padding = (torch.arange(keys) >= keys // 2)[None, None, None].repeat(batch, 1, 1, 1)
    padding[0] = False
    band = torch.ones(1, heads, queries, keys, dtype=torch.bool).tril().triu(-150)
    return [pairs, padding, band]


def checks(everything: bool) -> Check:
    """Whole and ragged blocks, groups of heads, both widths, and scales of scores that turn or end their order."""
    sizes = [(64, 128, 1), (70, 130, 2)] + [(130, 64, 1), (200, 200, 2)] * everything
    usual = itertools.product(sizes, (False, True), (64, 128))
    cases = [(size, causal, width, width**-0.5, None) for size, causal, width in usual]
    cases += [((70, 130, 2), True, 64, scale, None) for scale in (-0.3, 0.0)]
    cases += [((70, 130, 1), True, 256, 0.1, None)]
    cases += [((200, 200, 2), False, 64, 0.125, seen) for seen in some_spans(200)]
    cases += [((200, 190, 2), False, 64, 0.125, seen) for seen in some_masks(2, 2, 200, 190)]
    for (queries, keys, batch), causal, width, scale, seen in cases:
        heads, groups = 2, 1
        q = torch.randn(batch, queries, heads, width)
        k, v = (torch.randn(batch, keys, groups, width) for _ in range(2))
        (qc, qs, qv), (kc, ks, kv), (vc, vs, vv) = map(encoded, (q, k, v))
        columns = vc.permute(2, 3, 0, 1).contiguous()
        codes, scales = (qc, kc, columns), (qs, ks, vs)
        sees = sight(seen, queries, keys)
        out, lse = attention.attend(codes, scales, None, (scale, causal, True, torch.float32), *sees, TILES)
        blocks = Blocks(scale, causal, 0.0, grouped(seen, groups), None, torch.float32)
        heads5 = (x.permute(0, 2, 1, 3).unflatten(1, (groups, -1)) for x in (qv, kv, vv))
        same, logs = attend(*heads5, blocks, TileOperand(Quantizer(E4M3, E4M3), LOCAL, 1.0), None)
        where = f"{queries} {keys} {causal} {width} {scale:.2f} {seen is not None}"
        difference = (out.permute(0, 2, 1, 3) - same.flatten(1, 2)).abs().amax() / same.abs().amax()
        yield f"output {where}: {difference.item():.1e}", bool(difference < BOUND)
        yield f"lse {where}", torch.allclose(lse, logs.flatten(1, 2).squeeze(-1), atol=1e-4)

"""Checks: the census of a matrix, against the one in plain torch."""

from unittest import mock

import torch
from interpreting import Check

from duotone.kernels import amax
from duotone.observe.step_statistics import count

NAN, INF = float("nan"), float("inf")


def census(x: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(3, dtype=torch.int64)
    amax.tensor_census(x, counts)
    return counts


def expected(x: torch.Tensor) -> torch.Tensor:
    counts = torch.zeros(3, dtype=torch.int64)
    count(x, counts)
    return counts


def checks(everything: bool) -> Check:
    """A program with several chunks, chunks that are not full, and matrices of nothing else than one kind."""
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for rows, cols in ((1, 1), (3, 5), (128, 96), (257, 33)):
            x = torch.randn(rows, cols, generator=generator).to(dtype)
            with mock.patch.object(amax, "CENSUS_PROGRAMS", 2):
                yield f"finite {dtype} {rows} {cols}", census(x), expected(x)
            x.view(-1)[:: max(1, x.numel() // 7)] = NAN
            x.view(-1)[1 :: max(1, x.numel() // 5)] = -INF
            yield f"not finite {dtype} {rows} {cols}", census(x), expected(x)
        many = [torch.randn(n, generator=generator).to(dtype) for n in (1, 7, 8192, 20000)]
        many += [torch.full((5,), NAN, dtype=dtype), torch.tensor([1.0, -INF, NAN], dtype=dtype)]
        many[3][17] = NAN
        want = torch.stack([x.float().abs().nan_to_num(0.0, INF).max() for x in many])
        yield f"amaxes {dtype}", amax.amaxes(many), want

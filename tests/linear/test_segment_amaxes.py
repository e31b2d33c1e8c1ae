"""What segments of one matrix hand to their delayed scales in a first step."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
from duotone.kernels.segment_cast import Segments
from duotone.linear.segment_operands import segment_amaxes


@pytest.mark.parametrize("splits", [[3, 0, 5, 2], [0, 0, 10], [10], [4, 2, 0, 0]], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_segment_has_the_largest_magnitude_of_its_own_rows(splits, dtype) -> None:
    """Rows behind the last segment belong to none, NaN does not count, and an empty segment has 0."""
    x = (torch.randn(10, 7) * torch.logspace(-3, 3, 10)[:, None]).to(dtype)
    x[1, 2], x[4, 0] = torch.nan, -torch.inf
    ends = torch.tensor([*torch.tensor(splits).cumsum(0), *[0] * len(splits)], dtype=torch.int32)
    amaxes = segment_amaxes(x, Segments(ends, len(splits), 10, 16))
    pieces = x[: sum(splits)].float().abs().split(splits)
    expected = [max([v for v in piece.flatten().tolist() if v == v], default=0.0) for piece in pieces]
    assert amaxes.dtype == torch.float32 and amaxes.tolist() == expected

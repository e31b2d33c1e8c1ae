"""What the journal tells of operands: outlier channels, planes that differ, scales, clips, and the first NaN."""

import math

import numpy as np
import pytest
import torch

from duotone import Quantizer, formats
from duotone.recipes import QuantizerRole
from duotone.tensor import Plane
from duotone_lab.training.journal import LOWEST, Journal

ROLE = QuantizerRole("linear", "input", "a")


def record(journal: Journal, x: torch.Tensor, row: str, col: str, role: QuantizerRole = ROLE) -> None:
    quantizer = Quantizer(formats.get(row), formats.get(col))
    journal.take(role, x, quantizer.encode(x), (None, None))


def test_channels_far_above_the_median_are_counted_over_all_samples() -> None:
    journal = Journal(step=1)
    for at, factor in ((3, 40.0), (5, 9.0)):
        x = torch.ones(8, 32)
        x[2, at] = factor
        record(journal, x, "mxfp8_e4m3", "mxfp8_e4m3")
    (entry,) = journal.operands()
    assert (entry["channels"], entry["outliers"], entry["largest_channel"], entry["over_median"]) == (32, 2, 3, 40.0)


def test_planes_of_one_format_per_tensor_agree_and_others_differ_as_numpy_says() -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)) * torch.logspace(-2, 2, 96)
    same, mixed = Journal(step=1), Journal(step=1)
    record(same, x, "fp8_e4m3_tensor", "fp8_e4m3_tensor")
    record(mixed, x, "mxfp8_e4m3", "nvfp4")
    assert same.operands()[0]["disagreement"] == 0.0
    planes = Quantizer(formats.get("mxfp8_e4m3"), formats.get("nvfp4")).encode(x)
    row, col = (plane.dequantize(torch.float32).double().numpy() for plane in planes)
    expected = np.linalg.norm(row - col.T) / np.linalg.norm(x.double().numpy())
    assert mixed.operands()[0]["disagreement"] == pytest.approx(expected, rel=1e-6)


def test_scales_are_counted_by_power_of_two() -> None:
    journal, x = Journal(step=1), torch.full((1, 64), 448.0)
    x[0, 32:] = 448.0 / 16
    record(journal, x, "mxfp8_e4m3", "identity")
    row, col = journal.spreads()
    assert {LOWEST + at: count for at, count in enumerate(row["scales"]) if count} == {0: 32, -4: 32}
    assert "scales" not in col


def test_a_step_has_its_amax_the_limit_of_its_scales_and_the_share_that_is_clipped() -> None:
    journal, x = Journal(step=4), torch.ones(4, 25)
    x[0, 0], x[1, 1] = 1000.0, 500.0  # twice the limit, and little more than it
    fmt = formats.get("fp8_e4m3_tensor")
    plane = Plane(fmt, fmt.encode(x, scale=torch.ones(1)), (4, 25))
    journal.record(ROLE, "rowwise", x, plane)
    (entry,) = journal.drift()
    assert (entry["amax"], entry["limit"], entry["clipped"]) == (1000.0, 448.0, 0.01)


def test_the_origin_is_the_first_operand_that_is_not_finite() -> None:
    journal, x = Journal(step=1), torch.ones(4, 32)
    record(journal, x, "mxfp8_e4m3", "mxfp8_e4m3")
    assert journal.origin() is None
    journal.step, bad = 2, x.clone()
    bad[0, :3] = torch.tensor([math.nan, math.inf, -math.inf])
    for name, value in (("a", x), ("b", bad), ("c", bad * math.nan)):
        record(journal, value, "mxfp8_e4m3", "mxfp8_e4m3", QuantizerRole("linear", "weight", name))
    assert journal.origin() == {
        "step": 2,
        "text": "the first operand that is not finite: weight rowwise of b, 1 NaN and 2 infinite",
    }
    assert all(math.isfinite(entry["amax"]) for entry in journal.drift())

"""Awkward matrices, and planes of two devices compared bit by bit."""

import torch
from torch import Tensor

from duotone.tensor.plane import Plane


def bits(t: Tensor) -> Tensor:
    t = t.detach().cpu().contiguous()
    return torch.where(t.isnan(), torch.nan, t).float().view(torch.int32) if t.is_floating_point() else t


def awkward_matrix(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Spread over many binades, with zeros, denormals, infinities, NaN, a row and a column of zeros."""
    generator = torch.Generator().manual_seed(m * 1000 + k)
    x = torch.randn(m, k, generator=generator) * torch.exp2(torch.randint(-20, 20, (m, k), generator=generator).float())
    flat = x.view(-1)
    flat[::7] = 0.0
    if m * k > 64:
        flat[3], flat[11], flat[29], flat[40] = torch.inf, -torch.inf, torch.nan, -torch.nan
        flat[17], flat[18] = 1e-40, -1e-40
        x[m // 2] = 0.0
        x[:, k // 2] = -0.0
    return x.to(dtype)


def same(cpu: Plane | None, cuda: Plane | None) -> None:
    assert (cpu is None) == (cuda is None)
    if cpu is None or cuda is None:
        return
    assert cuda.shape == cpu.shape
    for name, part in cpu.parts.items():
        assert cuda.parts[name].shape == part.shape, name
        assert torch.equal(bits(cuda.parts[name]), bits(part)), name

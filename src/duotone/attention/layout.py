"""Layouts of heads: Transformer Engine's letters for the axes of (sequence, batch, heads, depth)."""

from torch import Tensor

from duotone.errors import UserError

LAYOUTS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "thd": (0, 2, 1, 3)}
"""Where attention's own order (batch, heads, tokens, depth) finds its axes; thd packs sequences along one axis."""


def check_layout(name: str) -> str:
    if name not in LAYOUTS:
        raise UserError(f"qkv_format {name!r} is unknown; allowed are 'sbhd', 'bshd' and 'thd'")
    return name


def token_axis(name: str) -> int:
    return 1 if name == "bshd" else 0


def to_heads(x: Tensor, name: str) -> Tensor:
    """A view in attention's order; packed sequences become a batch of one."""
    return (x[None] if name == "thd" else x).permute(LAYOUTS[name])


def from_heads(x: Tensor, name: str) -> Tensor:
    """(batch, heads, tokens, depth) back in the layout, heads and depth as one axis."""
    axes = (2, 0, 1, 3) if name == "sbhd" else (0, 2, 1, 3)
    flat = x.permute(axes).flatten(2)
    return flat[0] if name == "thd" else flat

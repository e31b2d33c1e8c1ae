"""Heads: the letters for their axes, heads in the output of a projection, and their norms."""

from dataclasses import dataclass, replace
from numbers import Integral
from typing import Any

from torch import Tensor, nn

from duotone.errors import UserError, one_of
from duotone.modules.norm import L2Normalization, LayerNorm, RMSNorm

LAYOUTS = {"sbhd": (1, 2, 0, 3), "bshd": (0, 2, 1, 3), "thd": (0, 2, 1, 3)}
"""The axes of each layout in attention's order (batch, heads, tokens, depth). thd packs sequences along one axis."""


def check_layout(name: str) -> str:
    """The name of a layout. UserError if it is unknown."""
    one_of("qkv_format", name, LAYOUTS)
    return name


def token_axis(name: str) -> int:
    """The dimension of the tokens in a layout."""
    return 1 if name == "bshd" else 0


def to_heads(x: Tensor, name: str) -> Tensor:
    """A view in attention's order; packed sequences become a batch of one."""
    return (x[None] if name == "thd" else x).permute(LAYOUTS[name])


def from_heads(x: Tensor, name: str) -> Tensor:
    """(batch, heads, tokens, depth) back in the layout, heads and depth as one axis."""
    axes = (2, 0, 1, 3) if name == "sbhd" else (0, 2, 1, 3)
    flat = x.permute(axes).flatten(2)
    return flat[0] if name == "thd" else flat


def require_sizes(least: int = 1, **sizes: object) -> None:
    """UserError unless each size is an integer of at least `least`."""
    for name, size in sizes.items():
        if isinstance(size, bool) or not isinstance(size, Integral) or int(size) < least:
            raise UserError(f"{name} is {size!r}; give an integer of at least {least}")


def groups_of(heads: int, groups: int | None) -> int:
    """The number of heads of keys, that of all heads if `groups` is None. UserError if groups do not divide heads."""
    require_sizes(num_attention_heads=heads, num_gqa_groups=heads if groups is None else groups)
    groups = heads if groups is None else groups
    if heads % groups:
        raise UserError(f"num_gqa_groups {groups} does not divide num_attention_heads {heads}")
    return groups


def channels_of(widths: int | tuple[int, int]) -> tuple[int, int]:
    """The width of heads of query and key, and that of heads of values. UserError for other values."""
    pair = widths if isinstance(widths, tuple) else (widths, widths)
    if len(pair) != 2:
        raise UserError(f"kv_channels is {widths}; give the width of a head, or (of query and key, of value)")
    require_sizes(kv_channels=pair[0])
    require_sizes(kv_channels=pair[1])
    return pair


def share_of(count: int, groups: int, heads: int) -> tuple[int, int]:
    """(heads, groups) of a rank that holds `heads` of the `count` heads. All of them if that does not divide."""
    if heads in (0, count) or count % heads or groups % (count // heads):
        return count, groups
    return heads, groups * heads // count


KINDS = ("query", "key", "value")
NORMS = {"LayerNorm": LayerNorm, "RMSNorm": RMSNorm}


@dataclass(frozen=True)
class Heads:
    """The number of heads of a rank and their width. There are `groups` heads of keys, and as many of values.

    Interleaved projections hold group after group, each with all of its heads. Other projections hold kind after kind.
    """

    count: int
    groups: int
    width: int
    interleaved: bool

    def over(self, ranks: int) -> "Heads":
        """What each rank has of them. UserError if heads, groups and ranks do not divide."""
        if self.count % self.groups or self.groups % ranks:
            odd = f"{self.count} heads, {self.groups} groups and {ranks} ranks"
            raise UserError(f"{odd} do not divide: ranks must divide num_gqa_groups, and groups num_attention_heads")
        return replace(self, count=self.count // ranks, groups=self.groups // ranks)

    def sizes(self, kinds: tuple[str, ...]) -> dict[str, int]:
        """Output features of each kind."""
        return {kind: (self.count if kind == "query" else self.groups) * self.width for kind in kinds}

    def of_features(self, features: int, kinds: tuple[str, ...]) -> "Heads":
        """What a rank has whose projection to the kinds gives so many features. UserError unless ranks can share so."""
        whole = sum(self.sizes(kinds).values())
        if not features or whole % features:
            raise UserError(
                f"a projection gave {features} features, and its heads have {whole}; cut it by ColwiseParallel over "
                "ranks that divide num_gqa_groups, or build attention with set_parallel_mode and tp_group"
            )
        return self if whole == features else self.over(whole // features)

    def split(self, x: Tensor, kinds: tuple[str, ...]) -> tuple[Tensor, ...]:
        """(*lead, features of the kinds) -> one (*lead, heads, width) per kind."""
        counts = [size // self.width for size in self.sizes(kinds).values()]
        if not self.interleaved:  # cut before heads are told apart, so that a quantized tensor stays one
            parts = x.split([count * self.width for count in counts], dim=-1)
            pairs = zip(parts, counts, strict=True)  # no -1 below: an empty batch does not determine a size
            return tuple(part.reshape(*part.shape[:-1], count, self.width) for part, count in pairs)
        groups = x.reshape(*x.shape[:-1], self.groups, sum(counts) // self.groups, self.width)
        parts = groups.split([count // self.groups for count in counts], dim=-2)
        return tuple(part.flatten(-3, -2) for part in parts)


def head_width(hidden_size: int, heads: int, kv_channels: int | None = None) -> int:
    """The width of a head: `kv_channels`, or an equal share. UserError if `hidden_size` is no multiple of `heads`."""
    require_sizes(hidden_size=hidden_size, num_attention_heads=heads)
    if kv_channels is not None:
        require_sizes(kv_channels=kv_channels)
        return kv_channels
    if hidden_size % heads:
        raise UserError(
            f"hidden_size {hidden_size} does not divide over {heads} heads; change them or give kv_channels"
        )
    return hidden_size // heads


def head_norm(kind: str | None, width: int, eps: float, **options: Any) -> nn.Module | None:
    """The norm of each head of queries or keys, None without one. UserError for an unknown one."""
    if kind is None:
        return None
    if kind == "L2Normalization":
        return L2Normalization(eps=eps)
    one_of("qk_norm_type", kind, (None, "L2Normalization", *NORMS))
    return NORMS[kind](width, eps=eps, **options)

"""KVCache: the keys and values of earlier tokens in low precision, for generation."""

import torch
from torch import Tensor

from duotone import formats
from duotone.attention.heads import require_sizes, token_axis
from duotone.errors import UserError
from duotone.formats import Format
from duotone.formats.format import require_dense
from duotone.tensor.plane import Plane
from duotone.tensor.plane_encoder import encode_plane


class KVCache:
    """Room for `length` tokens of `batch` sequences with `groups` heads of keys and values, each `width` wide.

    `format` is the name of a format whose scales belong to one row, so that later tokens change no code of earlier
    ones. `dtype` is the dtype of the returned keys and values. UserError for other formats, and for impossible sizes.
    """

    def __init__(
        self,
        batch: int,
        length: int,
        groups: int,
        width: int,
        *,
        format: str = "fp8_e4m3_row",
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
            raise UserError(f"a KVCache returns a floating dtype; got {dtype!r}: try torch.bfloat16")
        require_sizes(0, batch=batch, length=length)
        require_sizes(groups=groups, width=width)
        fmt = formats.get(format)
        if fmt.alignment[0] != 1 or fmt.spans(0) or fmt.is_delayed or fmt.is_stochastic:
            raise UserError(f"a KVCache takes formats whose scales belong to one row; got {format}: try fp8_e4m3_row")
        self.format: Format = fmt
        self.batch, self.length, self.groups, self.width, self.dtype = batch, length, groups, width, dtype
        self.tokens = 0
        """The number of tokens of each sequence in the cache."""

        rows = length * batch * groups
        specs = fmt.parts(rows, width).items()
        self._parts = [
            {name: torch.empty(spec.shape, dtype=spec.dtype or dtype, device=device) for name, spec in specs}
            for _ in ("key", "value")
        ]

    def __repr__(self) -> str:
        return f"KVCache({self.tokens} of {self.length} tokens, {self.format.name})"

    @property
    def nbytes(self) -> int:
        """The bytes of codes and scales."""
        return sum(part.nbytes for parts in self._parts for part in parts.values())

    def clear(self) -> None:
        """Forget all tokens."""
        self.tokens = 0

    def append(self, key: Tensor, value: Tensor, layout: str) -> tuple[Tensor, Tensor]:
        """Heads of new tokens in "sbhd" or "bshd" -> the heads of all tokens so far, as decoded from the cache.

        UserError if they do not fit, or if one needs a gradient.
        """
        if layout == "thd":
            raise UserError("a KVCache takes sequences of one length, 'sbhd' or 'bshd'; packed ones ('thd') have many")
        axis = token_axis(layout)
        new, shape = key.shape[axis], [self.batch, self.groups, self.width]
        if [key.shape[1 - axis], *key.shape[2:]] != shape or key.shape != value.shape:
            raise UserError(f"a KVCache of (batch, groups, width) {tuple(shape)} got heads {tuple(key.shape)}")
        if self.tokens + new > self.length:
            raise UserError(f"{self!r} has no room for {new} more; make a longer one or clear it")
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise UserError("a KVCache keeps no graph: generate under torch.no_grad()")
        for heads, parts in zip((key, value), self._parts, strict=True):
            require_dense("a KVCache", heads)
            matrix = heads.movedim(axis, 0).reshape(-1, self.width)
            rows = slice(self.tokens * self.batch * self.groups, (self.tokens + new) * self.batch * self.groups)
            for name, part in encode_plane(self.format, matrix).parts.items():
                stored = parts[name]
                stored[rows] = part if stored.dtype == self.dtype else part.view(stored.dtype)
        self.tokens += new
        first, second = (self._heads(parts, axis) for parts in self._parts)
        return first, second

    def _heads(self, parts: dict[str, Tensor], axis: int) -> Tensor:
        rows = self.tokens * self.batch * self.groups
        plane = Plane(self.format, {name: part[:rows] for name, part in parts.items()}, (rows, self.width))
        heads = plane.dequantize(self.dtype).view(self.tokens, self.batch, self.groups, self.width)
        return heads.movedim(0, axis)

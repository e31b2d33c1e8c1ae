"""Files of named tensors, written and read by safetensors, which is imported when a file is."""

import math
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from duotone.errors import UserError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "C64": torch.complex64,
}  # fmt: skip
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PIECE, PIECE_ON_GPU = 1 << 18, 1 << 24
"""Elements of a piece of rows, which is computed at once."""


class TensorSpec(NamedTuple):
    """The shape and the dtype of a stored tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """The size of the tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    @staticmethod
    def of(t: Tensor) -> "TensorSpec":
        """Shape and dtype of a tensor."""
        return TensorSpec(tuple(t.shape), t.dtype)


def split_rows(t: Tensor, step: int = 1) -> tuple[Tensor, ...]:
    """Cut a tensor along its rows into small pieces. All but the last have a multiple of `step` rows."""
    rows = t.reshape(1) if t.dim() == 0 else t
    width = max(1, rows.numel() // max(1, len(rows)))
    return rows.split(max(1, (PIECE if t.device.type == "cpu" else PIECE_ON_GPU) // width // step) * step)


def write_tensors(path: Path, specs: Mapping[str, TensorSpec], pieces: Iterable[tuple[str, Tensor]]) -> None:
    """Write tensors to a new file. Memory holds all of them; their rows come in pieces."""
    from safetensors.torch import save_file

    tensors = {name: torch.empty(spec.shape, dtype=spec.dtype, device="cpu") for name, spec in specs.items()}
    rest = {name: tensor.view(-1) for name, tensor in tensors.items()}
    for name, piece in pieces:
        rest[name][: piece.numel()].copy_(piece.detach().reshape(-1))
        rest[name] = rest[name][piece.numel() :]
    assert not any(map(len, rest.values())), "rows were planned and did not come"
    save_file(tensors, path, {"format": "pt"})
    path.chmod(path.parent.stat().st_mode & 0o666)  # safetensors lets nobody else read a file, such as a server
    with path.open("rb") as file:
        os.fsync(file.fileno())


class TensorFile:
    """A file of safetensors, open for reading. UserError if it is damaged."""

    def __init__(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            self._file = safe_open(path, "pt")
            slices = {name: self._file.get_slice(name) for name in self._file.keys()}
            self.specs = {n: TensorSpec(tuple(s.get_shape()), DTYPES[s.get_dtype()]) for n, s in slices.items()}
        except (SafetensorError, KeyError) as error:
            raise UserError(f"{path} is no whole file of safetensors ({error!r}); write it again") from None

    def read(self, name: str) -> Tensor:
        """A copy of a tensor."""
        return self._file.get_tensor(name).clone()

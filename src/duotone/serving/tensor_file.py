"""Files of named tensors in the safetensors layout: a JSON header, then the bytes. Written and read one at a time."""

import ctypes
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
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
LONGEST_HEADER = 100_000_000
PIECE, PIECE_ON_GPU = 1 << 18, 1 << 24
"""Elements of a piece of rows, which is computed and written at once."""


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


def memory_of(t: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor, some rows at a time. A view is valid until the next one is taken."""
    for rows in split_rows(t.detach()):
        rows = rows.contiguous().cpu()
        yield memoryview((ctypes.c_ubyte * rows.nbytes).from_address(rows.data_ptr()))


def write_tensors(path: Path, specs: Mapping[str, TensorSpec], pieces: Iterable[tuple[str, Tensor]]) -> None:
    """Write rows of tensors to a new file as they come, so that few are in memory. UserError if they do not fit."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    places, end = {}, 0
    for name, spec in specs.items():
        places[name], end = (end, end + spec.bytes), end + spec.bytes
        header[name] = {"dtype": NAMES[spec.dtype], "shape": list(spec.shape), "data_offsets": places[name]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(start + end)
        for name, piece in pieces:
            spec, (first, last) = specs[name], places[name]
            if piece.dtype != spec.dtype or piece.shape[1:] != spec.shape[1:] or first + piece.nbytes > last:
                raise UserError(f"{name} is {tuple(piece.shape)} in {piece.dtype} and was planned as {spec}")
            places[name] = first + piece.nbytes, last
            file.seek(start + first)
            for view in memory_of(piece):
                file.write(view)
            file.flush()
        os.fsync(file.fileno())
    for name, (first, last) in places.items():
        if first < last:
            raise UserError(f"{path.name} lacks rows of {name}; they were planned and not written")


class TensorFile:
    """A file in the safetensors layout, open for reading. UserError if it is damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= LONGEST_HEADER else b""
        self.start = 8 + length
        try:
            header = json.loads(text) if len(text) == length else None
        except (ValueError, RecursionError):
            header = None
        if not isinstance(header, dict):
            raise UserError(f"{path} is no whole file of safetensors; write it again")
        header.pop("__metadata__", None)
        try:
            self.specs = {n: TensorSpec(tuple(e["shape"]), DTYPES[e["dtype"]]) for n, e in header.items()}
            self.places = {n: (int(e["data_offsets"][0]), int(e["data_offsets"][1])) for n, e in header.items()}
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path} has a header that is not one of safetensors ({error!r}); write it again") from None
        size = path.stat().st_size - self.start
        for name, spec in self.specs.items():
            first, last = self.places[name]
            if not 0 <= first <= last <= size or last - first != spec.bytes or any(n < 0 for n in spec.shape):
                raise UserError(f"{path} ends before {name}, or has other sizes than it says; write it again")
        self.memory = torch.from_file(str(path), shared=False, size=self.start + size, dtype=torch.uint8)

    def read(self, name: str) -> Tensor:
        """A copy of a tensor."""
        first, last = self.places[name]
        spec = self.specs[name]
        return self.memory[self.start + first : self.start + last].clone().view(spec.dtype).reshape(spec.shape)

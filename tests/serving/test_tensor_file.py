"""Files of every dtype, in rows that come one by one; damage is one line."""

import json
import stat

import pytest
import torch
from safetensors.torch import load_file, save_file

from duotone.errors import UserError
from duotone.serving.tensor_file import DTYPES, TensorFile, TensorSpec, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    values = {name: torch.randn(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    return values | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "view": torch.randn(6, 4).t()}


def write(path, values) -> None:
    rows = ((name, piece) for name, value in values.items() for piece in (value.split(2) if value.dim() else [value]))
    write_tensors(path, {name: TensorSpec.of(value) for name, value in values.items()}, rows)


def same(left: torch.Tensor, right: torch.Tensor) -> bool:
    raw = [t.contiguous().reshape(-1).view(torch.uint8) for t in (left, right)]
    return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*raw)


def test_the_package_reads_what_we_write(tmp_path) -> None:
    values = tensors()
    write(tmp_path / "a", values)
    by_package = load_file(tmp_path / "a")
    assert by_package.keys() == values.keys() and all(same(by_package[name], value) for name, value in values.items())


def test_we_read_what_the_package_writes(tmp_path) -> None:
    values = {name: value.contiguous() for name, value in tensors().items()}
    save_file(values, tmp_path / "a", metadata={"format": "pt"})
    file = TensorFile(tmp_path / "a")
    assert file.specs.keys() == values.keys() and all(same(file.read(name), value) for name, value in values.items())


def test_whoever_may_enter_the_folder_may_read_its_files(tmp_path) -> None:
    """A server runs as another user."""
    tmp_path.chmod(0o750)
    write(tmp_path / "a", {"a": torch.zeros(2)})
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def header(**changes) -> bytes:
    entry = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes
    text = json.dumps({"a": entry}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x01",
        (2**63).to_bytes(8, "little"),
        b"\x05\0\0\0\0\0\0\0[1,2]",
        b"\x02\0\0\0\0\0\0\0{x",
        header(),
        header(dtype="F31") + bytes(8),
        header(shape=[3]) + bytes(8),
        header(shape=[-2]) + bytes(8),
        header(data_offsets=[4, 12]) + bytes(8),
        header(data_offsets=[8, 0]) + bytes(8),
        header(shape=None) + bytes(8),
    ],
)
def test_damaged_files_are_one_line(content: bytes, tmp_path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(UserError, match=r"^[^\n]*a [^\n]*write it again[^\n]*$"):
        TensorFile(tmp_path / "a")

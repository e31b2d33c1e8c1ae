"""Our files are those of the safetensors package, and theirs are ours; damage is one line."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from duotone.errors import UserError
from duotone.serving.tensor_file import DTYPES, TensorFile, TensorSpec, write_tensors


def tensors() -> dict[str, torch.Tensor]:
    values = {name: torch.randn(3, 5).to(dtype) for name, dtype in DTYPES.items()}
    return values | {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 4), "view": torch.randn(6, 4).t()}


def write(path, values) -> None:
    write_tensors(path, {name: TensorSpec.of(value) for name, value in values.items()}, values.items())


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


def test_a_tensor_is_written_before_the_next_is_asked_for(tmp_path) -> None:
    values = {f"t{i}": torch.full((4,), float(i)) for i in range(3)}
    alive: list[str] = []

    def one_by_one():
        for name, value in values.items():
            alive.append(name)
            yield name, value.clone()
            assert torch.equal(TensorFile(tmp_path / "a").read(name), value)

    write_tensors(tmp_path / "a", {name: TensorSpec.of(value) for name, value in values.items()}, one_by_one())
    assert alive == list(values)


@pytest.mark.parametrize("missing", ["one", "shape"])
def test_what_was_not_planned_is_refused(missing: str, tmp_path) -> None:
    specs = {"a": TensorSpec((2,), torch.float32), "b": TensorSpec((2,), torch.float32)}
    values = {"a": torch.zeros(2)} | ({"b": torch.zeros(3)} if missing == "shape" else {})
    with pytest.raises(UserError, match=r"^[^\n]*planned[^\n]*$"):
        write_tensors(tmp_path / "a", specs, values.items())


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

"""Folders of exported files: shards, their index, and a replacement that leaves the old folder whole until the end."""

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from torch import Tensor

from duotone.errors import UserError
from duotone.serving.tensor_file import TensorFile, TensorSpec, write_tensors

INDEX, WHOLE, CONFIG, NOTES = "model.safetensors.index.json", "model.safetensors", "config.json", "duotone.json"
WRITTEN = (WHOLE, "model-?????-of-?????.safetensors", INDEX, CONFIG, NOTES, "generation_config.json")
"""What an export writes. Other files of a folder stay, such as those of a tokenizer."""


class Item(Protocol):
    """Tensors that are computed together."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]: ...

    def tensors(self) -> Mapping[str, Tensor]: ...


def write_folder(path: Path, items: Sequence[Item], largest: int, texts: Callable[[], Mapping[str, str]]) -> int:
    """Write a folder next to `path`, then put it in its place. Returns the bytes of the tensors.

    `texts` gives the other files; it is called when all tensors are written. A failure leaves `path` as it was.
    """
    path = path.resolve()
    if path in (Path.cwd(), Path(path.root)) or (path.exists() and not path.is_dir()):
        raise UserError(f"an export takes the place of a folder, and {path} cannot be replaced; give another")
    fresh = path.with_name(f".{path.name}.partial")
    if _before(path).exists() and not path.exists():  # a replacement died between its two renames
        _before(path).rename(path)
    shutil.rmtree(_before(path), ignore_errors=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir()
    try:
        total = _write_shards(fresh, items, largest)
        for name, text in texts().items():
            (fresh / name).write_text(text)
        _replace(path, fresh)
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise
    return total


def _write_shards(folder: Path, items: Sequence[Item], largest: int) -> int:
    shards: list[list[Item]] = []
    room = 0
    for item in items:
        size = sum(spec.bytes for spec in item.specs.values())
        if not shards or size > room:
            shards.append([])
            room = largest
        shards[-1].append(item)
        room -= size
    places: dict[str, str] = {}
    total = 0
    for at, members in enumerate(shards, 1):
        name = WHOLE if len(shards) == 1 else f"model-{at:05}-of-{len(shards):05}.safetensors"
        specs = {key: spec for item in members for key, spec in item.specs.items()}
        write_tensors(folder / name, specs, (pair for item in members for pair in item.tensors().items()))
        places.update(dict.fromkeys(specs, name))
        total += sum(spec.bytes for spec in specs.values())
    if len(shards) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    return total


def _before(path: Path) -> Path:
    return path.with_name(f".{path.name}.before")


def _replace(path: Path, fresh: Path) -> None:
    if path.exists():
        written = {entry for pattern in WRITTEN for entry in path.glob(pattern)}
        for entry in set(path.iterdir()) - written:
            if entry.is_dir():
                shutil.copytree(entry, fresh / entry.name, symlinks=True, copy_function=os.link)
            else:
                os.link(entry, fresh / entry.name, follow_symlinks=False)
        path.rename(_before(path))
    fresh.rename(path)
    shutil.rmtree(_before(path), ignore_errors=True)


def read_text(path: Path, name: str) -> dict[str, object]:
    """A JSON file of a folder. UserError if it is absent or no object."""
    if not path.is_dir():
        old = f"; an export died, and {_before(path)} holds what was there" if _before(path).exists() else ""
        raise UserError(f"{path} is no folder of an export{old}")
    try:
        table = json.loads((path / name).read_text())
    except FileNotFoundError:
        raise UserError(f"{path} has no {name}, so it is no whole export; export again") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path / name} is no JSON ({error}); export again") from None
    if not isinstance(table, dict):
        raise UserError(f"{path / name} is no JSON object; export again")
    return table


def open_files(path: Path) -> dict[str, TensorFile]:
    """The open file of each tensor, by name. UserError if a file is absent, damaged, or lacks a tensor."""
    if not (path / INDEX).exists():
        whole = _open(path / WHOLE)
        return dict.fromkeys(whole.specs, whole)
    places = read_text(path, INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(Path(str(name)).name == name for name in places.values()):
        raise UserError(f"{path / INDEX} says not where tensors are; export again")
    files = {name: _open(path / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in files[name].specs:
            raise UserError(f"{path / name} lacks {tensor}, so it is no whole export; export again")
    return {tensor: files[name] for tensor, name in places.items()}


def _open(path: Path) -> TensorFile:
    if not path.is_file():
        raise UserError(f"{path} is absent, so {path.parent} is no whole export; export again")
    return TensorFile(path)

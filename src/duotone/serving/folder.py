"""Folders of exported files: shards, their index, and a replacement that leaves the old folder whole until the end."""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from torch import Tensor

from duotone import files
from duotone.errors import UserError, path_errors
from duotone.serving.tensor_file import TensorFile, TensorSpec, split_rows, write_tensors

INDEX, WHOLE, CONFIG, NOTES = "model.safetensors.index.json", "model.safetensors", "config.json", "duotone.json"
WRITTEN = (WHOLE, "model-?????-of-?????.safetensors", INDEX, CONFIG, NOTES, "generation_config.json")
"""The files that an export writes. Other files of a folder stay, such as those of a tokenizer."""
PROGRESS = "progress.json"


class Note(NamedTuple):
    """What an export learns of a quantized weight when it is encoded. `amax` is exact: its hexadecimal digits."""

    weight: str
    format: str
    source: str
    error: float
    amax: str | None


class Item(Protocol):
    """Tensors that are computed together. Their notes exist after all were computed."""

    @property
    def specs(self) -> Mapping[str, TensorSpec]:
        """What is stored, by name."""
        ...

    @property
    def notes(self) -> Sequence[Note]:
        """What became known while the tensors were computed."""
        ...

    def tensors(self) -> Iterable[tuple[str, Tensor]]:
        """The tensors by name, in pieces of rows."""
        ...

    def sources(self) -> Iterable[object]:
        """What decides the tensors: other tensors, and values that `repr` tells apart."""
        ...


def as_path(function: str, path: object) -> Path:
    """A folder that a user named. UserError for something that is no path."""
    if not isinstance(path, str | os.PathLike):
        raise UserError(f"{function} takes the path of a folder; got {type(path).__name__}")
    return Path(path)


def write_folder(
    path: Path, items: Sequence[Item], largest: int, texts: Callable[[Sequence[Note]], Mapping[str, str]]
) -> tuple[int, list[Note]]:
    """Write a folder next to `path`, then put it in its place. Returns the bytes of the tensors, and all notes.

    `texts` gives the other files; it is called when all tensors are written. A failure leaves `path` as it was. If the
    process dies, the next export of the same tensors goes on after the last whole shard. UserError while another
    process exports to `path`.
    """
    with path_errors("cannot export to", path, "make room, or give another folder"):
        path = Path(os.path.realpath(path))
        _refuse_place(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        return _write_locked(path, items, largest, texts)


def _write_locked(
    path: Path, items: Sequence[Item], largest: int, texts: Callable[[Sequence[Note]], Mapping[str, str]]
) -> tuple[int, list[Note]]:
    """`write_folder`, to an absolute path that a new folder can take the place of."""
    with (
        files.locked(path.with_name(f".{path.name}.lock"), path, "call export in one process only"),
        files.publish_folder(path) as fresh,
    ):
        total, notes = _write_shards(fresh, items, largest)
        for name, text in texts(notes).items():
            (fresh / name).write_text(text)
        (fresh / PROGRESS).unlink(missing_ok=True)
        _take_others(path, fresh)
    return total, notes


def _refuse_place(path: Path) -> None:
    """UserError unless a new folder can take the place of `path`: programs may be at work in what is no model."""
    file = next((parent for parent in path.parents if parent.exists() and not parent.is_dir()), None)
    if file is not None:
        raise UserError(f"{path} lies in {file}, which is a file; give another folder")
    here = Path.cwd()
    if path in (here, *here.parents) or (path.exists() and not path.is_dir()):
        raise UserError(f"an export takes the place of a folder, and {path} cannot be replaced; give another")
    is_model = any(True for pattern in WRITTEN for _ in path.glob(pattern))
    if not is_model and path.is_dir() and any(entry.is_dir() for entry in path.iterdir()):
        raise UserError(
            f"{path} has folders and no model, so an export does not take its place; give a new folder in it"
        )


def _write_shards(folder: Path, items: Sequence[Item], largest: int) -> tuple[int, list[Note]]:
    shards: list[list[Item]] = []
    room = 0
    for item in items:
        size = sum(spec.bytes for spec in item.specs.values())
        if not shards or size > room:
            shards.append([])
            room = largest
        shards[-1].append(item)
        room -= size
    count = len(shards)
    names = [WHOLE] if count == 1 else [f"model-{at:05}-of-{count:05}.safetensors" for at in range(1, count + 1)]
    progress = _Progress(folder, names)
    places: dict[str, str] = {}
    total, notes = 0, list[Note]()
    for name, members in zip(names, shards, strict=True):
        specs = {key: spec for item in members for key, spec in item.specs.items()}
        notes += progress.write(name, specs, members)
        places.update(dict.fromkeys(specs, name))
        total += sum(spec.bytes for spec in specs.values())
    if count > 1:
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (folder / INDEX).write_text(json.dumps(index, indent=1))
    for name, size in progress.sizes.items():
        if not _is_file(folder / name) or (folder / name).stat().st_size != size:
            raise UserError(f"{folder / name} was changed while the export ran; export again")
    return total, notes


class _Progress:
    """The whole shards of a folder: digests of their sources and of their bytes, and their notes.

    The first line of the record is the digest of the rest. A damaged record counts as none.
    """

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self.shards, self.sizes = folder, dict[str, list[object]](), dict[str, int]()
        try:
            digest, _, text = (folder / PROGRESS).read_text().partition("\n")
            if digest == hashlib.sha256(text.encode()).hexdigest():
                shards = json.loads(text)
                self.shards = {name: shards[name] for name in names if name in shards}
        except (OSError, ValueError):
            pass  # there was no export, or it died before its first shard was whole
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry.name not in (PROGRESS, *self.shards) or not _is_file(entry):
                entry.unlink()

    def write(self, name: str, specs: Mapping[str, TensorSpec], items: Sequence[Item]) -> list[Note]:
        """Write a shard unless it is whole. Returns its notes."""
        file, source = self.folder / name, hashlib.sha256(repr(specs).encode())
        for part in (part for item in items for part in item.sources()):
            for rows in split_rows(part.detach()) if isinstance(part, Tensor) else ():
                source.update(rows.contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
            source.update(b"" if isinstance(part, Tensor) else repr(part).encode())
        digests = self.shards.get(name, [])[:2]
        if not file.exists() or digests != [source.hexdigest(), _digest(file)]:
            file.unlink(missing_ok=True)
            write_tensors(file, specs, (pair for item in items for pair in item.tensors()))
            self.shards[name] = [source.hexdigest(), _digest(file), [note for item in items for note in item.notes]]
            text = json.dumps(self.shards)
            record = f"{hashlib.sha256(text.encode()).hexdigest()}\n{text}"
            files.publish_file(self.folder / PROGRESS, record.encode())
        self.sizes[name] = file.stat().st_size
        return [Note(*note) for note in cast("list[Note]", self.shards[name][2])]


def _is_file(path: Path) -> bool:
    return path.is_file() and not path.is_symlink()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _take_others(path: Path, fresh: Path) -> None:
    """Link the files of `path` that no export writes into the folder that takes its place."""
    if path.exists():
        written = {entry for pattern in WRITTEN for entry in path.glob(pattern)}
        for entry in set(path.iterdir()) - written:
            if entry.is_dir():
                shutil.copytree(entry, fresh / entry.name, symlinks=True, copy_function=os.link)
            else:
                os.link(entry, fresh / entry.name, follow_symlinks=False)
        shutil.copymode(path, fresh)


def read_text(path: Path, name: str) -> dict[str, object]:
    """A JSON file of a folder. UserError if it is absent or no object."""
    if not path.is_dir():
        before = files.moved_aside(path)
        old = f"; an export died, and {before} holds what was there" if before else ""
        raise UserError(f"{path} is no folder of an export{old or '; give one that duotone.export wrote'}")
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
    opened = {name: _open(path / name) for name in sorted(set(places.values()))}
    for tensor, name in places.items():
        if tensor not in opened[name].specs:
            raise UserError(f"{path / name} lacks {tensor}, so it is no whole export; export again")
    return {tensor: opened[name] for tensor, name in places.items()}


def _open(path: Path) -> TensorFile:
    if not path.is_file():
        raise UserError(f"{path} is absent, so {path.parent} is no whole export; export again")
    return TensorFile(path)

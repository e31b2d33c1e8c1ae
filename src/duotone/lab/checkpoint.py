"""Checkpoints of a training run: one folder a step, safetensors for tensors, JSON for the rest, and digests.

A folder `step-00000100` holds `model.safetensors` (the parameters by state dict name, a tied one once),
`training.safetensors` (masters, moments, rounding seeds, the state of torch's generator), `meta.json` and
`SHA256SUMS`, which `sha256sum -c` checks.
"""

import hashlib
import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from duotone.errors import UserError
from duotone.lab import files

MODEL, TRAINING, META, DIGESTS = "model.safetensors", "training.safetensors", "meta.json", "SHA256SUMS"
LAYOUT = 1
KEPT = 3
STEP_NAME = re.compile(r"step-(\d{8,})")


@dataclass(frozen=True)
class Checkpoint:
    """All that the next step depends on: `meta` is JSON-ready, `aliases` maps tied names to stored ones."""

    step: int
    model: dict[str, Tensor]
    aliases: dict[str, str]
    training: dict[str, Tensor]
    meta: dict[str, Any]


def unique_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict of `model` with each tied tensor once, and the names that share one of them."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (known := first.setdefault(id(tensor), name)) != name:
            aliases[name] = known
        else:
            tensors[name] = tensor.detach()
    return tensors, aliases


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = KEPT) -> Path:
    """Publish `checkpoint` below `folder`, then remove all but the newest `keep`; gives the new folder.

    UserError where the disk refuses it; the earlier checkpoints stay as they were.
    """
    target = folder / f"step-{checkpoint.step:08d}"
    meta = {"layout": LAYOUT, "step": checkpoint.step, "aliases": checkpoint.aliases, **checkpoint.meta}
    contents = {
        MODEL: safetensors.torch.save(_portable(checkpoint.model)),
        TRAINING: safetensors.torch.save(_portable(checkpoint.training)),
        META: json.dumps(meta, indent=1).encode(),
    }
    digests = "".join(f"{_digest(content)}  {name}\n" for name, content in contents.items())
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with files.publish_folder(target) as temporary:
            for name, content in {**contents, DIGESTS: digests.encode()}.items():
                files.write_synced(temporary / name, content)
        for old in steps(folder)[:-keep]:
            shutil.rmtree(old)
    except OSError as error:
        raise UserError(
            f"cannot save the checkpoint {target} ({error.strerror}): earlier ones are kept; make room and resume"
        ) from error
    return target


def load(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in the folder `path`; UserError where it is incomplete or damaged."""
    contents = {name: _read(path, name) for name in (DIGESTS, MODEL, TRAINING, META)}
    lines = contents[DIGESTS].decode(errors="replace").splitlines()
    expected = {name: digest for digest, _, name in (line.partition("  ") for line in lines)}
    for name in (MODEL, TRAINING, META):
        if _digest(contents[name]) != expected.get(name):
            raise _damaged(path, f"{name} does not match {DIGESTS}")
    try:
        meta = json.loads(contents[META])
        if meta.pop("layout") != LAYOUT:
            raise _damaged(path, f"its layout is not {LAYOUT}, the one that this version reads")
        model, training = (safetensors.torch.load(contents[name]) for name in (MODEL, TRAINING))
        return Checkpoint(meta.pop("step"), model, meta.pop("aliases"), training, meta)
    except (SafetensorError, json.JSONDecodeError, KeyError) as error:
        raise _damaged(path, f"unreadable content: {error}") from error


def require_same_model(checkpoint: Checkpoint, model: nn.Module, path: Path) -> None:
    """UserError unless the tensors of `checkpoint` have the names, shapes, dtypes and ties of `model`."""
    tensors, aliases = unique_state(model)
    stored = {name: (tuple(t.shape), t.dtype) for name, t in checkpoint.model.items()}
    wanted = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if stored == wanted and aliases == checkpoint.aliases:
        return
    different = sorted(name for name in stored.keys() | wanted.keys() if stored.get(name) != wanted.get(name))
    name = different[0] if different else next(iter(aliases.keys() ^ checkpoint.aliases.keys()))
    raise UserError(
        f"the checkpoint {path} is of another model: {name} is {_words(stored.get(name))} there and "
        f"{_words(wanted.get(name))} here; resume with the model and preset that it was made with"
    )


def steps(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, the oldest first."""
    found = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


def latest(folder: Path) -> Path:
    """The newest checkpoint below `folder`; UserError when there is none."""
    found = steps(folder)
    if not found:
        raise UserError(
            f"no checkpoint to resume from in {folder}: train without --resume, or give the --out of that run"
        )
    return found[-1]


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path, name: str) -> bytes:
    try:
        return (path / name).read_bytes()
    except OSError as error:
        raise _damaged(path, f"{name}: {error.strerror}") from error


def _damaged(path: Path, what: str) -> UserError:
    return UserError(f"the checkpoint {path} cannot be used ({what}): remove that folder to resume from an earlier one")


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _words(found: tuple | None) -> str:
    return f"{found[0]} {found[1]}" if found else "absent"

"""Checkpoints of a training run: one folder a step, safetensors for tensors, JSON for the rest, and digests.

A folder `step-00000100` holds `model.safetensors` (the parameters by state dict name, a tied one once),
`training.safetensors` (masters, moments, rounding seeds, the state of torch's generator), `meta.json` and
`SHA256SUMS`, which `sha256sum -c` checks.
"""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
from safetensors import SafetensorError
from torch import Tensor, nn

from duotone import files
from duotone.errors import UserError, path_errors

MODEL, TRAINING, META, DIGESTS = "model.safetensors", "training.safetensors", "meta.json", "SHA256SUMS"
OF_RANKS = ".metadata"
"""In checkpoints of torch.distributed, which `--parallel` saves."""

LAYOUT = 1
MOST = 3
OBSERVED = "observed/"
"""Before the names of observed tensors in `training.safetensors`."""

STEP_NAME = re.compile(r"step-[0-9]{8,}")


@dataclass(frozen=True)
class Checkpoint:
    """All that the next step depends on: `meta` is JSON-ready, `aliases` maps tied names to stored ones.

    No step depends on `observed`; earlier versions saved none.
    """

    step: int
    model: dict[str, Tensor]
    aliases: dict[str, str]
    training: dict[str, Tensor]
    meta: dict[str, Any]
    observed: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def unique_state(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The state dict of `model` with each tied tensor once, and the names that share one of them."""
    tensors: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if (stored := first.setdefault(id(tensor), name)) != name:
            aliases[name] = stored
        else:
            tensors[name] = tensor.detach()
    return tensors, aliases


def save(folder: Path, checkpoint: Checkpoint, *, keep: int = MOST) -> Path:
    """Publish `checkpoint` below `folder`, then remove all but the newest `keep`; gives the new folder.

    UserError if the disk refuses it; the earlier checkpoints stay as they were. What a killed save left behind does
    not disturb.
    """
    target = folder / f"step-{checkpoint.step:08d}"
    meta = {"layout": LAYOUT, "step": checkpoint.step, "aliases": checkpoint.aliases, **checkpoint.meta}
    observed = {f"{OBSERVED}{name}": tensor for name, tensor in checkpoint.observed.items()}
    contents = {
        MODEL: safetensors.torch.save(_portable(checkpoint.model)),
        TRAINING: safetensors.torch.save(_portable({**checkpoint.training, **observed})),
        META: json.dumps(meta, indent=1).encode(),
    }
    digests = "".join(f"{_digest(content)}  {name}\n" for name, content in contents.items())
    remedy = "earlier ones are kept; make room and resume" if steps(folder) else "no other is saved; make room"
    with path_errors("cannot save the checkpoint", target, remedy):
        folder.mkdir(parents=True, exist_ok=True)
        with files.publish_folder(target) as temporary:
            for name, content in {**contents, DIGESTS: digests.encode()}.items():
                files.write_synced(temporary / name, content)
    for old in steps(folder)[:-keep]:
        with path_errors(f"the checkpoint {target} is saved, but cannot remove", old, "remove it by hand"):
            files.remove_folder(old)
    return target


def load(path: Path) -> Checkpoint:
    """Read and verify the checkpoint in the folder `path`; UserError if it is incomplete or damaged."""
    if (path / OF_RANKS).exists():
        raise UserError(f"the checkpoint {path} is of a run over ranks: resume it under torchrun with --parallel")
    digests, *contents = (_read(path, name) for name in (DIGESTS, MODEL, TRAINING, META))
    lines = digests.decode(errors="replace").splitlines()
    for name, content in zip((MODEL, TRAINING, META), contents, strict=True):
        if f"{_digest(content)}  {name}" not in lines:
            raise damaged(path, f"{name} does not match {DIGESTS}")
    meta = parse_meta(contents[-1], path)
    model, training = _tensors(contents[0], MODEL, path), _tensors(contents[1], TRAINING, path)
    observed = {name.removeprefix(OBSERVED): training.pop(name) for name in [*training] if name.startswith(OBSERVED)}
    return Checkpoint(meta.pop("step"), model, meta.pop("aliases"), training, meta, observed)


def parse_meta(content: bytes, path: Path) -> dict[str, Any]:
    """The table of `meta.json` without its layout; UserError unless it has a step and aliases."""
    try:
        meta = json.loads(content)
    except (ValueError, RecursionError) as error:  # also digits without end, and bytes that are no text
        raise damaged(path, f"{META} is no JSON: {error}") from error
    if not isinstance(meta, dict) or meta.pop("layout", None) != LAYOUT:
        raise damaged(path, f"its layout is not {LAYOUT}, the one that this version reads")
    step, aliases = meta.get("step"), meta.get("aliases")
    if type(step) is not int or not 0 <= step < 2**63:
        raise damaged(path, f"{META}: step is no integer from 0 on")
    if not isinstance(aliases, dict) or not all(isinstance(name, str) for name in aliases.values()):
        raise damaged(path, f"{META}: aliases is no table of names")
    return meta


def _tensors(content: bytes, name: str, path: Path) -> dict[str, Tensor]:
    try:
        return safetensors.torch.load(content)
    except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:  # also dtypes that torch lacks
        raise damaged(path, f"{name} is unreadable: {error}") from error


def require_tensors(stored: Mapping[str, Tensor], tensors: Mapping[str, Tensor], path: Path) -> None:
    """UserError unless `stored` has the names, shapes and dtypes of `tensors`: an optimizer checks no sizes itself."""
    if wrong := _difference(_in_words(stored), _in_words(tensors)):
        raise damaged(path, wrong)


def require_same_model(checkpoint: Checkpoint, model: nn.Module, path: Path) -> None:
    """UserError unless the tensors of `checkpoint` have the names, shapes, dtypes and ties of `model`."""
    if wrong := _difference(_in_words(checkpoint.model, checkpoint.aliases), _in_words(*unique_state(model))):
        remedy = "resume with the model and preset that it was made with"
        raise UserError(f"the checkpoint {path} is of another model: {wrong}; {remedy}")


def steps(folder: Path) -> list[Path]:
    """The checkpoints below `folder`, the oldest first."""
    paths = [path for path in folder.glob("step-*") if STEP_NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(paths, key=lambda path: int(path.name.removeprefix("step-")))


def newest(folder: Path) -> Path | None:
    """The newest checkpoint below `folder`, None without one."""
    return next(reversed(steps(folder)), None)


def latest(folder: Path) -> Path:
    """The newest checkpoint below `folder`; UserError if there is none."""
    return require(newest(folder), folder)


def require(path: Path | None, folder: Path) -> Path:
    """The checkpoint `path` below `folder`; UserError if there is none."""
    if path is None:
        remedy = "train without --resume, or give the --out of that run"
        raise UserError(f"no checkpoint to resume from in {folder}: {remedy}")
    return path


def _portable(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _read(path: Path, name: str) -> bytes:
    try:
        if (path / name).exists() and not (path / name).is_file():
            raise damaged(path, f"{name} is no file")
        return (path / name).read_bytes()
    except OSError as error:
        raise damaged(path, f"{name}: {error.strerror}") from error


def damaged(path: Path, what: str) -> UserError:
    """The error of a checkpoint that cannot be used, with what to do about it."""
    return UserError(f"the checkpoint {path} cannot be used ({' '.join(what.split())}): {_remedy(path)}")


def _remedy(path: Path) -> str:
    """What to do without the checkpoint in `path`."""
    if any(other != path for other in steps(path.parent)):
        return "remove that folder to resume from an earlier one"
    return "it is the only one, so train anew with another --out"


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _difference(stored: Mapping[str, str], here: Mapping[str, str]) -> str:
    """The first name that means something else in a checkpoint than here, in words; "" without one."""
    for name in sorted(stored.keys() | here.keys()):
        there, now = stored.get(name, "absent"), here.get(name, "absent")
        if there != now:
            return f"{name} is {there} there and {now} here"
    return ""


def _in_words(tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> dict[str, str]:
    """The shape and dtype of each tensor, and what each other name is tied to."""
    kinds = {name: f"{tuple(tensor.shape)} {tensor.dtype}" for name, tensor in tensors.items()}
    return kinds | {name: f"tied to {first}" for name, first in (aliases or {}).items()}

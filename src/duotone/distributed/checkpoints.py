"""Save and load training over many ranks through torch.distributed.checkpoint, on any number of them.

A checkpoint is a folder. torch writes its `.metadata` last, so a folder without it was not finished.
"""

import re
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.optim import Optimizer

from duotone.distributed.entries import (
    GROUP,
    Entry,
    as_tensor,
    empty_state,
    end_writes,
    group_entries,
    model_entries,
    named_parameters,
    optimizer_entries,
)
from duotone.errors import UserError
from duotone.modules.delayed_checkpoint import load_recipe_state, recipe_state, widest
from duotone.modules.planned import Planned
from duotone.state.seeds import load_rng_state, rng_state

METADATA = ".metadata"
RECIPE = "recipe"
"""The key of the names of recipes, as bytes."""
T = TypeVar("T")
Stored = tuple[torch.Size, torch.dtype]
STEP = re.compile(r"step-[0-9]+")


def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Tensor] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Save parameters, buffers, optimizer state, delayed scales, seeds and generators in the new folder `path`.

    Every rank of `group` calls it, all by default. `extra` are tensors of the caller, equal on all ranks. All values in
    the checkpoint are plain tensors. UserError if the folder holds a checkpoint, or if the disk refuses it.
    """
    tensors = _tensors(path, model, optimizer, extra, group)
    try:
        dcp.save(tensors, checkpoint_id=path, process_group=group, no_dist=not dist.is_initialized())  # type: ignore
    except (CheckpointException, OSError) as error:
        raise UserError(
            f"cannot save the checkpoint {path}: {_first_cause(error)}; make room, then save anew"
        ) from None


def async_save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    extra: Mapping[str, Tensor] | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> "Future[Any]":
    """`save` in the background: training may continue when it returns. Wait for the future before the next save.

    `group` communicates on CPUs during the training, so no other code may use it: `dist.new_group(backend="gloo")`. One
    process needs no group.
    """
    if group is None and _world(group) > 1:
        raise UserError('async_save communicates beside training; give it group=dist.new_group(backend="gloo")')
    tensors = _tensors(path, model, optimizer, extra, group)
    return dcp.async_save(tensors, checkpoint_id=path, process_group=group, no_dist=group is None)  # type: ignore


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> dict[str, Tensor]:
    """Load what `save` wrote, on any number of ranks, and return `extra`. The model is converted and sharded already.

    On as many ranks as were saved, training goes on with the bits of a run that did not stop. On others, every rank
    takes the largest amaxes and the smallest delayed scales of all, and the seeds of one. UserError on all ranks,
    before anything changes, if the checkpoint is damaged, or of another model. Quantized parameters have the formats
    that were saved. Plain ones go on under any recipe: a warning names both recipes if they differ.
    """
    entries, stored = _matching(Path(path), model, group)
    ranks = len({key.split(".")[1] for key in stored if key.startswith("ranks.")})
    prefix, together = f"ranks.{_rank(group) % ranks}.", ranks != _world(group)
    tensors = {key: entry.empty() for key, entry in entries.items()}
    for key, (size, dtype) in stored.items():
        of_others = together and key.startswith("ranks.") and ".delayed." in key
        if key.startswith((prefix, "extra.", RECIPE)) or of_others:
            tensors[key] = torch.empty(size, dtype=dtype)
    if optimizer is not None:
        _check_groups(path, optimizer, stored)
        tensors.update(_empty_optimizer(model, optimizer, stored))
    _read(path, tensors, process_group=group, no_dist=not dist.is_initialized())
    before, now = bytes(tensors[RECIPE].tolist()).decode() if RECIPE in tensors else "", _recipe_of(model)
    if before in ("", now):
        load_recipe_state(model, _delayed(tensors, prefix, together=together))
    else:
        words = f"was saved under {before} and goes on under {now or 'no recipe'}; delayed scales start anew"
        warnings.warn(f"the checkpoint {path} {words}", stacklevel=2)
    if optimizer is not None:
        optimizer.load_state_dict(_optimizer_state(model, optimizer, tensors))
    for key, entry in entries.items():
        entry.write(tensors[key])
    end_writes(model)
    load_rng_state(model, _below(tensors, f"{prefix}seeds."))
    torch.set_rng_state(tensors[f"{prefix}generator"].cpu())  # a default device may be set
    if torch.cuda.is_available() and f"{prefix}cuda_generator" in tensors:
        torch.cuda.set_rng_state(tensors[f"{prefix}cuda_generator"].cpu())
    return _below(tensors, "extra.")


def extra(path: str | Path) -> dict[str, Tensor]:
    """The `extra` tensors of a checkpoint, read by this process alone. UserError if it is damaged."""
    stored = {key: value for key, value in _stored(Path(path)).items() if key.startswith("extra.")}
    tensors = {key: torch.empty(size, dtype=dtype) for key, (size, dtype) in stored.items()}
    if tensors:
        _read(path, tensors, no_dist=True)
    return _below(tensors, "extra.")


def latest(folder: str | Path) -> Path | None:
    """The newest finished checkpoint among `step-<number>` in a folder; None without one."""
    finished = [path.parent for path in Path(folder).glob(f"step-*/{METADATA}") if STEP.fullmatch(path.parent.name)]
    return max(finished, key=lambda path: int(path.name.removeprefix("step-")), default=None)


def _tensors(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None,
    extra: Mapping[str, Tensor] | None,
    group: dist.ProcessGroup | None,
) -> dict[str, Tensor]:
    if (Path(path) / METADATA).exists():
        raise UserError(f"{path} holds a checkpoint; save into a new folder, and remove the old one afterwards")
    entries = model_entries(model, recipe_state(model))
    if optimizer is not None:
        entries |= optimizer_entries(model, optimizer)
    tensors = {key: entry.saved() for key, entry in entries.items()}
    tensors |= {f"extra.{key}": as_tensor(value) for key, value in (extra or {}).items()}
    prefix = f"ranks.{_rank(group)}"
    tensors |= {f"{prefix}.seeds.{key}": seed for key, seed in rng_state(model).items()}
    tensors |= {f"{prefix}.delayed.{key}": value for key, value in recipe_state(model).items()}
    if recipe := _recipe_of(model):
        tensors[RECIPE] = torch.frombuffer(bytearray(recipe.encode()), dtype=torch.uint8)
    tensors[f"{prefix}.generator"] = torch.get_rng_state()
    if torch.cuda.is_available():
        tensors[f"{prefix}.cuda_generator"] = torch.cuda.get_rng_state()
    return tensors


def _matching(
    path: Path, model: nn.Module, group: dist.ProcessGroup | None
) -> tuple[dict[str, Entry], dict[str, Stored]]:
    """The entries that a load writes, and the stored tensors.

    UserError on every rank if they do not fit on one rank. So no rank waits in a load that the others do not start.
    """
    problem, entries, stored = "", {}, {}
    try:
        stored, entries = _stored(path), model_entries(model, recipe_state(model))
    except UserError as error:
        problem = str(error)
    expected = set[str]().union(*_from_all(set(entries), group))
    unread = {key for key in stored if key.startswith("model.")} - expected
    try:
        _require_alike(path, entries, stored, sorted(unread))
    except UserError as error:
        problem = problem or str(error)
    if first := next(filter(None, _from_all(problem, group)), None):
        raise UserError(first)
    return entries, stored


def _recipe_of(model: nn.Module) -> str:
    """The names of the recipes that modules follow outside of regions."""
    return ", ".join(sorted({module.recipe.name for module in model.modules() if isinstance(module, Planned)}))


def _read(path: str | Path, tensors: dict[str, Tensor], **ranks: Any) -> None:
    """Fill the tensors with those of the same names."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process needs none
            dcp.load(tensors, checkpoint_id=path, **ranks)  # type: ignore
    except (CheckpointException, OSError, RuntimeError, EOFError) as error:
        raise UserError(f"the checkpoint {path} is damaged: {_first_cause(error)}; load an earlier one") from None


def _from_all(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """The values of all ranks."""
    values = [value] * _world(group)
    if dist.is_initialized():
        dist.all_gather_object(values, value, group)
    return values


def _stored(path: Path) -> dict[str, Stored]:
    """The size and dtype of each tensor of a checkpoint."""
    if not (path / METADATA).is_file():
        raise UserError(f"{path} holds no finished checkpoint; load an earlier one")
    try:
        metadata = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:  # a damaged pickle raises anything
        raise UserError(
            f"the checkpoint {path} is damaged: {METADATA} cannot be read ({_first_cause(error)})"
        ) from None
    tensors = {key: value for key, value in metadata.items() if isinstance(value, TensorStorageMetadata)}
    if not any(key.startswith("ranks.") for key in tensors):
        raise UserError(f"{path} is no checkpoint of duotone.distributed.save; load it with what wrote it")
    return {key: (value.size, value.properties.dtype) for key, value in tensors.items()}


def _require_alike(
    path: Path, entries: Mapping[str, Entry], stored: Mapping[str, Stored], unknown: Sequence[str]
) -> None:
    """UserError unless the checkpoint has the entries of this rank. `unknown` are stored tensors that no rank needs."""
    missing = sorted(entries.keys() - stored.keys())
    remedy = "convert and shard the model as the one that was saved"
    if missing or unknown:
        words = [*(f"has {key}" for key in unknown[:1]), *(f"lacks {key}" for key in missing[:1])]
        raise UserError(f"the checkpoint {path} is of another recipe or model: it {' and '.join(words)}; {remedy}")
    for key, entry in entries.items():
        live, saved = (entry.shape, entry.live.dtype), stored[key]
        if live != saved:
            words = [f"{tuple(shape)} in {dtype}" for shape, dtype in (saved, live)]
            raise UserError(f"the checkpoint {path} has {key} as {words[0]}, and this run as {words[1]}; {remedy}")


def _check_groups(path: str | Path, optimizer: Optimizer, stored: Mapping[str, Stored]) -> None:
    """UserError for another number of parameter groups; a warning for numbers that another optimizer did not save."""
    saved = {key.split(".")[1] for key in stored if key.startswith(f"{GROUP}.")}
    if not saved:
        raise UserError(f"the checkpoint {path} has no optimizer; load it without one")
    live = len(optimizer.param_groups)
    if len(saved) != live:
        raise UserError(
            f"the checkpoint {path} has {len(saved)} parameter groups, and this optimizer {live}; make it as the one "
            "that was saved, or load without it"
        )
    if lacking := sorted({key.split(".")[2] for key in group_entries(optimizer).keys() - stored.keys()}):
        words = f"is of another optimizer than {type(optimizer).__name__}: it has no {', '.join(lacking)}"
        warnings.warn(f"the checkpoint {path} {words}; they stay, and states that are missing start anew", stacklevel=3)


def _delayed(tensors: Mapping[str, Tensor], prefix: str, *, together: bool) -> dict[str, Tensor]:
    """The delayed states of this rank. For another number of ranks: the largest amaxes, the smallest scales."""
    states = _below(tensors, f"{prefix}delayed.")
    if not together:
        return states
    ranks = {".".join(name.split(".", 2)[:2]) for name in tensors}
    others = widest([_below(tensors, f"{rank}.delayed.") for rank in sorted(ranks)])
    return {key: others[key] for key in states}


def _empty_optimizer(model: nn.Module, optimizer: Optimizer, stored: Mapping[str, Stored]) -> dict[str, Tensor]:
    groups = {key: entry.empty() for key, entry in group_entries(optimizer).items() if key in stored}
    return groups | {
        key: empty_state(parameter, *stored[key])
        for name, parameter in named_parameters(model, optimizer)
        for key in stored
        if key.startswith(f"optimizer.{name}.") and "." not in key.removeprefix(f"optimizer.{name}.")
    }


def _optimizer_state(model: nn.Module, optimizer: Optimizer, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state_dict of an optimizer, with the state and the numbers that were loaded."""
    state = {
        at: _below(tensors, f"optimizer.{name}.") for at, (name, _) in enumerate(named_parameters(model, optimizer))
    }
    groups = optimizer.state_dict()["param_groups"]
    for at, group in enumerate(groups):
        for key, value in _below(tensors, f"{GROUP}.{at}.").items():
            if isinstance(group[key], tuple):
                group[key] = tuple(value.tolist())
            else:
                group[key] = value if isinstance(group[key], Tensor) else type(group[key])(value.item())
    return {"state": {at: each for at, each in state.items() if each}, "param_groups": groups}


def _below(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def _first_cause(error: BaseException) -> str:
    """The error in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_first_cause(cause)}"
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def _rank(group: dist.ProcessGroup | None) -> int:
    return dist.get_rank(group) if dist.is_initialized() else 0


def _world(group: dist.ProcessGroup | None) -> int:
    return dist.get_world_size(group) if dist.is_initialized() else 1

"""The run behind `duotone train`: a trainer at its first step, or where the newest checkpoint left it."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import click

from duotone import recipes
from duotone.cli import summary
from duotone.cli.command_options import Typed
from duotone.cli.inputs import config_from, make_strict
from duotone.errors import UserError
from duotone.lab import checkpoint, data, files, meta
from duotone.lab.loop import Run
from duotone.lab.trainer import TrainConfig, Trainer
from duotone.recipes import Recipe, Schedule

CHECKPOINTS = "checkpoints"


@contextmanager
def opened(
    folder: Path, recipe: str | None, strict: bool, typed: Mapping[str, Typed], *, resume: bool, force: bool
) -> Iterator[tuple[Trainer, Run]]:
    """A trainer and its run so far, with `folder` locked.

    UserError where a fresh run finds checkpoints in the folder, or one to resume finds none that fits.
    """
    checkpoints = folder / CHECKPOINTS
    if not resume:
        files.require_writable(folder)
        _require_no_run(folder)
        summary.require_none(folder, force)
        chosen, config = make_strict(recipes.load_any(recipe or "mxfp8"), strict), config_from(typed)
        trainer = _trainer(config, chosen)
        with files.locked(files.make_folder(folder)):
            files.remove_leftovers(checkpoints, checkpoint.STEP_NAME)
            _require_no_run(folder)  # another process may have had the lock meanwhile
            yield trainer, Run(chosen.name, chosen, config.seed)
        return
    files.require_writable(folder)
    checkpoint.latest(checkpoints)  # a UserError before the lock makes a file
    with files.locked(folder):
        files.remove_leftovers(checkpoints, checkpoint.STEP_NAME)
        path = checkpoint.latest(checkpoints)
        saved = checkpoint.load(path)
        meta.require_run(saved, path)
        stored = recipes.any_from_dict(saved.meta["recipe"], where=str(path))
        chosen = make_strict(recipes.load_any(recipe) if recipe else stored, strict)
        trainer = _trainer(config_from(typed, saved.meta["config"]), chosen)
        trainer.restore(saved, path)
        if note := trainer.config.length_note(saved.meta["config"]["steps"], trainer.done):
            click.echo(note, err=True)
        yield trainer, Run(chosen.name, chosen, trainer.config.seed, **saved.meta["history"])


def _trainer(config: TrainConfig, chosen: Recipe | Schedule) -> Trainer:
    return Trainer(config, chosen, data.load(config.data, context=config.preset.model.context))


def _require_no_run(folder: Path) -> None:
    if checkpoint.steps(folder / CHECKPOINTS):
        raise UserError(f"{folder} holds checkpoints: continue them with --resume, or choose another --out")

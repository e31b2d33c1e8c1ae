"""The runs behind `duotone compare` and `duotone train`: planned anew, or from where they were stopped.

Cheap checks come first.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from duotone import files
from duotone import recipes as library
from duotone.errors import UserError
from duotone.recipes import Recipe, Schedule
from duotone_lab.cli import summary
from duotone_lab.cli.command_options import Typed
from duotone_lab.cli.inputs import config_from, make_strict
from duotone_lab.training import checkpoint, comparison, continuation, data, document, evidence, meta, outputs, texts
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.loop import Run
from duotone_lab.training.presets import DEFAULT_RECIPES
from duotone_lab.training.schema import Settings
from duotone_lab.training.trainer import Trainer

CHECKPOINTS = "checkpoints"


class Runs(NamedTuple):
    """What is trained, the runs with what is already known of them, the text, and settings that no run reads."""

    config: TrainConfig
    runs: list[Run]
    corpus: Corpus
    about: Settings


def new_comparison(
    folder: Path,
    names: Sequence[str],
    typed: Mapping[str, Typed],
    *,
    size: tuple[int, int] | None,
    seeds: int,
    strict: bool,
    force: bool,
) -> Runs:
    """A new comparison of the recipes `names`; UserError if `folder` holds a report or a search, unless `force`.

    A search in `folder` goes, so that `duotone search --resume` cannot replace the report of this comparison.
    """
    outputs.require_writable(folder)
    summary.require_none(folder, force)
    recipes = [make_strict(library.load(name), strict) for name in names or DEFAULT_RECIPES]
    config = config_from(typed)
    texts.require(config.data)
    planned = Runs(
        config,
        comparison.plan_runs(config, recipes, seeds),
        data.load(config.data, context=config.preset.model.context),
        {} if size is None else {"size": size},
    )
    if (folder / evidence.EVIDENCE).exists():  # without it recipe.toml and checkpoints are the user's
        evidence.remove(folder)
    return planned


def continued_comparison(folder: Path, typed: Sequence[object], *, seeds: int) -> Runs:
    """The comparison in `folder` with its settings, and with more seeds where asked for.

    UserError if other options were `typed`, or if the data or the model has changed.
    """
    if any(typed):
        raise UserError(f"--resume takes the settings of the comparison in {folder}: leave all but --out and --seeds")
    outputs.require_writable(folder)
    result = continuation.load(path := folder / summary.RESULT)
    recipes = continuation.recipes_of(result, path)  # a UserError before the settings are read
    settings = result["settings"]
    config = config_from({}, settings.get("config"))
    runs = comparison.plan_runs(config, recipes, max(seeds, settings.get("seeds", 1)))
    corpus = data.load(config.data, context=config.preset.model.context)
    if document.digests(config, corpus) != settings.get("digests"):
        raise UserError(f"the data or the model has changed since the comparison in {folder}: compare anew")
    about: Settings = {"command": settings["command"]} if "command" in settings else {}
    if "size" in settings:
        about["size"] = settings["size"]
    return Runs(config, continuation.take_over(runs, result, config.steps), corpus, about)


@contextmanager
def training(
    folder: Path, recipe: str | None, strict: bool, typed: Mapping[str, Typed], *, resume: bool, force: bool
) -> Iterator[tuple[Trainer, Run]]:
    """A trainer and its run so far, with `folder` locked.

    UserError if a fresh run finds checkpoints in the folder, or one to resume finds none that fits.
    """
    checkpoints = folder / CHECKPOINTS
    outputs.require_writable(folder)
    if not resume:
        _require_no_run(folder)
        summary.require_none(folder, force)
        chosen, config = settings(recipe, strict, typed)
        trainer = _trainer(config, chosen)
        with outputs.locked(outputs.make_folder(folder)):
            files.remove_leftovers(checkpoints, checkpoint.STEP_NAME)
            _require_no_run(folder)  # another process may have had the lock meanwhile
            yield trainer, Run(chosen.name, chosen, config.seed)
        return
    checkpoint.latest(checkpoints)  # a UserError before the lock makes a file
    with outputs.locked(folder):
        files.remove_leftovers(checkpoints, checkpoint.STEP_NAME)
        path = checkpoint.latest(checkpoints)
        trainer, saved = trainer_of(path, recipe, strict, typed)
        run = Run(trainer.chosen.name, trainer.chosen, trainer.config.seed)
        run.resume(trainer, path)
        tell_length(trainer.config, saved)
        yield trainer, run


def trainer_of(
    path: Path, recipe: str | None, strict: bool, typed: Mapping[str, Typed]
) -> tuple[Trainer, checkpoint.Checkpoint]:
    """A trainer with the settings of the checkpoint `path`, and the checkpoint, which is yet to be restored."""
    saved = checkpoint.load(path)
    meta.require_run(saved, path)  # before its config makes a trainer
    chosen, config = settings(recipe, strict, typed, saved, path)
    return _trainer(config, chosen), saved


def settings(
    recipe: str | None,
    strict: bool,
    typed: Mapping[str, Typed],
    saved: checkpoint.Checkpoint | None = None,
    path: Path = Path(),
) -> tuple[Recipe | Schedule, TrainConfig]:
    """The recipe and the config of the options. Where one was not typed it is that of `saved`, else its default."""
    if saved is None:
        return make_strict(library.load_any(recipe or "mxfp8"), strict), config_from(typed)
    stored = library.any_from_dict(saved.meta["recipe"], where=str(path))
    chosen = make_strict(library.load_any(recipe) if recipe else stored, strict)
    return chosen, config_from(typed, saved.meta["config"])


def tell_length(config: TrainConfig, saved: checkpoint.Checkpoint) -> None:
    """Print what another number of steps changes."""
    if note := config.length_note(saved.meta["config"]["steps"], saved.step):
        click.echo(note, err=True)


def _trainer(config: TrainConfig, chosen: Recipe | Schedule) -> Trainer:
    return Trainer(config, chosen, data.load(config.data, context=config.preset.model.context))


def _require_no_run(folder: Path) -> None:
    if checkpoint.steps(folder / CHECKPOINTS):
        raise UserError(f"{folder} holds checkpoints: continue them with --resume, or choose another --out")

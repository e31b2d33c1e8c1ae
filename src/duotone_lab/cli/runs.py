"""The runs behind `duotone compare` and `duotone train`: planned anew, or from where they were stopped.

Cheap checks come first.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import click

from duotone import files
from duotone import recipes as library
from duotone.errors import UserError
from duotone_lab.cli import summary
from duotone_lab.cli.command_options import Typed
from duotone_lab.cli.inputs import config_from, make_strict
from duotone_lab.cli.processes import Processes
from duotone_lab.training import checkpoint, comparison, continuation, data, document, evidence, outputs, texts
from duotone_lab.training.checkpoint import Checkpoint
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.loop import Run
from duotone_lab.training.presets import DEFAULT_RECIPES
from duotone_lab.training.schema import Settings
from duotone_lab.training.trainer import Trainer

CHECKPOINTS = "checkpoints"
NOTHING: Mapping[str, Typed] = {}


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
        {"size": size},
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
    corpus = document.unchanged(config, settings.get("digests"), f"the comparison in {folder}: compare anew")
    about: Settings = {"command": settings.get("command"), "size": settings.get("size")}
    return Runs(config, continuation.take_over(runs, result, config.steps), corpus, about)


@contextmanager
def training(
    ranks: Processes,
    folder: Path,
    recipe: str | None,
    strict: bool,
    typed: Mapping[str, Typed],
    *,
    resume: bool,
    force: bool,
) -> Iterator[tuple[Trainer, Run]]:
    """A trainer and its run so far, with `folder` locked. What torchrun starts again resumes where it can.

    UserError if a fresh run finds checkpoints in the folder, or one to resume finds none that fits.
    """
    checkpoints, newest = folder / CHECKPOINTS, ranks.kind.newest
    outputs.require_writable(folder)

    def require_no_run() -> None:
        if newest(checkpoints) is not None:
            raise UserError(f"{folder} holds checkpoints: continue them with --resume, or choose another --out")

    if resume or (ranks.has_restarted and newest(checkpoints) is not None):
        checkpoint.require(newest(checkpoints), checkpoints)  # a UserError before the lock makes a file
        trainer = None
    else:
        require_no_run()
        summary.require_none(folder, force)
        trainer = trainer_of(None, Path(), recipe, strict, typed, ranks.make)
    with ranks.locked(folder):
        if ranks.is_first:
            files.remove_leftovers(checkpoints, checkpoint.STEP_NAME)
        if trainer is not None:
            require_no_run()  # another process may have had the lock meanwhile
            yield trainer, Run(trainer.chosen.name, trainer.chosen, trainer.config.seed)
            return
        path = checkpoint.require(newest(checkpoints), checkpoints)
        saved = ranks.kind.read(path)
        trainer = trainer_of(saved, path, recipe, strict, typed, ranks.make)
        run = Run(trainer.chosen.name, trainer.chosen, trainer.config.seed)
        run.resume(trainer, path)
        if note := trainer.config.length_note(saved.meta["config"]["steps"], saved.step):
            click.echo(note, err=True)
        yield trainer, run


def trainer_of(
    saved: Checkpoint | None,
    path: Path,
    recipe: str | None = None,
    strict: bool = False,
    typed: Mapping[str, Typed] = NOTHING,
    make: Callable[..., Trainer] = Trainer,
) -> Trainer:
    """A trainer with the typed options; others are those of the checkpoint `saved` at `path`, else defaults.

    The checkpoint is yet to be restored.
    """
    if recipe or saved is None:
        chosen = library.load_any(recipe or "mxfp8")
    else:
        chosen = library.any_from_dict(saved.meta["recipe"], where=str(path))
    config = config_from(typed, saved and saved.meta["config"])
    return make(config, make_strict(chosen, strict), data.load(config.data, context=config.preset.model.context))

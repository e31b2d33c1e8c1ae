"""The runs behind `duotone compare`: planned anew, or those of a stopped one. Cheap checks come first."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from duotone import recipes as library
from duotone.cli import summary
from duotone.cli.command_options import Typed
from duotone.cli.inputs import config_from, make_strict
from duotone.errors import UserError
from duotone.lab import comparison, continuation, data, document, files, texts
from duotone.lab.data import Corpus
from duotone.lab.loop import Run
from duotone.lab.presets import DEFAULT_RECIPES
from duotone.lab.trainer import TrainConfig


class Runs(NamedTuple):
    """What is trained, the runs with what is already known of them, and the text."""

    config: TrainConfig
    runs: list[Run]
    corpus: Corpus


def fresh(
    folder: Path, names: Sequence[str], typed: Mapping[str, Typed], *, seeds: int, strict: bool, force: bool
) -> Runs:
    """A new comparison of the recipes `names`; UserError where `folder` holds a report, unless `force`."""
    files.require_writable(folder)
    summary.require_none(folder, force)
    recipes = [make_strict(library.load(name), strict) for name in names or DEFAULT_RECIPES]
    config = config_from(typed)
    texts.require(config.data)
    runs = comparison.plan_runs(config, recipes, seeds)
    return Runs(config, runs, data.load(config.data, context=config.preset.model.context))


def continued(folder: Path, typed: Sequence[Typed | bool], *, seeds: int) -> Runs:
    """The comparison in `folder` with its settings, and with more seeds where asked for.

    UserError where other options were `typed`, or where the data or the model has changed.
    """
    if any(typed):
        raise UserError(f"--resume takes the settings of the comparison in {folder}: leave all but --out and --seeds")
    files.require_writable(folder)
    path = folder / summary.RESULT
    result = continuation.load(path)
    recipes = continuation.recipes_of(result, path)
    settings = result["settings"]
    config = config_from({}, settings.get("config"))
    runs = comparison.plan_runs(config, recipes, max(seeds, settings.get("seeds", 1)))
    corpus = data.load(config.data, context=config.preset.model.context)
    if document.digests(config, corpus) != settings.get("digests"):
        raise UserError(f"the data or the model has changed since the comparison in {folder}: compare anew")
    return Runs(config, continuation.take_over(runs, result, config.steps), corpus)

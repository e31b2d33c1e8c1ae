"""The search behind `duotone search`: new or continued, its stages, and its result. Cheap checks come first."""

import re
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import cast

import click

from duotone.errors import UserError
from duotone.observe.candidates import UNIFORM, load_candidates
from duotone_lab.cli import summary
from duotone_lab.cli.command_options import Typed
from duotone_lab.cli.inputs import config_from, make_strict
from duotone_lab.cli.table import print_table
from duotone_lab.training import comparison, continuation, data, document, evidence, texts
from duotone_lab.training.data import Corpus
from duotone_lab.training.goal import Goal, Prediction
from duotone_lab.training.loop import Progress
from duotone_lab.training.searching import CHECKPOINTS, TITLE, Finding, Search, Stop

SEEDS = 3
Options = Mapping[str, Typed | bool]


def goal(budget: object, max_gap: object) -> Goal:
    """The goal of `--budget` or `--max-gap`. UserError unless one of them was typed."""
    if (budget is None) == (max_gap is None):
        raise UserError("a search needs one goal: --budget speed=1.3, --budget memory=0.7 or --max-gap 0.2%")
    text = str(budget) if budget is not None else f"gap={str(max_gap).removesuffix('%')}"
    match = re.fullmatch(r"(speed|memory|gap)=([0-9]{1,9}(?:\.[0-9]{1,9})?)", text)
    if match is None or (budget is not None and match[1] == "gap") or (match[1] != "gap" and not float(match[2])):
        typed = f"--budget {budget}" if budget is not None else f"--max-gap {max_gap}"
        raise UserError(f"{typed} is no goal: write --budget speed=1.3, --budget memory=0.7 or --max-gap 0.2%")
    return Goal(match[1], float(match[2]))


def fresh(folder: Path, typed: Options) -> tuple[Search, Corpus]:
    """A new search; UserError if `folder` holds one, unless forced, or if the goal cannot be met."""
    aim = goal(typed["budget"], typed["max_gap"])
    summary.require_none(folder, bool(typed["force"]))
    names = cast(tuple[str, ...], typed["recipes"]) or UNIFORM
    recipes = [make_strict(recipe, bool(typed["strict"])) for recipe in load_candidates("search", names)]
    config = config_from(cast(Mapping[str, Typed], typed))
    texts.require(config.data)
    for recipe in recipes:
        comparison.planned(config, recipe)
    size = cast(tuple[int, int] | None, typed["size"])
    chosen = Search(config, aim, recipes, size, cast(int, typed["seeds"]) or SEEDS)
    corpus = data.load(config.data, context=config.preset.model.context)
    if typed["force"]:
        evidence.remove(folder)
        (folder / summary.RESULT).unlink(missing_ok=True)
    return chosen, corpus


def continued(folder: Path, typed: Options) -> tuple[Search, Corpus]:
    """The search in `folder` with its settings; UserError if others were typed, or data or model have changed."""
    if any(value not in (None, (), False) for value in typed.values()):
        raise UserError(f"--resume takes the settings of the search in {folder}: leave all but --out")
    path = folder / evidence.EVIDENCE
    stored = evidence.read(path)
    config = config_from({}, stored["settings"]["config"])
    chosen = evidence.resumed(path, config, stored)
    since = f"the search in {folder}: search anew"
    return chosen, document.unchanged(config, stored["settings"]["digests"], since)


def run(
    chosen: Search, corpus: Corpus, folder: Path, command: str, progress: Progress, should_stop: Stop
) -> Finding | None:
    """All stages, from where the search in `folder` is; None if it was stopped before there was a recipe."""

    def save(finding: Finding | None = None) -> None:
        evidence.write(folder, chosen, corpus, finding, command=command)

    save()
    trainer, reference = chosen.train_reference(corpus, folder / CHECKPOINTS, progress, should_stop)
    if reference.stopped or not chosen.measure_effects(trainer, save, progress, should_stop):
        return None
    finding = chosen.conclude(reference)
    save(finding)
    path = folder / summary.RESULT
    chosen.check(
        finding,
        reference,
        corpus,
        previous=continuation.load(path) if path.exists() else None,
        command=command,
        progress=progress,
        should_stop=should_stop,
        publish=partial(summary.write_numbers, folder=folder),
    )
    save(finding)
    return finding


def print_finding(finding: Finding, chosen: Search) -> None:
    """The predictions for the recipe and for uniform ones, and how far off the first was."""
    rows = [[TITLE, *_cells(finding.predicted)]]
    rows += [[name, *_cells(prediction)] for name, prediction in finding.uniform.items()]
    click.echo()
    summary.echo(f"Predicted for {chosen.goal} {chosen.where} ({chosen.table.source}):")
    print_table(("recipe", "gap %", "speed", "memory"), rows)
    counts = Counter(option.recipe for option in finding.chosen.values())
    sources = ", ".join(f"{count} as in {name}" for name, count in counts.items())
    summary.echo(f"{len(finding.chosen)} GEMMs: {sources}.")
    summary.echo(finding.verdict)


def _cells(prediction: Prediction) -> tuple[str, ...]:
    speed = "" if prediction.speed is None else f"{prediction.speed:.3f}"
    return f"{prediction.gap_percent:+.3f}", speed, f"{prediction.memory:.3f}"

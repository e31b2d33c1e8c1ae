"""`duotone train`: one recipe, with checkpoints that a later call continues bit for bit."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from duotone.cli import command_options as options
from duotone.cli.interrupt import Interrupt
from duotone.errors import UserError

if TYPE_CHECKING:
    from duotone.lab.checkpoint import Checkpoint
    from duotone.lab.trainer import Trainer
    from duotone.recipes import Recipe, Schedule

CHECKPOINTS = "checkpoints"
DEFAULT_RECIPE = "mxfp8"


@click.command(cls=options.ListCommand)
@click.option("--recipe", metavar="NAME|FILE", help=f"Recipe, schedule, or file of one; {DEFAULT_RECIPE} unless given.")
@click.option("--save-every", type=click.IntRange(min=1), default=50, help="Steps between checkpoints; 50.")
@click.option("--resume", is_flag=True, help="Continue the run in --out from its newest checkpoint.")
@options.training
@click.pass_context
def train(context: click.Context, save_every: int, resume: bool, out: str | None, **given: Any) -> None:
    """Train a small language model under one recipe, or a schedule of them, with checkpoints.

    --resume continues with the settings of the checkpoint, bit for bit (on CUDA as far as torch's attention is
    deterministic); with --steps the run ends at another step. Ctrl-C, SIGTERM and SIGHUP save a checkpoint and write a
    partial report. The exit code is 1 where the run failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM and
    129 after SIGHUP.
    """
    from duotone.cli import run_display, summary
    from duotone.lab import document, loop

    folder = Path(out or "runs/train")
    with (_resumed if resume else _fresh)(folder, given) as (trainer, saved):
        if trainer.done == trainer.config.steps:
            click.echo(f"{folder} is at its last step, {trainer.done}: nothing is left to train")
            return
        result = loop.RunResult(**(saved.meta["history"] if saved else {}))
        name = trainer.chosen.name

        def report() -> None:
            runs = [document.Run(name, trainer.chosen, result)]
            written = document.document(
                trainer.config, trainer.corpus, runs, command=context.obj, partial=result.stopped
            )
            summary.print_summary(written)
            summary.write_result(written, folder)

        with Interrupt() as interrupt:
            try:
                with run_display.choose() as display:
                    saving = loop.Saving(folder / CHECKPOINTS, save_every)
                    loop.train(trainer, name, result=result, saving=saving, progress=display, should_stop=interrupt)
            except UserError:
                if result.train_loss:
                    report()  # the losses are not lost with the last checkpoint
                raise
            report()
    if result.stopped:
        context.exit(interrupt.exit_code)
    if result.error:
        context.exit(1)


@contextmanager
def _fresh(folder: Path, given: dict[str, Any]) -> "Iterator[tuple[Trainer, None]]":
    """A trainer at its first step, with `folder` locked; UserError where that holds a run already."""
    from duotone import recipes
    from duotone.cli.inputs import config_from
    from duotone.lab import checkpoint, data, files
    from duotone.lab.trainer import Trainer

    recipe = _strict(recipes.load_any(given.pop("recipe") or DEFAULT_RECIPE), given.pop("strict"))
    config = config_from(given)
    files.require_writable(folder)
    _require_no_run(folder)
    trainer = Trainer(config, recipe, data.load(config.data, context=config.preset.model.context))
    with files.locked(files.make_folder(folder)):
        checkpoint.remove_leftovers(folder / CHECKPOINTS)
        _require_no_run(folder)  # another process may have had the lock meanwhile
        yield trainer, None


def _require_no_run(folder: Path) -> None:
    from duotone.lab import checkpoint

    if checkpoint.steps(folder / CHECKPOINTS):
        raise UserError(f"{folder} holds checkpoints: continue them with --resume, or choose another --out")


@contextmanager
def _resumed(folder: Path, given: dict[str, Any]) -> "Iterator[tuple[Trainer, Checkpoint]]":
    """A trainer where the newest checkpoint of `folder` left it, and that checkpoint, with `folder` locked."""
    from duotone import recipes
    from duotone.cli.inputs import config_from
    from duotone.lab import checkpoint, data, files, meta
    from duotone.lab.trainer import Trainer

    files.require_writable(folder)
    checkpoint.latest(folder / CHECKPOINTS)  # a UserError before the lock makes a file
    with files.locked(folder):
        checkpoint.remove_leftovers(folder / CHECKPOINTS)
        path = checkpoint.latest(folder / CHECKPOINTS)
        saved = checkpoint.load(path)
        meta.require_run(saved, path)
        name, strict = given.pop("recipe"), given.pop("strict")
        stored = recipes.any_from_dict(saved.meta["recipe"], where=str(path))
        recipe = _strict(recipes.load_any(name) if name else stored, strict)
        config = config_from(given, saved.meta["config"])
        trainer = Trainer(config, recipe, data.load(config.data, context=config.preset.model.context))
        trainer.restore(saved, path)
        if note := config.length_note(saved.meta["config"]["steps"], trainer.done):
            click.echo(note, err=True)
        yield trainer, saved


def _strict(chosen: "Recipe | Schedule", strict: bool) -> "Recipe | Schedule":
    """The recipe, or all recipes of the schedule, for which with `strict` a fallback is an error."""
    from duotone.cli.inputs import make_strict
    from duotone.recipes import Schedule

    if isinstance(chosen, Schedule):
        return chosen.map(lambda recipe: make_strict(recipe, strict))
    return make_strict(chosen, strict)

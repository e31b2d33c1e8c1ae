"""`--parallel` of `train` and `compare`: one run over the processes that torchrun started; the first reports."""

import contextlib
import io
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import click

from duotone import distributed
from duotone.errors import UserError
from duotone.recipes import Recipe, Schedule
from duotone_lab.cli import run_display, summary
from duotone_lab.cli.interrupt import Interrupt
from duotone_lab.cli.runs import CHECKPOINTS, Runs, tell_length
from duotone_lab.training import comparison, data, document, loop, outputs
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.forecast import Parallel
from duotone_lab.training.loop import Progress
from duotone_lab.training.parallel import ParallelTrainer, agreed, restarts, saved_run, started


@contextlib.contextmanager
def ranks(layout: Parallel, device: str) -> Iterator[tuple[bool, Interrupt]]:
    """Whether this process is the first rank, which alone prints, and what stops all of them after one step."""
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(started(layout, device)) == 0
        if not first:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        yield first, stack.enter_context(Interrupt())


def train(
    context: click.Context,
    parallel: str,
    folder: Path,
    settings: Callable[..., tuple[Recipe | Schedule, TrainConfig]],
    *,
    force: bool,
    resume: bool,
    every: int,
) -> None:
    """Train on every rank. A restart by torchrun goes on from the newest checkpoint, if there is one.

    `settings` gives the recipe and the config, also those of a checkpoint and its path.
    """
    layout, (chosen, config) = Parallel.parse(parallel), settings()
    with ranks(layout, config.device) as (first, interrupt):
        newest = distributed.latest(folder / CHECKPOINTS)
        resume = resume or (newest is not None and restarts() > 0)
        if resume and newest is None:
            raise UserError(f"no checkpoint to resume from in {folder / CHECKPOINTS}: train without --resume")
        if not resume:
            if newest is not None:
                raise UserError(f"{folder} holds checkpoints: continue them with --resume, or choose another --out")
            summary.require_none(folder, force)
        elif newest is not None:
            saved = saved_run(newest)
            chosen, config = settings(saved, newest)
            tell_length(config, saved)
        saving = loop.Saving(folder / CHECKPOINTS, every)
        with outputs.locked(outputs.make_folder(folder)) if first else contextlib.nullcontext():
            run, corpus = _trained(layout, config, chosen, newest, saving, lambda: agreed(interrupt()), first)
            if first:
                events = [event["text"] for event in run.observed.get("events", ())]
                click.echo("\n".join(text for text in events if text.startswith("rank ")))
                written = document.document(config, corpus, [run], {"command": context.obj}, partial=run.stopped)
                summary.print_summary(written)
                summary.write_result(written, folder)
    if run.stopped or run.error:
        context.exit(interrupt.exit_code if run.stopped else 1)


def _trained(
    layout: Parallel,
    config: TrainConfig,
    chosen: Recipe | Schedule,
    newest: Path | None,
    saving: loop.Saving,
    should_stop: Callable[[], bool],
    first: bool,
) -> tuple[loop.Run, data.Corpus]:
    """The run. Afterwards no object refers to the process group, so that the group can end."""
    corpus = data.load(config.data, context=config.preset.model.context)
    trainer = ParallelTrainer(layout, config, chosen, corpus)
    run = loop.Run(chosen.name, chosen, config.seed, is_observed=False)
    if newest is not None:
        run.resume(trainer, newest)
        click.echo(f"resumed from step {trainer.completed} on {layout.ranks} ranks")
    with run_display.choose() if first else contextlib.nullcontext(Progress()) as display:
        loop.train(trainer, run, saving=saving, progress=display, should_stop=should_stop)
    return run, corpus


def compare(
    context: click.Context, parallel: str, folder: Path, chosen: Runs, *, as_json: bool, resume: bool, every: int
) -> None:
    """Train what is left of the runs, each over all ranks."""
    layout = Parallel.parse(parallel)
    saving = comparison.saving(folder, every)
    for run in chosen.runs:
        run.is_observed = False
    with ranks(layout, chosen.config.device) as (first, interrupt):
        with outputs.locked(outputs.make_folder(folder)) if first else contextlib.nullcontext():
            if first and not resume:
                comparison.forget(saving.folder)
            agreed(False)  # no rank looks for checkpoints before those of another comparison are gone
            with run_display.choose() if first else contextlib.nullcontext(Progress()) as display:
                result = comparison.compare(
                    *chosen[:3],
                    {"command": context.obj, **chosen.about},
                    progress=display,
                    should_stop=lambda: agreed(interrupt()),
                    publish=partial(summary.write_numbers, folder=folder) if first else None,
                    make=partial(ParallelTrainer, layout),
                    saving=saving,
                )
            if first:
                summary.print_summary(result, as_json=as_json)
                summary.write_result(result, folder, quiet=as_json)
    if result["partial"] or any(run["error"] for run in result["runs"]):
        context.exit(interrupt.exit_code if result["partial"] else 1)

"""`duotone train`: one recipe, with checkpoints that a later call continues bit for bit."""

import shlex
from functools import partial
from pathlib import Path

import click

from duotone.errors import UserError
from duotone_lab.cli import command_options as options
from duotone_lab.cli.interrupt import Interrupt
from duotone_lab.training.schema import Settings


@click.command(cls=options.ListCommand)
@click.option("--recipe", metavar="NAME|FILE", help="Recipe, schedule, or file of one. Default: mxfp8.")
@options.save_every
@click.option("--resume", is_flag=True, help="Continue the run in --out from its newest checkpoint.")
@options.parallel
@options.training
@click.pass_context
def train(
    context: click.Context,
    save_every: int,
    resume: bool,
    out: str | None,
    recipe: str | None,
    strict: bool,
    force: bool,
    parallel: str | None,
    **typed: options.Typed,
) -> None:
    """Train a small language model under one recipe, or a schedule of them, with checkpoints.

    --resume continues with the settings of the checkpoint, bit for bit (on CUDA as far as torch's attention is
    deterministic); with --steps the run ends at another step. Ctrl-C, SIGTERM and SIGHUP save a checkpoint and write a
    partial report. The exit code is 1 where the run failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM and
    129 after SIGHUP.

    With --parallel, run it under torchrun. A restart by torchrun resumes by itself.
    """
    from duotone_lab.cli import run_display, runs, summary
    from duotone_lab.training import document, loop

    folder = Path(out or "runs/train")
    if parallel is not None:
        from duotone_lab.cli import parallel_run

        choose = partial(runs.settings, recipe, strict, typed)
        choose()  # bad input is an error before the ranks meet
        parallel_run.train(context, parallel, folder, choose, force=force, resume=resume, every=save_every)
        return
    with runs.training(folder, recipe, strict, typed, resume=resume, force=force) as (trainer, run):
        if trainer.completed == trainer.config.steps:
            click.echo(f"{folder} is at its last step, {trainer.completed}: nothing is left to train")
            return

        def report() -> None:
            about: Settings = {"command": context.obj}
            written = document.document(trainer.config, trainer.corpus, [run], about, partial=run.stopped)
            summary.print_summary(written)
            summary.write_result(written, folder)

        with Interrupt() as interrupt:
            try:
                with run_display.choose() as display:
                    saving = loop.Saving(folder / runs.CHECKPOINTS, save_every)
                    loop.train(trainer, run, saving=saving, progress=display, should_stop=interrupt)
            except UserError:
                if run.train_loss:
                    report()  # the losses are not lost with the last checkpoint
                raise
            report()
    if run.stopped:
        click.echo(f"Continue with: duotone train --resume --out {shlex.quote(str(folder))}", err=True)
        context.exit(interrupt.exit_code)
    if run.error:
        context.exit(1)

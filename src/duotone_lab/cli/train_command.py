"""`duotone train`: one recipe, with checkpoints that a later call continues bit for bit."""

from pathlib import Path

import click

from duotone.errors import UserError
from duotone_lab.cli import command_options as options


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
    from duotone_lab.cli import runs, summary
    from duotone_lab.cli.processes import processes
    from duotone_lab.training import document, loop

    folder = Path(out or "runs/train")
    with (
        processes(parallel, str(typed["device"] or "cpu")) as ranks,
        runs.training(ranks, folder, recipe, strict, typed, resume=resume, force=force) as (trainer, run),
    ):
        config, corpus = trainer.config, trainer.corpus
        if trainer.completed == config.steps and not ranks.has_restarted:
            click.echo(f"{folder} is at its last step, {config.steps}: nothing is left to train")
            return

        def report() -> None:
            if ranks.is_first:
                for event in run.observed.get("events", ()):
                    if event["text"].startswith("rank "):
                        click.echo(event["text"])
                written = document.document(config, corpus, [run], {"command": context.obj}, partial=run.stopped)
                summary.print_summary(written)
                summary.write_result(written, folder)

        try:
            with ranks.display() as display:
                saving = loop.Saving(folder / runs.CHECKPOINTS, save_every)
                loop.train(trainer, run, saving=saving, progress=display, should_stop=ranks.should_stop)
        except UserError:
            if run.train_loss:
                report()  # the losses are not lost with the last checkpoint
            raise
        report()
        del trainer  # the process group ends when no object refers to it
    context.exit(ranks.interrupt.exit_of(context, folder, stopped=run.stopped, failed=run.error is not None))

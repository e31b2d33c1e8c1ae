"""`duotone compare`: the same model once per recipe, and a report."""

from pathlib import Path

import click

from duotone.cli import command_options as options
from duotone.cli.interrupt import Interrupt
from duotone.errors import UserError
from duotone.lab.presets import DEFAULT_RECIPES
from duotone.lab.schema import Document


@click.command(cls=options.ListCommand)
@click.option(
    "--recipes",
    cls=options.ListOption,
    metavar="NAME|FILE...",
    help=f"Recipes or recipe files; {' '.join(DEFAULT_RECIPES)} unless given.",
)
@options.training
@click.pass_context
def compare(
    context: click.Context, recipes: tuple[str, ...], out: str | None, strict: bool, **typed: options.Typed
) -> None:
    """Train the same small language model once per recipe and report what happened.

    A bf16 run and a second one from weights perturbed by 1e-6 come first: gaps are read against them. Ctrl-C,
    SIGTERM and SIGHUP write a partial report, and `result.json` holds the runs that are complete at any time. The exit
    code is 1 where a run failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
    """
    from duotone import recipes as library
    from duotone.cli import run_display, summary
    from duotone.cli.inputs import config_from, make_strict
    from duotone.lab import comparison, data, files

    config = config_from(typed)
    chosen = [make_strict(library.load(name), strict) for name in recipes or DEFAULT_RECIPES]
    comparison.plan_runs(config, chosen)
    folder = Path(out or "runs/compare")
    files.require_writable(folder)
    corpus = data.load(config.data, context=config.preset.model.context)
    files.make_folder(folder)

    def publish(partial: Document) -> None:
        try:
            summary.write_numbers(partial, folder)
        except UserError as error:
            click.echo(str(error), err=True)  # the next runs go on, and at the end it is an error

    with files.locked(folder), Interrupt() as interrupt:
        with run_display.choose() as display:
            result = comparison.compare(
                config, chosen, corpus, command=context.obj, progress=display, should_stop=interrupt, publish=publish
            )
        summary.print_summary(result)
        summary.write_result(result, folder)
    if result["partial"]:
        context.exit(interrupt.exit_code)
    if any(run["error"] for run in result["runs"]):
        context.exit(1)

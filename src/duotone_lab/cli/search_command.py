"""`duotone search`: the recipe of a model for a speed, a memory or a gap, with evidence and a check."""

from pathlib import Path

import click

from duotone_lab.cli import command_options as options
from duotone_lab.cli.interrupt import Interrupt


@click.command(cls=options.ListCommand)
@click.option(
    "--budget",
    metavar="speed=X|memory=X",
    help="At least X times as fast as bf16, or at most X of what linears keep for backward.",
)
@click.option("--max-gap", metavar="X%", help="At most X percent more loss than bf16; then the fastest recipe.")
@options.size
@options.candidates
@click.option("--seeds", type=click.IntRange(min=1), help="Seeds of the check, from --seed on. Default: 3.")
@click.option("--resume", is_flag=True, help="Continue the search in --out with its settings.")
@options.training
@click.pass_context
def search(context: click.Context, out: str | None, resume: bool, **typed: options.Typed | bool) -> None:
    """Find the recipe with the least loss for a speed or memory, or the fastest for a gap, and check it.

    bf16 is trained once. Then the effect of each format on the loss is measured, for each GEMM of each module.
    An integer program picks the formats, and paired runs check its prediction. --out then holds
    recipe.toml, evidence.json and the report of these runs.

    Ctrl-C stops after the step or GEMM at hand, and --resume continues. Exit codes are those of compare.
    """
    from duotone_lab.cli import recipe_search, run_display, summary
    from duotone_lab.training import evidence, outputs
    from duotone_lab.training.goal import require_solver

    folder = Path(out or "runs/search")
    require_solver()
    outputs.require_writable(folder)
    chosen, corpus = recipe_search.continued(folder, typed) if resume else recipe_search.fresh(folder, typed)
    outputs.make_folder(folder)
    with outputs.locked(folder), Interrupt() as interrupt:
        with run_display.choose() as display:
            finding = recipe_search.run(chosen, corpus, folder, context.obj, display, interrupt)
        if finding is not None and finding.document is not None:
            summary.print_summary(finding.document)
            summary.write_result(finding.document, folder)
            recipe_search.print_finding(finding, chosen)
            click.echo(f"Recipe: {folder / evidence.RECIPE}\nEvidence: {folder / evidence.EVIDENCE}")
    failed = finding is None or finding.measured is None
    context.exit(interrupt.exit_of(context, folder, stopped=interrupt.requested, failed=failed))

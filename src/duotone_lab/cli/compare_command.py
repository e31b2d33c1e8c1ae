"""`duotone compare`: the same model under each recipe and seed, and a report."""

from functools import partial
from pathlib import Path

import click

from duotone_lab.cli import command_options as options
from duotone_lab.training.presets import DEFAULT_RECIPES


@click.command(cls=options.ListCommand)
@click.option(
    "--recipes",
    cls=options.ListOption,
    metavar="NAME|FILE...",
    help=f"Recipes or recipe files. Default: {' '.join(DEFAULT_RECIPES)}.",
)
@click.option(
    "--seeds",
    type=click.IntRange(min=1),
    default=1,
    help="Number of seeds of each recipe, from --seed on. Default: 1, which gives no ranks.",
)
@options.size
@options.save_every
@click.option("--resume", is_flag=True, help="Continue the comparison in --out with its settings, or add seeds.")
@click.option("--json", "as_json", is_flag=True, help="Print the numbers as JSON instead of the table.")
@options.parallel
@options.training
@click.pass_context
def compare(  # noqa: PLR0913 (one argument for each option)
    context: click.Context,
    recipes: tuple[str, ...],
    seeds: int,
    size: tuple[int, int] | None,
    save_every: int,
    resume: bool,
    as_json: bool,
    out: str | None,
    strict: bool,
    force: bool,
    parallel: str | None,
    **typed: options.Typed,
) -> None:
    """Train the same small language model under each recipe, and write a report.

    Under one seed all recipes have the same weights, batches and random numbers, so gaps to bf16 are paired by seed.
    Recipes are ranked if there are two seeds or more. With one seed, a second bf16 run from weights perturbed by 1e-6
    shows how large a gap can be by chance.

    Ctrl-C, SIGTERM and SIGHUP write a partial report. --resume continues each run from its newest checkpoint, bit for
    bit on a CPU. The exit code is 1 if a run failed, 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM and 129
    after SIGHUP.

    With --parallel, run it under torchrun. The report then has memory and bytes of each rank, but no errors of planes.
    """
    from duotone_lab.cli import runs, summary
    from duotone_lab.cli.processes import processes
    from duotone_lab.training import comparison

    folder = Path(out or "runs/compare")
    if parallel is not None and not resume and (folder / summary.RESULT).exists():
        from duotone_lab.training.parallel import restarts

        if restarts():  # torchrun types everything again
            resume, typed, recipes, size, strict, force = True, {}, (), None, False, False
    if resume:
        chosen = runs.continued_comparison(folder, [*typed.values(), recipes, size, strict, force], seeds=seeds)
    else:
        chosen = runs.new_comparison(folder, recipes, typed, size=size, seeds=seeds, strict=strict, force=force)
    saving = comparison.saving(folder, save_every)
    with processes(parallel, chosen.config.device) as ranks, ranks.locked(folder):
        if ranks.is_first and not resume:
            comparison.forget(saving.folder)
        ranks.agreed(False)  # no rank looks for checkpoints before those of another comparison are gone
        with ranks.display() as display:
            result = comparison.compare(
                *chosen[:3],
                {"command": context.obj, **chosen.about},
                progress=display,
                should_stop=ranks.should_stop,
                publish=partial(summary.write_numbers, folder=folder) if ranks.is_first else None,
                make=ranks.make,
                saving=saving,
            )
        if ranks.is_first:
            summary.print_summary(result, as_json=as_json)
            summary.write_result(result, folder, quiet=as_json)
    failed = any(run["error"] for run in result["runs"])
    context.exit(ranks.interrupt.exit_of(context, folder, stopped=result["partial"], failed=failed))

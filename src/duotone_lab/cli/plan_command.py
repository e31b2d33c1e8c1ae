"""`duotone plan`: what would run for each GEMM of each module."""

import dataclasses

import click

from duotone_lab.cli import command_options as options


@click.command()
@options.preset
@options.model
@click.option("--recipe", metavar="NAME|FILE", default="mxfp8", help="Recipe or recipe file. Default: mxfp8.")
@options.device
@click.option("--arch", metavar="smNN", help="Plan for this GPU instead, which need not be here: sm90, sm100, ...")
@options.strict
@options.parallel
def plan(recipe: str, strict: bool, arch: str | None, parallel: str | None, **typed: str | None) -> None:
    """Print one row per module and GEMM: the formats of both operands, how it runs, and why.

    `native` means that the kernel multiplies the codes themselves, `emulated` that it decodes them first. The numbers
    under `why` stand for lines below the table: kernels and reasons. A line there says where bf16 would be faster.
    With --parallel, a line predicts the memory of each rank, and the bytes that it sends in a step of training.
    """
    from duotone import recipes
    from duotone.recipes.recipe import MEASURED
    from duotone_lab.cli.inputs import config_from, make_strict
    from duotone_lab.cli.table import echo, print_table
    from duotone_lab.training.comparison import planned
    from duotone_lab.training.forecast import Parallel, forecast

    config = config_from(typed)
    chosen = make_strict(recipes.load(recipe), strict)
    prediction = None if parallel is None else forecast(config, chosen, Parallel.parse(parallel))
    device = arch or config.device
    rows = planned(config, chosen, device)
    notes: dict[str, int] = {}  # the number of each
    cells: list[tuple[str, ...]] = []
    for row in rows:
        note = f"{row.kernel}: {row.reason}" if row.reason else row.kernel
        number = notes.setdefault(note, len(notes) + 1)
        cells.append((row.module, row.gemm, row.a, row.b, row.runs, str(number)))
    title = f"{chosen.name} on {device}, preset {config.preset.name}, model {config.model}"
    print_table(("module", "gemm", "a", "b", "runs", "why"), cells, title=title)
    for note, number in notes.items():
        echo(f"{number}  {note}", "   ")
    if prediction is not None:
        click.echo(str(prediction))
    if chosen.min_weight_elements:
        return
    # How many modules the entries of this device for `min_weight_elements` would leave in bf16.
    smaller = planned(config, dataclasses.replace(chosen, min_weight_elements=MEASURED), device)
    if small := len({row.module for row, other in zip(rows, smaller, strict=True) if row != other}):
        echo(
            f"modules with a K x N too small for {chosen.name} to pay on this device: {small}; "
            'min_weight_elements = "measured" in a recipe file leaves them in bf16'
        )

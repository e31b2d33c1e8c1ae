"""`duotone plan`: what would run for each GEMM of each module."""

import dataclasses

import click

from duotone.cli import command_options as options


@click.command()
@options.preset
@options.model
@click.option("--recipe", metavar="NAME|FILE", default="mxfp8", help="Recipe or recipe file; mxfp8 unless given.")
@options.device
@click.option("--arch", metavar="smNN", help="Plan for this GPU instead, which need not be here: sm90, sm100, ...")
@options.strict
@options.parallel
def plan(recipe: str, strict: bool, arch: str | None, parallel: str | None, **typed: str | None) -> None:
    """Print one row per module and GEMM: the formats of both operands, the kernel, and why.

    `native` means that the kernel multiplies the codes themselves, `emulated` that it decodes them first. A line below
    the table says where bf16 would be faster. With --parallel, a line predicts what each rank holds, and sends in a
    step of training.
    """
    from duotone import recipes
    from duotone.cli.inputs import config_from, make_strict
    from duotone.cli.table import print_table
    from duotone.conversion.model_plan import COLUMNS
    from duotone.lab.comparison import planned
    from duotone.recipes.recipe import MEASURED

    config = config_from(typed)
    chosen = make_strict(recipes.load(recipe), strict)
    device = arch or config.device
    rows = planned(config, chosen, device)
    print_table(
        COLUMNS,
        [row.cells for row in rows],
        title=f"{chosen.name} on {device}, preset {config.preset.name}, model {config.model}",
    )
    if parallel is not None:
        from duotone.lab.forecast import Parallel, forecast

        click.echo(str(forecast(config, chosen, Parallel.parse(parallel))))
    if chosen.min_weight_elements:
        return
    # How many modules the entries of this device for `min_weight_elements` would leave in bf16.
    left = planned(config, dataclasses.replace(chosen, min_weight_elements=MEASURED), device)
    if small := len({row.module for row, other in zip(rows, left, strict=True) if row != other}):
        click.echo(
            f"modules with a K x N too small for {chosen.name} to pay on this device: {small}; "
            'min_weight_elements = "measured" in a recipe file leaves them in bf16'
        )

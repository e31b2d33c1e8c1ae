"""`duotone plan`: what would run for each GEMM of each module."""

import click

from duotone.cli import options


@click.command()
@options.preset
@options.model
@click.option("--recipe", metavar="NAME|FILE", default="mxfp8", help="Recipe or recipe file; mxfp8 unless given.")
@options.device
@options.strict
def plan(recipe: str, strict: bool, **given: str | None) -> None:
    """Print one row per module and GEMM: the formats of both operands, the kernel, and why.

    `native` means that the kernel multiplies the codes themselves, `emulated` that it decodes them first.
    """
    from duotone import recipes
    from duotone.cli.inputs import config_from, make_strict
    from duotone.cli.table import print_table
    from duotone.lab.compare import planned

    config = config_from(given)
    chosen = make_strict(recipes.load(recipe), strict)
    rows = [row.to_dict() for row in planned(config, chosen)]
    print_table(
        ("module", "gemm", "a", "b", "kernel", "runs", "reason"),
        [
            [*(str(row[key]) for key in ("module", "gemm", "a", "b", "kernel")), _runs(row), str(row["reason"])]
            for row in rows
        ],
        title=f"{chosen.name} on {config.device}, preset {config.preset.name}, model {config.model}",
    )


def _runs(row: dict[str, object]) -> str:
    if "identity" in (row["a"], row["b"]):
        return "high precision"
    return "native" if row["native"] else "emulated"

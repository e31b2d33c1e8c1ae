"""`duotone formats` and `duotone recipes`: what there is by name."""

import json

import click


@click.command()
def formats() -> None:
    """List every format with its fields."""
    from duotone import formats as registry
    from duotone.cli.table import print_table

    rows = [registry.get(name).describe() for name in registry.names()]
    columns = tuple(rows[0])
    print_table([column.replace("_", " ") for column in columns], [[str(row[c]) for c in columns] for row in rows])


@click.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes, or print one as the JSON that a recipe file may hold."""
    from duotone import recipes as library
    from duotone.cli.table import print_table

    if name is not None:
        click.echo(json.dumps(library.load(name).to_dict(), indent=2))
        return
    print_table(
        ("recipe", "input", "weight", "grad_output"),
        [[found, *_formats(library.load(found))] for found in library.names()],
    )


def _formats(recipe: object) -> list[str]:
    """The formats of each tensor of a linear, rowwise / columnwise where they differ."""
    from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole

    cells = []
    for tensor_type in TENSOR_TYPES:
        quantizer = recipe(QuantizerRole("linear", tensor_type, ""))  # type: ignore[operator]
        planes = [plane.name for plane in (quantizer.rowwise, quantizer.columnwise)]
        cells.append(" / ".join(dict.fromkeys(planes)))
    return cells

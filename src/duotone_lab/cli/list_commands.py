"""`duotone formats` and `duotone recipes`: lists by name."""

import json
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from duotone.recipes import Recipe


@click.command()
def formats() -> None:
    """List every format with its fields."""
    from duotone import formats as registry
    from duotone_lab.cli.table import print_table

    rows = [registry.get(name).describe() for name in registry.names()]
    columns = tuple(rows[0])
    print_table([column.replace("_", " ") for column in columns], [[str(row[c]) for c in columns] for row in rows])


@click.command()
@click.argument("name", required=False)
def recipes(name: str | None) -> None:
    """List the recipes and schedules, or print one as JSON for a file."""
    from duotone import recipes as library
    from duotone_lab.cli.table import print_table

    if name is not None:
        click.echo(json.dumps(library.load_any(name).to_dict(), indent=2))
        return
    print_table(
        ("recipe", "input", "weight", "grad_output"),
        [[recipe, *_formats(library.load(recipe))] for recipe in library.names()],
    )
    click.echo()
    print_table(
        ("schedule", "phases"),
        [
            [name, ", ".join(f"{phase.recipe.name} from {phase.start}" for phase in library.load_schedule(name).phases)]
            for name in library.schedule_names()
        ],
    )
    click.echo("\na / b: rowwise / columnwise. Rules for grouped linears and for attention are not shown.")


def _formats(recipe: "Recipe") -> list[str]:
    """The formats of each tensor of a linear, rowwise / columnwise where they differ."""
    from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole

    quantizers = [recipe(QuantizerRole("linear", tensor_type)) for tensor_type in TENSOR_TYPES]
    planes = [[plane.name for plane in (q.rowwise, q.columnwise) if plane is not None] for q in quantizers]
    return [" / ".join(dict.fromkeys(names)) for names in planes]

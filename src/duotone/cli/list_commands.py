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
    """List the recipes and schedules, or print one as the JSON that a file of it may hold."""
    from duotone import recipes as library
    from duotone.cli.table import print_table

    if name is not None:
        click.echo(json.dumps(library.load_any(name).to_dict(), indent=2))
        return
    print_table(
        ("recipe", "input", "weight", "grad_output"),
        [[recipe, *_formats(library.load(recipe))] for recipe in library.names()],
    )
    click.echo()
    print_table(("schedule", "phases"), [[schedule, _phases(schedule)] for schedule in library.schedule_names()])


def _formats(recipe: object) -> list[str]:
    """The formats of each tensor of a linear, rowwise / columnwise where they differ."""
    from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole

    cells = []
    for tensor_type in TENSOR_TYPES:
        quantizer = recipe(QuantizerRole("linear", tensor_type, ""))  # type: ignore[operator]
        planes = [plane.name for plane in (quantizer.rowwise, quantizer.columnwise)]
        cells.append(" / ".join(dict.fromkeys(planes)))
    return cells


def _phases(name: str) -> str:
    """Each recipe of a schedule with its start."""
    from duotone import recipes as library

    return ", ".join(f"{phase.recipe.name} from {phase.start}" for phase in library.load_schedule(name).phases)

"""`duotone bench`: runs the benches of a clone, which are not part of the installed package."""

import importlib
import sys
from pathlib import Path

import click

import duotone
from duotone.errors import UserError

CLONE = Path(duotone.__file__).parents[2]
"""The folder that holds `src` and `bench` in a clone of the repository."""


@click.command(
    "bench", add_help_option=False, context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False}
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def run_benches(context: click.Context, arguments: tuple[str, ...]) -> None:
    """Time recipes next to plain torch (in a clone of the repository)."""
    if not (CLONE / "bench" / "command.py").is_file():
        raise UserError("the benches are not installed: clone the repository of Duotone and run `duotone bench` there")
    if str(CLONE) not in sys.path:
        sys.path.insert(0, str(CLONE))
    benches: click.Group = importlib.import_module("bench.command").bench
    context.exit(benches.main(list(arguments), prog_name=context.command_path, standalone_mode=False) or 0)

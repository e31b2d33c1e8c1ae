"""The `duotone` command. Bad input is one line on stderr and exit code 2."""

import shlex
import sys
import warnings
from collections.abc import Sequence

import click

from duotone import __version__
from duotone.errors import UserError, path_errors
from duotone_lab.cli.advise_command import advise
from duotone_lab.cli.bench_command import run_benches
from duotone_lab.cli.compare_command import compare
from duotone_lab.cli.export_command import export
from duotone_lab.cli.interrupt import EXIT_CODE
from duotone_lab.cli.list_commands import formats, recipes
from duotone_lab.cli.migrate_command import migrate
from duotone_lab.cli.plan_command import plan
from duotone_lab.cli.report_command import report
from duotone_lab.cli.search_command import search
from duotone_lab.cli.train_command import train


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, message="duotone %(version)s")
@click.pass_context
def cli(context: click.Context) -> None:
    """Low-precision training. Each direction of each tensor has its own format."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


for command in (compare, train, export, report, advise, search, plan, formats, recipes, run_benches, migrate):
    cli.add_command(command)


def run(arguments: Sequence[str]) -> int:
    """Run the command line `arguments`, without the name of the program; gives the exit code."""
    try:
        line = shlex.join(["duotone", *arguments])
        warnings.formatwarning = _as_line
        with path_errors("cannot use", None, "give another path, or make room"):  # a command names what it knows better
            return cli.main(list(arguments), prog_name="duotone", standalone_mode=False, obj=line) or 0
    except UserError as error:
        return _refuse(str(error))
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "duotone"
        return _refuse(f"{error.format_message()} See {path} --help.")
    except (click.Abort, KeyboardInterrupt):
        return EXIT_CODE


def main() -> None:
    """Run the command of `sys.argv` and exit with its code."""
    sys.exit(run(sys.argv[1:]))


def _as_line(message: Warning | str, *_: object) -> str:
    """A warning as a user of the command reads it: one line without the place in the code."""
    return f"duotone: warning: {' '.join(str(message).split())}\n"


def _refuse(message: str) -> int:
    click.echo(f"duotone: {' '.join(message.split())}", err=True)
    return 2

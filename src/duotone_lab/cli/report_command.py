"""`duotone report`: the page of a result made anew, or one page of two results."""

import os
from pathlib import Path

import click

from duotone.errors import UserError
from duotone_lab.cli import command_options as options


@click.command()
@click.argument("folder", metavar="DIR")
@click.argument("other", metavar="[DIR2]", required=False)
@options.size
@click.option("--out", metavar="FILE", help="The page; DIR/report.html, or DIR/against-DIR2.html for two.")
@click.option("--force", is_flag=True, help="Replace a page of another result, or of two, that is at --out.")
@click.pass_context
def report(
    context: click.Context, folder: str, other: str | None, size: tuple[int, int] | None, out: str | None, force: bool
) -> None:
    """Write the page of the result in DIR again, or a page that compares it with the result in DIR2.

    Both results must have the same model and text. The names of runs of DIR2 end in the name of that folder. All runs
    are compared with the reference of DIR, or its first run, at the last common step and under the common seeds.
    """
    from duotone_lab.cli import summary
    from duotone_lab.report import write_report
    from duotone_lab.training import continuation

    result = continuation.load(Path(folder, summary.RESULT))
    label = Path(os.path.realpath(other)).name if other is not None else ""
    page = Path(folder, f"against-{label}.html" if label else summary.REPORT)
    path = Path(out or page)
    if path.exists() and not force and (label or path.resolve() != page.resolve()):
        raise UserError(f"{path} exists: choose another --out, or replace it with --force")
    if other is not None:
        second = continuation.load(Path(other, summary.RESULT))
        result = continuation.merged(result, second, label, command=context.obj)
    if size is not None:
        result["settings"]["size"] = size
        result["settings"].pop("search", None)  # its goal is for the size of the search
    write_report(result, path)
    summary.print_summary(result)
    click.echo(f"Report: {path}")

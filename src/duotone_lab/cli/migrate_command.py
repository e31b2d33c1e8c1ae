"""`duotone migrate`: what a script uses of Transformer Engine, and what to write instead."""

import json
import tokenize

import click

COLUMNS = ("line", "use", "after install()", "in a script of Duotone")


@click.command()
@click.argument("script")
@click.option("--json", "as_json", is_flag=True, help="Print the rows as JSON instead of the table.")
@click.pass_context
def migrate(context: click.Context, script: str, as_json: bool) -> None:
    """List all uses of Transformer Engine in SCRIPT, and what to write instead. The script is not run.

    The column `after install()` shows for each use whether it works after duotone.compat.te.install(): it runs, is
    refused, or depends on a value that is not in the text. The exit code is 1 if a use is refused, 0 otherwise.
    """
    from duotone.compat.te_script import REFUSED, uses
    from duotone.errors import UserError
    from duotone_lab.cli.table import print_table

    try:
        with tokenize.open(script) as file:  # in the encoding that the file names
            text = file.read()
    except (OSError, UnicodeError, SyntaxError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"{script} cannot be read: {reason}; give a Python script") from None
    rows = uses(text, script)
    refused = sum(use.after_install == REFUSED for use in rows)
    if as_json:
        click.echo(json.dumps([use.to_dict() for use in rows]))
    elif rows:
        cells = [(str(use.line), use.call, use.after_install, use.write) for use in rows]
        print_table(COLUMNS, cells, title=f"{script}: {len(rows)} uses, {refused} refused")
    else:
        click.echo(f"{script} uses nothing of Transformer Engine")
    context.exit(1 if refused else 0)

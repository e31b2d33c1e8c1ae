"""`duotone advise`: which formats suit each GEMM of a model, from samples of one step."""

import json
from pathlib import Path

import click

from duotone.errors import UserError
from duotone.observe.candidates import UNIFORM
from duotone_lab.cli import command_options as options


@click.command(cls=options.ListCommand)
@options.model
@options.preset
@options.data
@options.candidates
@options.size
@options.seed
@options.device
@click.option("--out", metavar="FILE", help="Write the recipe file here, too.")
@click.option("--all", "all_rows", is_flag=True, help="Show all rows with a mark on those of the front.")
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON instead of the table.")
def advise(
    recipes: tuple[str, ...],
    size: tuple[int, int] | None,
    out: str | None,
    all_rows: bool,
    as_json: bool,
    **typed: options.Typed,
) -> None:
    """Show which formats suit each GEMM of a model: their errors, bytes and speeds.

    It runs one step of the untrained model, or of the weights in the folder of hf:PATH. For a model in training, call
    duotone.observe.advise in its script.
    """
    import torch

    from duotone import files, observe
    from duotone_lab.cli.inputs import config_from
    from duotone_lab.cli.table import echo
    from duotone_lab.training import data, models, outputs, texts
    from duotone_lab.training.model import to_dtype

    config = config_from(typed)
    preset = config.preset
    texts.require(config.data)
    if out is not None:
        outputs.require_writable(Path(out).parent)
        if Path(out).exists():
            raise UserError(f"{out} exists: choose another --out, or remove it")
    corpus = data.load(config.data, context=preset.model.context)
    model = to_dtype(models.build(config.model, preset, config.seed), torch.bfloat16).to(config.device)
    batch = corpus.batch(config.seed, 0, count=preset.batch, context=preset.model.context)
    advice = observe.advise(model, [part.to(config.device) for part in batch], candidates=recipes or UNIFORM, size=size)
    if out is not None:
        files.publish_file(Path(out), advice.toml.encode())
    if as_json:
        click.echo(json.dumps(advice.to_dict(), allow_nan=False))
        return
    click.echo(f"{models.describe(config.model, preset)}, {preset.batch} x {preset.model.context} bytes\n")
    click.echo(advice.table(all_rows))
    click.echo()
    for note in advice.notes:
        echo(note)
    click.echo(f"\n{advice.toml.rstrip()}")

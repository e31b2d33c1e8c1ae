"""`duotone export`: the model of a training run as the files that inference servers read."""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from duotone.errors import UserError

if TYPE_CHECKING:
    from duotone_lab.training.trainer import Trainer

CALIBRATED = 8
"""Training batches that decide the static scales of activations."""


@click.command()
@click.argument("folder", metavar="RUN")
@click.option("--out", metavar="DIR", help="Folder for the model. Default: RUN/exported.")
@click.option("--scheme", metavar="NAME", help="FP8, MXFP8, NVFP4A16, BF16, ... Default: that of the recipe.")
@click.option("--ignore", metavar="GLOB", multiple=True, help="Modules to write in bf16; may be repeated.")
@click.option("--force", is_flag=True, help="Replace files that are in --out.")
def export(folder: str, out: str | None, scheme: str | None, ignore: tuple[str, ...], force: bool) -> None:
    """Write the model of a run of `duotone train` in the layout of compressed-tensors.

    The weights are those of the newest checkpoint in RUN. Static scales of activations come from batches of the text
    of the run. A table shows the error of each weight. The last line shows the loss on held-out text before and after:
    both with products in high precision, so that only the rounding of the weights differs.
    """
    import duotone
    from duotone.recipes import HighPrecision
    from duotone_lab.training import outputs

    target = Path(out or Path(folder, "exported"))
    if not force and target.is_dir() and any(target.iterdir()):
        raise UserError(f"{target} holds files: choose another --out, or replace them with --force")
    trainer = _trained(Path(folder))

    def calibrate() -> None:
        for step in range(CALIBRATED):
            trainer.loss(step)

    outputs.make_folder(target.parent)
    report = duotone.export(trainer.model, target, scheme=scheme, ignore=ignore, calibrate=calibrate)
    click.echo(str(report))
    before = trainer.heldout_loss(HighPrecision())
    weights = duotone.load(target)
    assert isinstance(weights, dict)
    values = {name: w.dequantize() if isinstance(w, duotone.QuantizedTensor) else w for name, w in weights.items()}
    trainer.model.load_state_dict(values, strict=False)  # a tied parameter is stored under one of its names
    after = trainer.heldout_loss(HighPrecision())
    click.echo(f"{report.scheme}, {report.bytes:,} bytes: held-out loss {before:.4f} before, {after:.4f} after")
    click.echo(f"Exported: {target}")


def _trained(folder: Path) -> "Trainer":
    """The run in `folder` at its newest checkpoint."""
    from duotone_lab.cli import runs
    from duotone_lab.training.trainer import Trainer

    path = Trainer.newest(folder / runs.CHECKPOINTS)
    if path is None:
        raise UserError(f"{folder} holds no checkpoint: give the --out of a run of duotone train")
    saved = Trainer.read(path)
    trainer = runs.trainer_of(saved, path)
    trainer.restore(saved, path)
    return trainer

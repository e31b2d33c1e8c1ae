"""What a comparison or a run came to: the table at the end, and the files it leaves."""

import json
import math
from pathlib import Path
from typing import Any

import click

from duotone.cli.table import print_table
from duotone.errors import UserError

COLUMNS = (
    "recipe",
    "train loss",
    "held-out loss",
    "gap %",
    "step ms",
    "tokens/s",
    "peak MiB",
    "weights MiB",
    "saved MiB",
    "native GEMMs",
    "",
)


def print_summary(result: dict[str, Any]) -> None:
    """The table of all runs of a document, and what the noise run says of the gaps."""
    print_table(COLUMNS, [_row(run, result) for run in result["runs"]])
    noise = result["settings"]["noise"]["gap_percent"]
    if noise is not None:
        click.echo(f"Two bf16 runs that differ by 1e-6 in their initial weights end {abs(noise):.3f} % apart.")


def write_result(result: dict[str, Any], folder: Path) -> None:
    """Write `result.json` and `report.html` into `folder` and say so; UserError where the disk refuses it."""
    from duotone.report import write_report

    write_numbers(result, folder)
    write_report(result, folder / "report.html")
    click.echo(f"{'Partial report' if result['partial'] else 'Report'}: {folder / 'report.html'}")


def write_numbers(result: dict[str, Any], folder: Path) -> None:
    """Write `result.json` into `folder`; UserError where the disk refuses it."""
    from duotone.lab import files

    path = folder / "result.json"
    try:
        files.publish_file(path, json.dumps(_with_finite_numbers(result), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): make room, or choose another --out") from error


def _with_finite_numbers(value: Any) -> Any:
    """`value` with None for numbers that JSON does not have: one of them is no reason to lose all others."""
    if isinstance(value, dict):
        return {key: _with_finite_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _row(run: dict[str, Any], result: dict[str, Any]) -> list[str]:
    return [
        run["name"],
        _number(run["final_train_loss"], ".4f"),
        _number(run["final_heldout_loss"], ".4f"),
        _number(run["gap_percent"], "+.3f"),
        _number(run["step_ms"], ".1f"),
        _number(run["tokens_per_second"], ",.0f"),
        *(_mebibytes(run[key]) for key in ("peak_memory_bytes", "weight_bytes", "saved_activation_bytes")),
        _native(run),
        _remark(run, result),
    ]


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f}"


def _native(run: dict[str, Any]) -> str:
    """How many quantized GEMMs run on the codes themselves."""
    quantized = [row for row in run["plan"] if "identity" not in (row["a"], row["b"])]
    return f"{sum(row['native'] for row in quantized)} of {len(quantized)}" if quantized else ""


def _remark(run: dict[str, Any], result: dict[str, Any]) -> str:
    if run["error"]:
        return run["error"]
    done = run["train_loss"][-1][0] if run["train_loss"] else 0
    return "" if done == result["settings"]["steps"] else f"stopped at step {done}" if done else "not started"

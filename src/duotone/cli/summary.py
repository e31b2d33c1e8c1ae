"""What a comparison or a run came to: the table at the end, and the files it leaves."""

import json
import math
from collections.abc import Callable
from pathlib import Path

import click

from duotone.cli.table import print_table
from duotone.errors import UserError
from duotone.lab.schema import Document, RunEntry

COLUMNS: dict[str, Callable[[RunEntry], str]] = {
    "recipe": lambda run: run["name"],
    "train loss": lambda run: _number(run["final_train_loss"], ".4f"),
    "held-out loss": lambda run: _number(run["final_heldout_loss"], ".4f"),
    "gap %": lambda run: _number(run["gap_percent"], "+.3f"),
    "step ms": lambda run: _number(run["step_ms"], ".1f"),
    "tokens/s": lambda run: _number(run["tokens_per_second"], ",.0f"),
    "peak MiB": lambda run: _mebibytes(run["peak_memory_bytes"]),
    "weights MiB": lambda run: _mebibytes(run["weight_bytes"]),
    "saved MiB": lambda run: _mebibytes(run["saved_activation_bytes"]),
    "native GEMMs": lambda run: _native(run),
}


def print_summary(result: Document) -> None:
    """The table of all runs of a document, and what the noise run says of the gaps."""
    rows = [[*(cell(run) for cell in COLUMNS.values()), _remark(run, result)] for run in result["runs"]]
    print_table((*COLUMNS, ""), rows)
    noise = (result["settings"].get("noise") or {}).get("gap_percent")
    if noise is not None:
        click.echo(f"Two bf16 runs that differ by 1e-6 in their initial weights end {abs(noise):.3f} % apart.")


def write_result(result: Document, folder: Path) -> None:
    """Write `result.json` and `report.html` into `folder` and say so; UserError where the disk refuses it."""
    from duotone.report import write_report

    write_numbers(result, folder)
    write_report(result, folder / "report.html")
    click.echo(f"{'Partial report' if result['partial'] else 'Report'}: {folder / 'report.html'}")


def write_numbers(result: Document, folder: Path) -> None:
    """Write `result.json` into `folder`; UserError where the disk refuses it."""
    from duotone.lab import files

    path = folder / "result.json"
    try:
        files.publish_file(path, json.dumps(_with_finite_numbers(result), indent=1, allow_nan=False).encode())
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): make room, or choose another --out") from error


def _with_finite_numbers(value: object) -> object:
    """`value` with None for numbers that JSON does not have: one of them is no reason to lose all others."""
    if isinstance(value, dict):
        return {key: _with_finite_numbers(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_with_finite_numbers(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _mebibytes(count: int | None) -> str:
    return "" if count is None else f"{count / 2**20:,.1f}"


def _native(run: RunEntry) -> str:
    """How many quantized GEMMs run on the codes themselves."""
    quantized = [row["native"] for row in run["plan"] if "identity" not in (row["a"], row["b"])]
    return f"{sum(map(bool, quantized))} of {len(quantized)}" if quantized else ""


def _remark(run: RunEntry, result: Document) -> str:
    if run["error"]:
        return run["error"]
    done = run["train_loss"][-1][0] if run["train_loss"] else 0
    return "" if done == result["settings"].get("steps") else f"stopped at step {done}" if done else "not started"

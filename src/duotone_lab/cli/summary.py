"""The result of a comparison or a run: the table at the end, and the files that it writes."""

import csv
import io
from collections.abc import Callable
from pathlib import Path

import click

from duotone import files
from duotone.errors import UserError, path_errors
from duotone_lab.cli.table import echo, print_table
from duotone_lab.report.numbers import SPACE
from duotone_lab.report.plan_table import counts
from duotone_lab.training import outputs
from duotone_lab.training.schema import Document, RunEntry

LONG = frozenset(
    "recipe train_loss heldout_loss repeats plan statistics drift spreads products operands events modules".split()
)
REPORT, RESULT, PLANES = "report.html", "result.json", "planes.csv"
COLUMNS: dict[str, Callable[[RunEntry], str]] = {
    "rank": lambda run: str(run.get("rank") or ""),
    "recipe": lambda run: run["name"],
    "held-out": lambda run: _number(run.get("judged_loss", run["final_heldout_loss"]), ".4f"),
    "gap %": lambda run: "" if run["is_reference"] else _gap(run),
    "step ms": lambda run: _step_time(run),
    "peak MiB": lambda run: "" if (peak := run["peak_memory_bytes"]) is None else f"{peak / 2**20:,.1f}",
    "native": lambda run: _native(run),
}


def print_summary(result: Document, *, as_json: bool = False) -> None:
    """All runs of a document: a table in 80 columns with a text about the gaps, or the numbers as JSON."""
    if as_json:
        click.echo(outputs.json_text(numbers(result)))
        return
    from duotone_lab.report.choice import answer
    from duotone_lab.report.verdict import trouble, verdict

    rows = [[cell(run) for cell in COLUMNS.values()] for run in result["runs"]]
    print_table(tuple(COLUMNS), rows, fit=1)
    for run in result["runs"]:
        if sentence := trouble(result, run):
            click.echo(f"{run['name']} {sentence}")
    if len(result["runs"]) > 1:
        for sentence in filter(None, (answer(result), verdict(result))):
            echo(sentence.replace(SPACE, " "))


def numbers(result: Document) -> dict[str, object]:
    """The document without curves, plans and statistics."""
    runs = [{key: value for key, value in run.items() if key not in LONG} for run in result["runs"]]
    return {**result, "runs": runs}


def require_none(folder: Path, force: bool) -> None:
    """UserError if `folder` holds a report, the numbers of one, or a search, unless `force`."""
    from duotone_lab.training.evidence import EVIDENCE

    if not force and any((folder / name).exists() for name in (REPORT, RESULT)):
        raise UserError(f"{folder} holds a report: choose another --out, or replace it with --force")
    if not force and (folder / EVIDENCE).exists():
        raise UserError(
            f"{folder} holds a search: continue it with `duotone search --resume`, or replace it with --force"
        )


def write_result(result: Document, folder: Path, *, quiet: bool = False) -> None:
    """Write `result.json`, `planes.csv` and `report.html` into `folder` and say so, on stderr if `quiet`.

    UserError if the disk refuses it.
    """
    from duotone_lab.report import write_report

    write_numbers(result, folder)
    write_report(result, folder / REPORT)
    click.echo(f"{'Partial report' if result['partial'] else 'Report'}: {folder / REPORT}", err=quiet)


def planes_csv(result: Document) -> str:
    """The statistics of every plane of every run, a line each under their names."""
    rows = [{"run": run["name"], **entry} for run in result["runs"] for entry in run["statistics"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def write_numbers(result: Document, folder: Path) -> None:
    """Write `result.json` and `planes.csv` into `folder`; UserError if the disk refuses it."""
    path = folder / RESULT
    with path_errors("cannot write", path, "make room, or choose another --out"):
        files.publish_file(path, outputs.json_text(result, indent=1).encode())
        files.publish_file(folder / PLANES, planes_csv(result).encode(errors="replace"))


def _number(value: float | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"


def _gap(run: RunEntry) -> str:
    """The mean gap, and half of its 95 % interval if there are several seeds."""
    width = run.get("gap_margin")
    return _number(run["gap_percent"], "+.3f") + ("" if width is None else f" ± {width:.3f}")


def _step_time(run: RunEntry) -> str:
    """Nothing where a GEMM is emulated: its time says nothing about hardware that multiplies the codes."""
    return "" if counts(run["plan"])["emulated"] else _number(run["step_ms"], ".1f")


def _native(run: RunEntry) -> str:
    """How many quantized GEMMs run on the codes themselves."""
    native, emulated, _ = counts(run["plan"]).values()
    return f"{native} of {native + emulated}" if native + emulated else ""

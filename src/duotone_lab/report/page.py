"""The page: the one place where a result, the charts and the template meet."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from duotone import files
from duotone.errors import path_errors
from duotone_lab.report import cards, charts, choice, module_names, numbers, plan_table, planes, spread, verdict, worst
from duotone_lab.report.metrics import COLOURS, METRICS
from duotone_lab.report.series import styles
from duotone_lab.training.schema import Document, RunEntry

LIMIT_BYTES = 1_000_000
FILTERS = "broken finite listing moment number percent power px shorten significant size".split()


@dataclass(frozen=True)
class Detail:
    """The detail of a page. Large results get less detail, and the page says so.

    `members` are the quantities in the row of each layer of a kind. If there are none, layers have no rows.
    """

    hover: bool
    members: int
    plan_groups: int


LEVELS = (Detail(True, len(METRICS), 2000), Detail(True, 1, 2000), Detail(False, 1, 60), Detail(False, 0, 30))


def render(result: Document) -> str:
    """The report of `result` as one HTML page without any external reference.

    `result` is what a comparison wrote: `duotone`, `created`, `partial`, `machine`, `settings` and `runs`.
    Lists may be empty, numbers None, NaN or infinite. The page is the most detailed one below 1 MB.
    """
    page = ""
    for detail in LEVELS:
        page = _environment().get_template("page.html.j2").render(**_view(result, detail))
        if len(_encode(page)) < LIMIT_BYTES:
            break
    return page


def write_report(result: Document, path: Path) -> None:
    """Render `result` into the file at `path`. An older report is replaced completely or not at all.

    Raises UserError if the file cannot be written.
    """
    page = _encode(render(result))
    with path_errors("cannot write the report", path, "give a file in an existing, writable folder"):
        files.publish_file(path, page)


def _encode(page: str) -> bytes:
    """File names that are not UTF-8 reach a result as lone surrogates; they become question marks."""
    return page.encode("utf-8", errors="replace")


@cache
def _environment() -> Environment:
    loader = PackageLoader("duotone_lab.report", ".")
    environment = Environment(
        loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update({name: getattr(numbers, name) for name in FILTERS})
    return environment


def _view(result: Document, detail: Detail) -> dict[str, object]:
    """Everything that the template shows, computed."""
    runs: list[RunEntry] = result["runs"]
    looks = styles(runs)
    where = choice.hardware(result)
    limits = planes.signal_limits(runs)
    columns = planes.columns([entry for run in runs for entry in run["statistics"]])
    rows = [_row(run, runs, detail, limits) for run in runs]
    for row, run, look in zip(rows, runs, looks, strict=True):
        row["colour"], row["trouble"] = look.colour, verdict.trouble(result, run)
        row["overview"] = planes.overview(run, columns, limits)
    return {
        "result": result,
        "detail": detail,
        "noise": verdict.noise_gap(result),
        "seeds": result["settings"].get("seeds") or 1,
        "reference": verdict.reference_of(result),
        "verdict": verdict.verdict(result),
        "window": charts.smoothing(runs),
        "loss_chart": charts.loss_chart(result, looks, detail.hover),
        "gap_chart": charts.gap_chart(result, looks, detail.hover),
        "answer": choice.answer(result),
        "confidence": choice.confidence(result),
        "where": where,
        "scatters": charts.scatters(result, looks, where),
        "drift_chart": charts.drift_chart(runs, looks, detail.hover),
        "events": charts.events(runs, looks),
        "histograms": spread.histograms(runs),
        "metrics": METRICS,
        "colours": COLOURS,
        "limits": limits,
        "columns": columns,
        "memory": module_names.memory(runs),
        "module_speeds": choice.module_speeds(result),
        "rows": rows,
    }


def _row(run: RunEntry, runs: list[RunEntry], detail: Detail, limits: tuple[float, float]) -> dict[str, object]:
    """One run with derived values, and the advantages of the other runs."""
    weak = worst.worst(run, [other for other in runs if other is not run])
    plan = plan_table.observed(run["plan"], run["statistics"])
    groups = plan_table.groups(plan)
    return {
        "run": run,
        "weak": weak,
        "rules": worst.rules(run, weak),
        "as_asked": sum(row.get("ran", "").startswith("as asked") for row in plan),
        "otherwise": [row["module"] for row in plan if row.get("ran", "").startswith("NOT")],
        "gemms": plan_table.counts(run["plan"]) if run["plan"] else None,
        "plan": groups[: detail.plan_groups],
        "plan_left_out": sum(group.count for group in groups[detail.plan_groups :]),
        "exact": planes.is_exact(run),
        "cards": cards.cards(run),
        "planes": planes.rows(run["statistics"], limits, members=detail.members, hover=detail.hover),
        "columns": planes.columns(run["statistics"]),
        "formats": planes.formats(run["statistics"]),
        "products": planes.products(run),
        "events": planes.events(run["statistics"]),
        "recipe": json.dumps(run["recipe"], indent=2, ensure_ascii=False),
    }

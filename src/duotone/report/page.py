"""The page: the one place where a result, the charts and the template meet."""

import contextlib
import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from duotone.errors import UserError
from duotone.report import charts, numbers, plan_table, planes, verdict
from duotone.report.palette import styles

LIMIT_BYTES = 1_000_000


@dataclass(frozen=True)
class Detail:
    """How much a page says. Big results get less of it, and the page tells so."""

    hover: bool
    merge: bool
    plan_groups: int


LEVELS = (Detail(True, False, 2000), Detail(False, False, 60), Detail(False, True, 30))


def render(result: dict) -> str:
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


def write_report(result: dict, path: Path) -> None:
    """Render `result` into the file at `path`. A report already there is replaced whole or left as it was.

    Raises UserError where the file cannot be written.
    """
    page = _encode(render(result))
    path = Path(path)
    draft = path.with_name(f".{path.name[:60]}.{secrets.token_hex(8)}")
    try:
        with draft.open("wb") as file:
            file.write(page)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
        if not isinstance(error, OSError):
            raise
        raise UserError(
            f"cannot write the report {path}: {error.strerror}; give a file in an existing, writable folder"
        ) from error


def _encode(page: str) -> bytes:
    """File names that are not UTF-8 reach a result as lone surrogates; they become question marks."""
    return page.encode("utf-8", errors="replace")


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("duotone.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    named = "broken finite moment number percent px share shorten significant size".split()
    environment.filters.update({name: getattr(numbers, name) for name in named})
    return environment


def _view(result: Mapping[str, Any], detail: Detail) -> dict[str, Any]:
    """Everything that the template shows, computed."""
    runs: list[dict[str, Any]] = result["runs"]
    looks = styles(runs)
    if detail.merge:
        runs = [{**run, "statistics": planes.merged(run["statistics"])} for run in runs]
    bar, maps = charts.signal_maps(runs, detail.hover)
    return {
        "result": result,
        "detail": detail,
        "facts": _facts(result),
        "noise": verdict.noise_gap(result),
        "reference": verdict.reference_of(result),
        "verdict": verdict.verdict(result),
        "yardstick": verdict.yardstick(result),
        "speed_caveat": verdict.speed_caveat(result),
        "troubles": verdict.troubles(result),
        "window": charts.smoothing(runs),
        "loss_chart": charts.loss_chart(result, looks, detail.hover),
        "gap_chart": charts.gap_chart(result, looks, detail.hover),
        "bar_charts": charts.bar_charts(runs, looks),
        "signal_bar": bar,
        "share_maps": charts.share_maps(runs),
        "rows": [
            {
                **_row(run, detail),
                "colour": look.colour,
                "signal_map": signal_map,
                "trouble": verdict.trouble(result, run),
            }
            for run, look, signal_map in zip(runs, looks, maps, strict=True)
        ],
    }


def _row(run: Mapping[str, Any], detail: Detail) -> dict[str, Any]:
    """One run with what is derived from it."""
    groups = plan_table.groups(run["plan"])
    return {
        "run": run,
        "gemms": plan_table.counts(run["plan"]) if run["plan"] else None,
        "plan": groups[: detail.plan_groups],
        "plan_left_out": sum(group.count for group in groups[detail.plan_groups :]),
        "exact": planes.is_exact(run),
        "formats": planes.formats(run["statistics"]),
        "events": planes.events(run["statistics"]),
        "share_columns": planes.share_columns(run["statistics"]),
        "share_rows": planes.share_rows(run["statistics"]),
        "recipe": json.dumps(run["recipe"], indent=2, ensure_ascii=False),
    }


def _facts(result: Mapping[str, Any]) -> Sequence[tuple[str, str]]:
    """What was run, on what, as pairs of a name and a text; only what the result tells."""
    settings, machine = result.get("settings") or {}, result.get("machine") or {}
    parameters, length = settings.get("parameters"), settings.get("data_bytes")
    steps, tokens = settings.get("steps"), settings.get("tokens_per_step")
    casts = {True: "compiled casts", False: "casts in plain torch"}.get(machine.get("compiled_casts"))  # type: ignore[arg-type]
    pairs = [
        ("Model", [settings.get("model"), parameters and f"{numbers.number(parameters)} parameters"]),
        ("Data", [settings.get("data"), length and numbers.size(length)]),
        (
            "Training",
            [
                steps and f"{numbers.number(steps)} steps",
                tokens and f"{numbers.number(tokens)} tokens per step",
                settings.get("context") and f"context {settings['context']}",
                _known("learning rate", settings.get("learning_rate")),
                _known("seed", settings.get("seed")),
            ],
        ),
        ("Preset", [settings.get("preset")]),
        (
            "Machine",
            [
                machine.get("processor"),
                machine.get("device"),
                machine.get("threads") and f"{machine['threads']} threads",
                machine.get("torch") and f"torch {machine['torch']}",
                casts,
            ],
        ),
    ]
    return [(name, ", ".join(str(part) for part in parts if part)) for name, parts in pairs if any(parts)]


def _known(name: str, value: object) -> str | None:
    return None if value is None else f"{name} {value}"

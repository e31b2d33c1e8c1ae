"""The command line behind `duotone bench`: layers, casts and training steps timed next to plain torch."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bench.subjects.catalog import SUBJECTS
from bench.timing.case import DEFAULT_RECIPES, Subject, written
from duotone.errors import UserError
from duotone_lab.cli.command_options import ListOption
from duotone_lab.cli.interrupt import Interrupt

if TYPE_CHECKING:
    from bench.timing.case import Case, Settings
    from bench.timing.duel import Pace
    from bench.timing.records import Record

TENSORS = ("input", "weight", "grad_output")


@click.group(invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.pass_context
def bench(context: click.Context) -> None:
    """Time recipes next to plain torch: candidates take turns on one device, and each has a row.

    A row has the median, fastest and slowest turn, the speed over compiled bf16 of the same run, and the host's time.
    Ctrl-C, SIGTERM and SIGHUP end the run after the present turn, and keep the tables and lines of earlier shapes. The
    exit code is 2 for bad input, 130 after Ctrl-C, 143 after SIGTERM and 129 after SIGHUP.
    """
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def command(subject: Subject) -> click.Command:
    """The command that measures one subject."""

    @click.command(subject.name, help=f"{subject.about}\n\n{_defaults(subject)}")
    @_options(subject)
    @click.pass_context
    def run(context: click.Context, **typed: Any) -> None:
        _run(context, subject, **typed)

    return run


def _defaults(subject: Subject) -> str:
    shapes = {device: " ".join(map(written, sizes)) for device, sizes in subject.shapes.items()}
    return f"Shapes are {'x'.join(subject.dims)}. Default: {shapes['cuda']} on CUDA, {shapes['cpu']} on a CPU."


def _options(subject: Subject) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    names = " ".join(DEFAULT_RECIPES)
    options = [
        click.option("--shape", "shapes", cls=ListOption, metavar="x".join(subject.dims), help="May be repeated."),
        click.option(
            "--recipe", "recipes", cls=ListOption, metavar="NAME|FILE", help=f"May be repeated. Default: {names}."
        ),
        *_own_options(subject.name),
        click.option("--turns", type=click.IntRange(min=1), default=6, help="Turns of each candidate; 6."),
        click.option(
            "--seconds",
            type=click.FloatRange(0, 60, min_open=True),
            default=0.3,
            help="Seconds of a turn. Default: 0.3.",
        ),
        click.option("--one-thread", is_flag=True, help="Backward in the thread that asks for it, for all candidates."),
        click.option("--graph", is_flag=True, help="Each step is one replay of a CUDA graph, for all candidates."),
        click.option(
            "--only", multiple=True, metavar="TEXT", help="Only candidates with this in their name; may be repeated."
        ),
        click.option("--device", metavar="cpu|cuda", help="Default: cuda if there is a GPU, cpu otherwise."),
        click.option("--out", metavar="FILE", help="Append one JSON object per candidate and shape."),
    ]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def _own_options(name: str) -> list[Callable[..., Any]]:
    cached = click.option("--cached", is_flag=True, help="Each recipe also with cached weights.")
    compiled = click.option("--compile", "compiled", is_flag=True, help="Each recipe also under torch.compile.")
    splits = click.option("--device-splits", is_flag=True, help="Each recipe also with the rows as a device tensor.")
    tensor = click.option("--tensor", type=click.Choice(TENSORS), default="input", help="Whose formats; input.")
    sequence = click.option("--sequence", type=click.IntRange(min=1), default=2048, help="Tokens of one; 2048.")
    vocabulary = click.option("--vocabulary", type=click.IntRange(min=2), default=32768, help="Default: 32768.")
    extra = {
        "grouped": [cached, compiled, splits],
        "cast": [tensor],
        "host": [cached, compiled, splits],
        "train": [compiled, sequence, vocabulary],
    }
    return extra.get(name, [cached, compiled])


for _subject in SUBJECTS.values():
    bench.add_command(command(_subject))


def _run(
    context: click.Context,
    subject: Subject,
    *,
    shapes: tuple[str, ...],
    recipes: tuple[str, ...],
    device: str | None,
    out: str | None,
    one_thread: bool,
    **typed: Any,
) -> None:
    import torch

    from bench.timing import records
    from bench.timing.duel import Pace

    pace = Pace(typed.pop("turns"), typed.pop("seconds"))
    if not math.isfinite(pace.seconds):
        raise UserError(f"--seconds is {pace.seconds}; give the seconds of a turn, above 0 and up to 60")
    only, graph = typed.pop("only"), typed.pop("graph")
    settings = _settings(recipes, device, typed)
    sizes = [subject.parse(shape) for shape in shapes] or subject.shapes[settings.device]
    cases = [case for shape in sizes for case in subject.cases(settings, shape)]
    if only:
        _require_candidates(only, subject.cases(settings, sizes[0]))
        cases = [case.only(only) for case in cases]
    if graph:
        _require_cuda(settings.device)
        cases = [case.graphed() for case in cases]
    if one_thread:
        cases = [replace(case, what=f"{case.what}, one thread") for case in cases]
    if out is not None:
        records.require_appendable(Path(out))
    completed, interrupt = 0, Interrupt("turn")
    try:
        with interrupt, torch.autograd.set_multithreading_enabled(not one_thread):
            for case in cases:
                _measure(case, pace, interrupt, settings.device, out)
                completed += 1
    except KeyboardInterrupt:
        saved = f", in {out}" if out is not None and completed else ""
        click.echo(f"stopped: {completed} of {len(cases)} tables are complete{saved}", err=True)
        context.exit(interrupt.exit_code)


def _measure(case: "Case", pace: "Pace", interrupt: Interrupt, device: str, out: str | None) -> None:
    """Print and append the records of a case; KeyboardInterrupt at the next turn once a stop is asked for."""
    from bench.timing import records
    from bench.timing.status import display

    with display(f"{case.what}, {case.shape}") as show:

        def tell(text: str) -> None:
            if interrupt():
                raise KeyboardInterrupt
            show(text)

        results = records.measure(case, pace, tell)
    print_records(case, results, records.describe(device))
    if out is not None:
        records.append(Path(out), records.lines(results, device))
    if all(record.error for record in results):
        raise UserError(f"{case.what}, {case.shape}: no candidate ran; the table says why")


def _require_candidates(texts: Sequence[str], cases: Sequence["Case"]) -> None:
    """UserError unless each text is in the name of a candidate of one of the cases."""
    from bench.timing.records import candidates_of

    names = dict.fromkeys(candidate.name for case in cases for candidate in candidates_of(case))
    if unused := next((text for text in texts if not any(text in name for name in names)), None):
        raise UserError(f"--only {unused!r} is in the name of no candidate: choose from {'; '.join(names)}")


def _require_cuda(device: str) -> None:
    if device != "cuda":
        raise UserError(f"--graph is for CUDA, and the device is {device}: leave it out")


def _settings(names: tuple[str, ...], device: str | None, typed: dict[str, Any]) -> "Settings":
    """The settings of the options; UserError where recipes or the device do not exist."""
    import torch

    from bench.timing.case import Settings
    from duotone import recipes as library
    from duotone_lab.training.trainer import require_device

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    recipes = tuple(library.load(name) for name in names or DEFAULT_RECIPES)
    titles = [recipe.name for recipe in recipes]
    if twice := next((name for name in titles if titles.count(name) > 1), None):
        raise UserError(f"the recipe {twice!r} is given twice: name each once, and give files names of their own")
    return Settings(device, recipes, **typed)


def print_records(case: "Case", records: list["Record"], device: str) -> None:
    """The records of one case as a table; columns that no record fills are left out."""
    from duotone_lab.cli.table import print_table

    columns: dict[str, Callable[[Record], str]] = {
        "candidate": lambda r: r.candidate,
        "ms": lambda r: _number(r.ms, 3),
        "min": lambda r: _number(r.min, 3),
        "max": lambda r: _number(r.max, 3),
        "ratio": lambda r: _number(r.ratio, 2),
        case.unit or "rate": lambda r: _number(r.rate, 1),
        "host us": lambda r: _number(r.host_us, 0),
        "peak MiB": lambda r: _number(r.peak_mib, 0),
        "error": lambda r: r.error,
    }
    cells = {name: [cell(record) for record in records] for name, cell in columns.items()}
    shown = [name for name in columns if any(cells[name])]
    rows = list(zip(*(cells[name] for name in shown), strict=True))
    print_table(shown, rows, title=f"{case.what}, {case.shape}, on {device}; ratio: speed over {case.base}")


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"

"""Options that several commands share, and lists written the way one types them: `--recipes bf16 mxfp8 nvfp4`."""

import os
import re
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import click

from duotone.observe.candidates import UNIFORM
from duotone_lab.training.models import DEFAULT, MODELS
from duotone_lab.training.presets import PRESETS

Typed = str | int | float | tuple[str, ...] | None
"""The value of an option; None or () where it was not typed."""

Command = TypeVar("Command", bound=Callable[..., object] | click.Command)


class ListOption(click.Option):
    """An option of several values: repeated, separated by commas, or by spaces in a `ListCommand`."""

    def __init__(self, names: Sequence[str], metavar: str | None = None, help: str | None = None) -> None:
        super().__init__(names, metavar=metavar, help=help, multiple=True, callback=_split_commas)


class ListCommand(click.Command):
    """A command without arguments, whose list options take every value up to the next option."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click parses them, after options of several values are spread out."""
        names = {name for option in self.params if isinstance(option, ListOption) for name in option.opts}
        return super().parse_args(ctx, spread(args, names))


def spread(args: Sequence[str], names: Iterable[str]) -> list[str]:
    """`args` with the name of a list option repeated before each of its values."""
    result: list[str] = []
    current = None
    for argument in args:
        name, _, value = argument.partition("=")
        if argument.startswith("-") and argument != "-":
            current = name if name in names else None
            result.append(argument)
            fresh = current is not None and not value
        elif current is None or fresh:
            result.append(argument)
            fresh = False
        else:
            result += [current, argument]
    return result


def _split_commas(_: click.Context, parameter: click.Parameter, values: tuple[str, ...]) -> tuple[str, ...]:
    texts = (text for value in values for text in ([value] if os.path.exists(value) else value.split(",")))
    parts = tuple(text.strip() for text in texts if text.strip())
    if values and not parts:
        raise click.BadParameter("give at least one value", param=parameter)
    return parts


preset = click.option("--preset", metavar="NAME", help=f"Sizes of model and batch: {', '.join(PRESETS)}.")
model = click.option(
    "--model",
    metavar="NAME|hf:PATH_OR_CLASS",
    help=f"What to train: {', '.join(MODELS)}, or a model of transformers by folder or class. Default: {DEFAULT}.",
)
device = click.option("--device", metavar="cpu|cuda", help="Device of the model. Default: cpu.")
strict = click.option(
    "--strict",
    is_flag=True,
    help="Stop before step 1 if a product would run in high precision and no rule asks for it.",
)
data = click.option(
    "--data",
    cls=ListOption,
    metavar="PATH...",
    help="Text files, folders, globs. Default: files of Python itself.",
)
size = click.option(
    "--as",
    "size",
    metavar="WIDTHxTOKENS",
    callback=lambda _, option, text: None if text is None else _size(option, text),
    help="Speeds and bytes as if the model were so wide and had so many tokens, such as 4096x8192.",
)
parallel = click.option(
    "--parallel", metavar="fsdp=N,tp=M,ep=K", help="Ranks along each axis; to train, torchrun starts as many processes."
)
save_every = click.option(
    "--save-every", type=click.IntRange(min=1), default=50, help="Steps between checkpoints. Default: 50."
)
seed = click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Seed of the weights, batches and rounding. Default: 0."
)
candidates = click.option(
    "--recipes",
    cls=ListOption,
    metavar="NAME|FILE...",
    help=f"Recipes whose formats are tried. Default: {' '.join(UNIFORM)}.",
)
TRAINING = (
    click.option("--force", is_flag=True, help="Replace a report that is in --out."),
    click.option("--out", metavar="DIR", help="Folder for the results."),
    strict,
    preset,
    model,
    seed,
    device,
    click.option("--steps", type=click.IntRange(min=1), help="Training steps. Default: the preset's."),
    click.option("--lr", type=click.FloatRange(0, min_open=True), help="Peak learning rate. Default: the preset's."),
    click.option("--batch", type=click.IntRange(min=1), help="Sequences a step. Default: the preset's."),
    click.option(
        "--context", "context_bytes", type=click.IntRange(min=1), help="Bytes a sequence. Default: the preset's."
    ),
    data,
)


def _size(option: click.Parameter, text: str) -> tuple[int, int]:
    """Width and tokens."""
    match = re.fullmatch(r"([1-9][0-9]{0,8})x([1-9][0-9]{0,8})", text)
    if match is None:
        raise click.BadParameter(f"{text!r} is no width and tokens: write such as 4096x8192.", param=option)
    return int(match[1]), int(match[2])


def training(command: Command) -> Command:
    """What every command that trains takes."""
    for option in TRAINING:
        command = option(command)
    return command

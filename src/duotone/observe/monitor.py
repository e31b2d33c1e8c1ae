"""Monitor: writes the statistics of sampled steps of a training run to a file and to trackers, while it runs."""

import importlib
import json
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Self

import torch
from torch import nn

from duotone.conversion.naming import named_modules, require_model
from duotone.errors import UserError, path_errors, require_integers
from duotone.modules.planned import Planned
from duotone.observe.alarms import Alarm, Alarms
from duotone.observe.step_statistics import Row, Sent, StepStatistics
from duotone.observe.tapped_recipe import TappedRecipe, sampled_step
from duotone.state.delayed import DelayedState

Write = Callable[[int, Sequence[Row], Sequence[Alarm]], None]
CANNOT_WRITE, REMEDY = "a monitor cannot write", "make room, or give a file that it may make"
TRACKERS = ("tensorboard", "wandb", "trackio")
WORST: dict[str, Callable[..., float]] = {
    "snr_db": min,
    "gradient_to_noise": min,
    "underflow": max,
    "saturation": max,
    "clipped": max,
    "amax": max,
    "nan": sum,
    "inf": sum,
}
"""The values that trackers get for each role and direction, and how those of all modules are combined."""


class Monitor:
    """Writes what quantization loses in sampled steps of a training run, and raises alarms.

        with observe.Monitor(model, "runs/mine/monitor.jsonl") as monitor:
            for batch in batches:
                ...                                     # forward, backward, optimizer
                monitor.step()

    - `path`: gets a JSON object for each row and alarm, appended. Other ranks than the first write beside it.
    - `every`: the first step and each multiple of it is sampled. A sampled step computes the same bits.
    - `to`: trackers that also get an overview: "tensorboard" (in the folder of `path`), "wandb", "trackio".
    - `optimizer`: calls `step` after each of its steps.
    - `start`: the number of steps that a resumed run completed before.
    - `on_alarm`: gets each `Alarm`. Without it, alarms are warnings. `alarms` holds all of them.

    A sampled step measures the errors of 32 modules. If there are more, modules take turns in a fixed order.

    No step waits for the device. A sampled step is written as soon as its numbers are on the host, at the latest after
    the next sampled one, or by `close`. Compiled code runs eager in sampled steps.
    """

    def __init__(
        self,
        model: nn.Module,
        path: str | Path,
        *,
        every: int = 50,
        to: Iterable[str] = (),
        optimizer: torch.optim.Optimizer | None = None,
        start: int = 0,
        on_alarm: Callable[[Alarm], None] | None = None,
    ) -> None:
        require_model("Monitor", model)
        require_integers(1, every=every)
        require_integers(0, start=start)
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        path, names = Path(path), [to] if isinstance(to, str) else list(to)
        path = path.with_name(f"{path.stem}.rank{rank}{path.suffix}") if rank else path
        with path_errors(CANNOT_WRITE, path, REMEDY):
            self._writes: list[Write] = [tracker(name, path.parent) for name in names if not rank]
            self._lines = JsonLines(path)
        self._writes.append(self._lines)
        self.alarms: list[Alarm] = []
        self.steps = start
        """The number of completed steps."""
        self._model, self._every, self._first, self._on_alarm = model, every, start + 1, on_alarm
        self._checks, self._is_closed = Alarms(), False
        self._open = ExitStack()
        planned = [(name, module) for name, module in named_modules(model) if isinstance(module, Planned)]
        followers = {m.module_name: m.module_name if m.site.named else name for name, m in planned}
        self._statistics = StepStatistics(followers)
        self._recipes, self._is_sampling = dict[str, TappedRecipe](), False
        self._sent: deque[tuple[int, Sent]] = deque()
        self._hook = None if optimizer is None else optimizer.register_step_post_hook(lambda *_: self.step())
        if not followers:
            message = "no module of this model follows a recipe, so the monitor has no rows; convert it first"
            warnings.warn(message, stacklevel=2)
        try:
            self._begin()
        except UserError:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"Monitor({self.steps} steps, every {self._every}, {len(self.alarms)} alarms)"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def step(self) -> None:
        """Call it after each step of training. UserError after `close`."""
        if self._is_closed:
            raise UserError("this monitor is closed; make a new one, with start= the number of steps that are done")
        self.steps += 1
        if self._is_sampling:
            self._open.close()
            named = named_modules(self._model)
            states = {name: module for name, module in named if isinstance(module, DelayedState)}
            self._sent.append((self.steps, self._statistics.send(states)))
            self._is_sampling = False
        while self._sent and (len(self._sent) > 1 or self._sent[0][1].is_there()):
            self._write()
        self._begin()

    def close(self) -> None:
        """Write all finished steps, and stop observing the model. An unfinished step is not written."""
        self._is_closed = True
        self._open.close()
        if self._hook is not None:
            self._hook.remove()
        while self._sent:
            self._write()
        self._lines.close()

    def _begin(self) -> None:
        """Sample the next step if it is its turn."""
        number = self.steps + 1
        if number == self._first or number % self._every == 0:
            self._open.enter_context(sampled_step(self._model, self._statistics, self._recipes))
            self._is_sampling = True

    def _write(self) -> None:
        step, sent = self._sent.popleft()
        rows, dead = sent.read()
        alarms = self._checks.check(step, rows, dead)
        self.alarms += alarms
        for write in self._writes:
            write(step, rows, alarms)
        for alarm in alarms:
            if self._on_alarm is None:
                warnings.warn(str(alarm), stacklevel=3)
            else:
                self._on_alarm(alarm)


class JsonLines:
    """Appends to a file: an object for each row, and one for each alarm."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def __call__(self, step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        messages = [
            {"step": step, "alarm": a.kind, "where": a.where, "message": a.message, "planes": a.planes} for a in alarms
        ]
        with path_errors(CANNOT_WRITE, self._file.name, REMEDY):
            for line in (*({"step": step, **row} for row in rows), *messages):
                self._file.write(json.dumps(line, allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        with path_errors(CANNOT_WRITE, self._file.name, REMEDY):
            self._file.close()


def overview(rows: Sequence[Row]) -> dict[str, float]:
    """By "duotone/role direction/quantity": the worst number of any module; for NaN and infinite elements the sum."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        for name in WORST:
            if (value := row.get(name)) is not None:
                groups.setdefault(f"duotone/{row['role']}_{row['plane']}/{name}", []).append(float(value))
    return {name: WORST[name.rpartition("/")[2]](values) for name, values in groups.items()}


def tracker(name: str, folder: Path) -> Write:
    """Writes overviews and alarms to the tracker of that name. UserError if it is not installed, or has no open run."""
    if name not in TRACKERS:
        raise UserError(f"a monitor does not know the tracker {name!r}; allowed are {', '.join(TRACKERS)}")
    try:
        module = importlib.import_module("torch.utils.tensorboard" if name == "tensorboard" else name)
    except ImportError:
        raise UserError(f"{name} is not installed: pip install {name}, or leave it out of `to`") from None
    return _to_tensorboard(module, folder) if name == "tensorboard" else _to_run(module)


def _to_tensorboard(module: ModuleType, folder: Path) -> Write:
    writer = module.SummaryWriter(str(folder))

    def write(step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        for name, value in overview(rows).items():
            writer.add_scalar(name, value, step)
        for alarm in alarms:
            writer.add_text(f"duotone/alarm/{alarm.kind}", str(alarm), step)
        writer.flush()

    return write


def _to_run(module: ModuleType) -> Write:
    """The open run of Weights & Biases or trackio. Steps are a value, because the run counts steps by itself."""
    if module.__name__ == "wandb" and module.run is None:
        raise UserError("wandb has no open run: call wandb.init() before the monitor is made")

    def write(step: int, rows: Sequence[Row], alarms: Sequence[Alarm]) -> None:
        module.log({"duotone/step": step, "duotone/alarms": len(alarms), **overview(rows)})

    return write

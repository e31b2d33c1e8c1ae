"""The training loop: steps, held-out losses, sampled statistics, a measured step, checkpoints, and stopping."""

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

import duotone
from duotone import observe
from duotone.dispatch import compiled_casts
from duotone.errors import UserError
from duotone.recipes import Recipe, Schedule
from duotone_lab.memory.memory_ledger import module_rows
from duotone_lab.memory.step_memory import StepMemory, measure_step
from duotone_lab.training.checkpoint import damaged
from duotone_lab.training.journal import Journal
from duotone_lab.training.schema import EventEntry, GemmEntry, Loss, ModuleEntry, Observations, PlaneEntry, observations
from duotone_lab.training.trainer import Trainer

UNTIMED = 3
"""The first steps of a run compile and warm caches; they do not count in the step time."""

TIMES, MEMORY = "step_seconds", "memory"
"""Names in a checkpoint."""

FINAL_STEPS = 10
HELDOUT_POINTS = 4
SAMPLES = 5


class Progress:
    """Listens to runs. This base class prints nothing. Steps count from one."""

    def expect(self, runs: int, steps: int) -> None:
        """`runs` runs follow, each of `steps` steps."""

    def begin(self, name: str, *, steps: int, completed: int, tokens_per_step: int, model: str) -> None:
        """A run called `name` starts to train `model`, after `completed` of its `steps`."""

    def note(self, text: str) -> None:
        """A message of one line: what the run does now, or a problem that did not end it."""

    def step(self, number: int, loss: float) -> None:
        """A step has ended with this training loss."""

    def end(self) -> None:
        """The run is over, whole or not."""


@dataclass
class Run:
    """One run: a recipe or a schedule by name, its part in a comparison, and its results.

    `label` is its name in messages, unless empty. Only with `is_observed` it has statistics and memory.
    """

    name: str
    recipe: Recipe | Schedule
    seed: int = 0
    is_reference: bool = False
    is_noise: bool = False
    train_loss: list[Loss] = field(default_factory=list)
    heldout_loss: list[Loss] = field(default_factory=list)
    step_seconds: list[float] = field(default_factory=list)
    memory: StepMemory | None = None
    observed: Observations = field(default_factory=observations)
    error: str | None = None
    stopped: bool = False
    abandoned: bool = False
    label: str = ""
    is_observed: bool = True
    journal: Journal = field(default_factory=Journal, repr=False, compare=False)

    @property
    def final_train_loss(self) -> float | None:
        """The mean training loss of the last ten steps."""
        losses = [loss for _, loss in self.train_loss[-FINAL_STEPS:]]
        finite = [loss for loss in losses if loss is not None]
        return statistics.fmean(finite) if finite and len(finite) == len(losses) else None

    @property
    def final_heldout_loss(self) -> float | None:
        """The last loss on held-out text. None if it was never measured."""
        return self.heldout_loss[-1][1] if self.heldout_loss else None

    @property
    def step_ms(self) -> float | None:
        """The median over all steps except the first ones and the observed ones."""
        return 1e3 * statistics.median(self.step_seconds) if self.step_seconds else None

    def is_over(self, steps: int) -> bool:
        """Whether it failed, or took its last step."""
        return self.error is not None or bool(self.train_loss and self.train_loss[-1][0] == steps)

    @property
    def history(self) -> dict[str, list[Loss]]:
        """What a checkpoint holds of the run, besides `observations`."""
        return {"train_loss": self.train_loss, "heldout_loss": self.heldout_loss}

    def observations(self) -> dict[str, Tensor]:
        """Times, memory and the sums of sampled steps so far, as tensors."""
        times = torch.tensor(self.step_seconds, dtype=torch.float64)
        memory = {} if self.memory is None else {MEMORY: torch.tensor(astuple(self.memory))}
        return {TIMES: times, **memory, **self.journal.state()} if self.is_observed else {}

    def resume(self, trainer: Trainer, path: Path) -> None:
        """Restore `trainer` from the checkpoint `path`, and continue with the history of its run.

        UserError if it is damaged or of another run.
        """
        history, observed = trainer.resume(path)
        self.train_loss, self.heldout_loss = history["train_loss"], history["heldout_loss"]
        try:
            self.step_seconds = observed.pop(TIMES, torch.empty(0)).tolist()
            if MEMORY in observed:
                peak, weights, saved = observed.pop(MEMORY).tolist()
                self.memory = StepMemory(peak, weights, saved)
            self.journal.load(observed)
        except (ValueError, TypeError, RuntimeError, LookupError, ArithmeticError) as error:
            raise damaged(path, f"what it observed is not what a run writes: {error!r}") from error


@dataclass(frozen=True)
class Saving:
    """Where checkpoints go, and after how many steps each.

    A stop leaves one, too, and so does the last step where `keeps_last`. Then a failed last save is an error.
    """

    folder: Path
    every: int
    keeps_last: bool = True


def train(
    trainer: Trainer,
    run: Run,
    *,
    saving: Saving | None = None,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Train to the last step of the config, or until `should_stop()`, and fill `run`; save where `saving` says.

    `run` may hold the history of the steps before. A loss that is not finite ends it with `error`.
    A checkpoint that cannot be written is a note, except the last one: a UserError.
    """
    progress = progress or Progress()
    run.is_observed &= trainer.observes
    run.observed["plan"] = [cast(GemmEntry, row.to_dict()) for row in trainer.plan()]
    progress.begin(
        run.label or run.name,
        steps=trainer.config.steps,
        completed=trainer.completed,
        tokens_per_step=trainer.config.preset.tokens_per_step,
        model=trainer.config.model,
    )
    try:
        _steps(trainer, run, saving, progress, should_stop)
    finally:
        progress.end()
    if run.stopped and not run.abandoned:
        _heldout(trainer, run)
    ranks = [] if run.abandoned else trainer.ranks()
    reports = [EventEntry(step=trainer.completed, text=line) for line in ranks]
    run.observed["events"] = [*run.observed.get("events", ()), *reports]


def _steps(
    trainer: Trainer,
    run: Run,
    saving: Saving | None,
    progress: Progress,
    should_stop: Callable[[], bool],
) -> None:
    steps, first = trainer.config.steps, trainer.completed
    heldout, sampled = points(steps, HELDOUT_POINTS), points(steps, SAMPLES if run.is_observed else 0)
    measured = min(first + 2, steps) if run.is_observed and run.memory is None else None
    store, broken = run.journal, None
    store.last = max(sampled, default=0)
    if first < steps:
        progress.note(_first_step(run))
    while trainer.completed < steps and run.error is None and not run.stopped:
        number, recipe = trainer.completed + 1, trainer.recipe
        store.step = number
        start = time.perf_counter()
        try:
            if number == measured:
                loss = _measured_step(trainer, run)
            else:
                loss = trainer.step(observe.with_statistics(recipe, store) if number in sampled else None)
        except Exception:
            if not should_stop():
                raise
            # The same Ctrl-C also ends a C++ compiler. The step is dropped, and nothing of it is saved.
            run.stopped = run.abandoned = True
            break
        if number > first + UNTIMED and number not in sampled and number != measured:
            run.step_seconds.append(time.perf_counter() - start)
        run.train_loss.append(_point(number, loss))
        progress.step(number, loss)
        if not math.isfinite(loss):
            run.error = f"the loss is {loss} at step {number}"
            broken = Journal(step=number)
            trainer.look_again(observe.with_statistics(recipe, broken))
            break
        if number in heldout:
            _heldout(trainer, run)
        run.stopped = number < steps and should_stop()
        _save(trainer, run, saving, progress)
    run.journal = Journal()  # its operands need not live as long as the run
    is_whole = run.is_observed and run.error is None and not run.stopped
    run.observed = {
        "plan": run.observed["plan"],
        "statistics": cast(list[PlaneEntry], store.rows()),
        "drift": store.drift(),
        "spreads": store.spreads(),
        "products": store.products(),
        "operands": store.operands(),
        "events": _events(trainer, store, broken),
        "modules": _ledger(trainer) if is_whole else [],
    }


def _events(trainer: Trainer, sampled: Journal, broken: Journal | None) -> list[EventEntry]:
    """Where the schedule switched, and the first operand that was not finite in a sampled step or in the last one."""
    events: list[EventEntry] = [
        {"step": int(phase.start) + 1, "text": f"the schedule switches to {phase.recipe.name}"}
        for phase in trainer.schedule.phases[1:]
        if phase.start < trainer.completed
    ]
    first = sampled.origin() or (broken and broken.origin())
    if first is not None:
        events.append(first)
    elif broken is not None:
        events.append({"step": broken.step, "text": "the loss is not finite; all operands of recipe formats were"})
    return sorted(events, key=lambda event: event["step"])


def _ledger(trainer: Trainer) -> list[ModuleEntry]:
    """What each module holds in a step of the last recipe; none where a model cannot be watched."""

    def step() -> Tensor:
        with duotone.autocast(recipe=trainer.schedule.at(max(0, trainer.completed - 1))):
            return trainer.loss(0)

    try:
        rows = module_rows(trainer.model, step)
    except UserError:
        return []
    names = ModuleEntry.__annotations__
    return [{name: getattr(row, name) for name in names} for row in rows]  # type: ignore[misc]


def _first_step(run: Run) -> str:
    """Why the first step may take long."""
    if all(row["a"] == row["b"] == "identity" for row in run.observed["plan"]):
        return "first step"
    return f"first step: {'compiling casts' if compiled_casts() else 'casts in plain torch'}"


def points(steps: int, count: int) -> set[int]:
    """`count` step numbers spread over a run, the last step among them."""
    return {max(1, round(steps * part / count)) for part in range(1, count + 1)}


def _measured_step(trainer: Trainer, run: Run) -> float:
    parameters = list(trainer.model.parameters())
    other = [*trainer.optimizer.state().values(), *trainer.model.buffers()]
    with measure_step(parameters, other, trainer.device) as memory:
        loss = trainer.step(forward=memory.forward([*parameters, *other]))
    run.memory = memory
    return loss


def _heldout(trainer: Trainer, run: Run) -> None:
    run.heldout_loss.append(_point(trainer.completed, trainer.heldout_loss()))


def _save(trainer: Trainer, run: Run, saving: Saving | None, progress: Progress) -> None:
    """Save where this step asks for it; only a save that ends the run may fail it."""
    is_over = trainer.completed == trainer.config.steps
    if saving is None or not (run.stopped or is_over or trainer.completed % saving.every == 0):
        return
    if is_over and not saving.keeps_last:
        return
    try:
        trainer.save(saving.folder, run.history, run.observations())
    except UserError as error:
        if (run.stopped or is_over) and saving.keeps_last:
            raise
        progress.note(str(error))


def _point(step: int, loss: float) -> Loss:
    """A list, which is also what JSON returns."""
    return cast(Loss, [step, loss if math.isfinite(loss) else None])

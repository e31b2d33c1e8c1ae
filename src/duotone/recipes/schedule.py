"""A schedule: which recipe each step of a run trains under, as a value and as a table."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

from duotone.errors import RecipeError, UserError, require_integers
from duotone.recipes.library import Resolve, Source, reference
from duotone.recipes.recipe import Recipe, RecipeLike, as_recipe
from duotone.recipes.tables import Table, check_title, is_list, is_table, only, text_of, within

KEYS = ("name", "steps", "phases")
PHASE_KEYS = ("from", "recipe", "convert_parameters")


@dataclass(frozen=True)
class Phase:
    """`recipe`, or the one of that name, from `start` on: a step, counted from 0, or a fraction of the run below 1.

    `convert_parameters` allows the phase to change the format of quantized parameters.
    """

    recipe: Recipe
    start: int | float
    convert_parameters: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "recipe", as_recipe("a phase", self.recipe))
        start = self.start
        fraction = isinstance(start, float) and 0 <= start < 1
        if not fraction and (not isinstance(start, int) or isinstance(start, bool) or start < 0):
            raise RecipeError(
                f"a phase starts at {start!r}; give a step such as 900, or a fraction of the run such as 0.9"
            )
        if not isinstance(self.convert_parameters, bool):
            raise RecipeError(f"convert_parameters is {self.convert_parameters!r}; allowed are true and false")

    @property
    def is_fraction(self) -> bool:
        """Whether the start is a fraction other than 0, so that its step depends on the length of the run."""
        return isinstance(self.start, float) and self.start != 0.0

    def _row(self) -> Table:
        """The phase as a table of a schedule's file."""
        row = {"from": self.start, "recipe": self.recipe.to_dict()}
        return {**row, "convert_parameters": True} if self.convert_parameters else row

    def over(self, steps: int) -> "Phase":
        """The phase with its start as a step: the nearest one, and the last of the run at the latest."""
        if not isinstance(self.start, float):
            return self
        return replace(self, start=min(round(self.start * steps), steps - 1))


@dataclass(frozen=True)
class Schedule:
    """Phases in order, the first from step 0 on. With `steps`, the length of the run, fractions become steps.

    Train step `i` under `autocast(recipe=schedule.at(i))`: within a phase that is the very same recipe, so that nothing
    is planned or compiled anew.
    """

    phases: tuple[Phase, ...]
    steps: int | None = None
    title: str = "schedule"

    def __post_init__(self) -> None:
        if not isinstance(self.phases, tuple) or not all(isinstance(phase, Phase) for phase in self.phases):
            raise RecipeError(f"phases is {self.phases!r}; give a tuple of duotone.recipes.Phase")
        check_title(self.title)
        if not self.phases or self.phases[0].start != 0:
            start = repr(self.phases[0].start) if self.phases else "nothing"
            raise RecipeError(f"the first phase starts at {start}; it must start at 0")
        if self.steps is not None:
            require_integers(1, RecipeError, steps=self.steps)
            object.__setattr__(self, "phases", tuple(phase.over(self.steps) for phase in self.phases))
        for kind in (True, False):
            self._check_order([phase.start for phase in self.phases if phase.is_fraction is kind])

    def _check_order(self, starts: list[int | float]) -> None:
        for earlier, later in pairwise(starts):
            if earlier >= later:
                run = f" over {self.steps} steps" if self.steps is not None else ""
                if run and earlier == later:
                    raise RecipeError(
                        f"schedule {self.title}{run}: two phases start at step {later}; train more steps, or take a "
                        "schedule of fewer phases"
                    )
                raise RecipeError(
                    f"schedule {self.title}{run}: a phase at {earlier} precedes one at {later}; each must start after "
                    "the one before it"
                )

    @property
    def name(self) -> str:
        """The title, under which plans and reports show the schedule."""
        return self.title

    def over(self, steps: int) -> "Schedule":
        """The schedule of a run of that many steps, its fractions as steps."""
        if self.steps not in (None, steps):
            raise UserError(
                f"schedule {self.title} is over {self.steps} steps; got {steps}: make it anew, or train {self.steps}"
            )
        return replace(self, steps=steps)

    def phase(self, step: int) -> Phase:
        """The phase of a step, counted from 0; the last one has no end."""
        require_integers(0, step=step)
        if any(phase.is_fraction for phase in self.phases):
            raise UserError(
                f"schedule {self.title} has phases at fractions of the run: call schedule.over(steps), then at(step)"
            )
        return self.phases[bisect_right(self.phases, step, key=lambda phase: phase.start) - 1]

    def at(self, step: int) -> Recipe:
        """The recipe of a step, counted from 0."""
        return self.phase(step).recipe

    def map(self, change: Callable[[Recipe], Recipe]) -> "Schedule":
        """The schedule with every recipe changed."""
        return replace(self, phases=tuple(replace(phase, recipe=change(phase.recipe)) for phase in self.phases))

    def to_dict(self) -> Table:
        """JSON-ready; `duotone.recipes.any_from_dict` reads it back."""
        head = {"name": self.title} | ({} if self.steps is None else {"steps": self.steps})
        return {**head, "phases": [phase._row() for phase in self.phases]}


def load_any(name_or_path: str) -> Recipe | Schedule:
    """The recipe or the schedule of that name or file."""
    return _any(Source().find(name_or_path))


def load_schedule(name_or_path: str) -> Schedule:
    """The schedule of that name, or of that TOML or JSON file. RecipeError if there is none, or if it is wrong."""
    schedule = load_any(name_or_path)
    if not isinstance(schedule, Schedule):
        raise RecipeError(f"{name_or_path} is a recipe, not a schedule: use duotone.recipes.load, or add [[phases]]")
    return schedule


def any_from_dict(data: object, *, where: str = "recipe", default_name: str = "rules") -> Recipe | Schedule:
    """A recipe or a schedule from its `to_dict` form."""
    return _any(Source(data, where, default_name))


def _any(source: Source) -> Recipe | Schedule:
    return source.read(_schedule) if source.is_schedule else source.recipe


def _schedule(data: Table, resolve: Resolve, default_name: str) -> Schedule:
    only(data, KEYS, "a schedule")
    rows = data["phases"]
    if not is_list(rows) or not rows or not all(map(is_table, rows)):
        raise RecipeError("a schedule needs [[phases]] with from and recipe; add at least one")
    title = data.get("name", default_name)
    return Schedule(tuple(_phase(i, row, resolve) for i, row in enumerate(rows, 1)), data.get("steps"), title)


def _phase(number: int, row: Table, resolve: Resolve) -> Phase:
    where = f"phase {number}"
    only(row, PHASE_KEYS, where)
    missing = next((key for key in ("from", "recipe") if key not in row), None)
    if missing:
        raise RecipeError(f"{where} has no {missing}; give from = a step or a fraction, and recipe = a name or a file")
    recipe = reference(row["recipe"], resolve, f"{where}: recipe")
    with within(where):
        return Phase(recipe, row["from"], row.get("convert_parameters", False))


def dumps(value: RecipeLike | Schedule) -> str:
    """TOML that `load` or `load_schedule` reads back; functions appear by name and are not read back."""
    return text_of((value if isinstance(value, Schedule) else as_recipe("dumps", value)).to_dict())

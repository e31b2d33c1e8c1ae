"""A search for the recipe of a model: a bf16 run, the effect of each option on it, an integer program, and a check.

The predicted gap of an option is its forward effect plus the progress that its backward effect costs. If the loss falls
by r nats for each e-fold of steps, a run that loses the share s of its progress ends about r s nats higher.
"""

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from duotone.errors import UserError
from duotone.observe import speeds
from duotone.observe.candidates import EXACT, REFERENCE, Gemm, rules_for
from duotone.recipes import HighPrecision, Recipe, RuleRecipe
from duotone.recipes.rules import Rule
from duotone_lab.training import checkpoint, comparison, continuation
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.gemm_options import Option, Size, options_of
from duotone_lab.training.goal import Goal, Prediction, predict
from duotone_lab.training.loop import Progress, Run, Saving, train
from duotone_lab.training.schema import Document, Losses, RunEntry, Settings
from duotone_lab.training.sensitivity import Effect, effects
from duotone_lab.training.trainer import Trainer

CHECKPOINTS, TITLE, SAVE_EVERY = "checkpoints", "searched", 50
Stop = Callable[[], bool]


@dataclass
class Search:
    """What is looked for, in which training, among the formats of `recipes`; `effects` are those measured so far.

    `size` is the width and tokens for which time and memory are predicted, None for those of the model. The check
    trains under `seeds` seeds. UserError if no choice can meet the goal.
    """

    config: TrainConfig
    goal: Goal
    recipes: Sequence[Recipe]
    size: Size | None
    seeds: int
    effects: list[Effect] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table = speeds.measured()
        sizes = "of the sizes of the model" if self.size is None else f"{self.size[0]} wide with {self.size[1]} tokens"
        self.where = f"on an {self.table.device} for linears {sizes}"
        options = options_of(self.config, self.recipes, self.table, self.size)
        self.options = self.goal.usable(options, self.where, self.table.reach)

    def train_reference(
        self, corpus: Corpus, folder: Path, progress: Progress, should_stop: Stop
    ) -> tuple[Trainer, Run]:
        """bf16 under the first seed, from the newest checkpoint in `folder` if it has one."""
        run = Run(REFERENCE, HighPrecision(), self.config.seed, is_reference=True)
        trainer = Trainer(self.config, run.recipe, corpus)
        if checkpoint.steps(folder):
            run.resume(trainer, checkpoint.latest(folder))
        train(trainer, run, saving=Saving(folder, SAVE_EVERY), progress=progress, should_stop=should_stop)
        if run.error or (not run.stopped and run.final_heldout_loss is None):
            raise UserError(f"the bf16 run has no loss to compare with ({run.error}): give a lower --lr or other data")
        return trainer, run

    def measure_effects(self, trainer: Trainer, publish: Callable[[], None], progress: Progress, stop: Stop) -> bool:
        """Measure the missing `effects`, module by module. Returns whether all are complete now."""
        total = sum(map(len, self.options.values()))
        progress.begin(
            "effects of single GEMMs",
            steps=total,
            completed=len(self.effects),
            tokens_per_step=self.config.preset.tokens_per_step,
            model=self.config.model,
        )
        try:
            for effect, loss in effects(trainer, self.options, self.effects):
                if self.effects and self.effects[-1].module != effect.module:
                    publish()
                self.effects.append(effect)
                progress.step(len(self.effects), loss)
                if stop():
                    break
        finally:
            progress.end()
        publish()
        return len(self.effects) == total

    def conclude(self, reference: Run) -> "Finding":
        """The recipe that follows from the effects, and predictions for it and for uniform recipes."""
        loss, rate = reference.final_heldout_loss or math.inf, nats_per_e_fold(reference.train_loss)
        costs = {
            (effect.module, effect.gemm, effect.recipe): 100 * (effect.forward + rate * effect.backward) / loss
            for effect in self.effects
        }
        chosen = self.goal.choose(self.options, costs)
        rules = rules_for({gemm: option.formats for gemm, option in chosen.items() if option.formats != EXACT})
        uniform = {}
        for recipe in self.recipes:
            alike = {gemm: [o for o in choices if o.recipe == recipe.name] for gemm, choices in self.options.items()}
            if all(alike.values()):
                uniform[recipe.name] = predict({gemm: choices[0] for gemm, choices in alike.items()}, costs)
        recipe = RuleRecipe(title=TITLE, rules=rules or (Rule(format="identity"),), strict=self.recipes[0].strict)
        return Finding(recipe, chosen, predict(chosen, costs), uniform)

    def check(
        self,
        finding: "Finding",
        reference: Run,
        corpus: Corpus,
        *,
        previous: Document | None,
        command: str,
        progress: Progress,
        should_stop: Stop,
        publish: Callable[[Document], None],
    ) -> None:
        """Compare the recipe with bf16 under paired seeds; runs of `previous` that are whole are taken over."""
        first, *others = comparison.plan_runs(self.config, [finding.recipe], self.seeds)
        about: Settings = {
            "command": command,
            "size": self.size,
            "search": {"recipe": TITLE, **asdict(self.goal), **asdict(finding.predicted)},  # type: ignore[typeddict-item]
        }
        runs = [replace(reference, label=first.label), *others]
        if previous is not None:
            runs = [runs[0], *continuation.take_over(others, previous, self.config.steps)]
        finding.document = comparison.compare(
            self.config, runs, corpus, about, progress=progress, should_stop=should_stop, publish=publish
        )


def nats_per_e_fold(curve: Losses) -> float:
    """How far the loss falls between the second quarter and the second half of a run, for each e-fold of steps."""
    losses = [loss for _, loss in curve if loss is not None]
    quarter, half = len(losses) // 4, len(losses) // 2
    if quarter == 0:
        return 0.0
    return max(0.0, (statistics.fmean(losses[quarter:half]) - statistics.fmean(losses[half:])) / math.log(2))


@dataclass
class Finding:
    """The recipe and its option for each GEMM, predictions for it and for uniform recipes, and the check."""

    recipe: RuleRecipe
    chosen: Mapping[Gemm, Option]
    predicted: Prediction
    uniform: Mapping[str, Prediction]
    document: Document | None = None

    @property
    def measured(self) -> RunEntry | None:
        """The entry of the recipe in the comparison, None before that is whole and has a gap."""
        runs = self.document["runs"] if self.document is not None and not self.document["partial"] else []
        return next((run for run in runs if run["name"] == TITLE and run["gap_percent"] is not None), None)

    @property
    def off_by(self) -> float | None:
        """The predicted gap less the measured one, in percent of the loss."""
        measured = self.measured and self.measured["gap_percent"]
        return None if measured is None else self.predicted.gap_percent - measured

    @property
    def verdict(self) -> str:
        """How far off the predicted gap was, in words."""
        measured, off = self.measured, self.off_by
        if measured is None or off is None:
            return "The prediction was not checked: the comparison has no gap."
        margin, count = measured.get("gap_margin"), len(measured.get("gaps") or ())
        text = f"Predicted {self.predicted.gap_percent:+.3f} %, measured {measured['gap_percent']:+.3f} %"
        if margin is None:
            return f"{text} with one seed: off by {off:+.3f} points, which one seed cannot judge."
        inside = "inside" if abs(off) <= margin else "outside"
        return f"{text} ± {margin:.3f} over {count} seeds: off by {off:+.3f} points, {inside} of the interval."

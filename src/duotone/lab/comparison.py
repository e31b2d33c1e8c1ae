"""The same model, weights and batches once per recipe."""

from collections.abc import Callable, Sequence

import torch

import duotone
from duotone import Plan
from duotone.errors import UserError
from duotone.lab import models
from duotone.lab.data import Corpus
from duotone.lab.document import PERTURBATION, document
from duotone.lab.loop import Run, train
from duotone.lab.progress import Progress
from duotone.lab.schema import Document
from duotone.lab.trainer import TrainConfig, Trainer
from duotone.recipes import Recipe

REFERENCE = "bf16"
NOISE = "bf16 (noise)"


def planned(config: TrainConfig, recipe: Recipe, device: str | None = None) -> Plan:
    """What would run for the model of `config`, whose weights are not made; raises like `convert`.

    `device` stands for that of the configuration, and may be an architecture, as "sm90".
    """
    model = models.outline(config.model, config.preset).to(torch.bfloat16)
    return duotone.plan(duotone.convert(model, recipe), recipe, device=device or config.device)


def compare(
    config: TrainConfig,
    recipes: Sequence[Recipe],
    corpus: Corpus,
    *,
    command: str = "",
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    publish: Callable[[Document], None] = lambda _: None,
) -> Document:
    """Train bf16, bf16 from perturbed weights, and each other recipe; gives the document of all runs.

    `publish` gets the partial document after each run, so that a later one that breaks loses none before it. A recipe
    that fails while it runs, or runs out of memory, has that as its error; the others go on. Raises like `plan_runs`
    before the first step.
    """
    runs = plan_runs(config, recipes)
    stopped = False
    for run in runs:
        if stopped := stopped or should_stop():
            continue
        perturbation = PERTURBATION if run.is_noise else 0.0
        try:
            trainer = Trainer(config, run.recipe, corpus, perturbation=perturbation)
            train(trainer, run, progress=progress, should_stop=should_stop)
        except (UserError, torch.OutOfMemoryError) as error:
            run.error = str(error).splitlines()[0]
        stopped = run.stopped
        publish(document(config, corpus, runs, command=command, partial=True))
    return document(config, corpus, runs, command=command, partial=stopped)


def plan_runs(config: TrainConfig, recipes: Sequence[Recipe]) -> list[Run]:
    """The runs of a comparison: the bf16 reference and its noise run first, whether asked for or not.

    UserError where a recipe cannot be used for this model and device, or two have the same name.
    """
    names = [recipe.name for recipe in recipes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"the recipe {twice!r} is given twice: name each once, and give recipe files names of their own"
        )
    for recipe in recipes:
        planned(config, recipe)
    reference = duotone.recipes.load(REFERENCE)
    return [
        Run(REFERENCE, reference, is_reference=True),
        Run(NOISE, reference, is_noise=True),
        *(Run(recipe.name, recipe) for recipe in recipes if recipe.name != REFERENCE),
    ]

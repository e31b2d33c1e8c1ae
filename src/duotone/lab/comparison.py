"""The same model, weights and batches once per recipe."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

import duotone
from duotone import Plan
from duotone.errors import UserError
from duotone.lab import models
from duotone.lab.config import TrainConfig
from duotone.lab.data import Corpus
from duotone.lab.document import NOTHING, PERTURBATION, document
from duotone.lab.loop import Progress, Run, train
from duotone.lab.schema import Document, Settings
from duotone.lab.trainer import Trainer
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
    runs: Sequence[Run],
    corpus: Corpus,
    about: Settings = NOTHING,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    publish: Callable[[Document], None] = lambda _: None,
    make: Callable[..., Trainer] = Trainer,
) -> Document:
    """Train the unfinished runs among `runs`, which come from `plan_runs`. Returns the document of all runs.

    `publish` gets the partial document after each run, so that a later one that breaks loses none before it. A recipe
    that fails while it runs, or runs out of memory, has that as its error; the others go on. `make` is what trains.
    """
    progress = progress or Progress()
    unfinished = [run for run in runs if not run.is_over(config.steps)]
    progress.expect(len(unfinished), config.steps)
    stopped = False
    for run in unfinished:
        if stopped := stopped or should_stop():
            break
        perturbation = PERTURBATION if run.is_noise else 0.0
        try:
            trainer = make(replace(config, seed=run.seed), run.recipe, corpus, perturbation=perturbation)
            train(trainer, run, progress=progress, should_stop=should_stop)
        except (UserError, torch.OutOfMemoryError) as error:
            run.error = str(error).splitlines()[0]
        stopped = run.stopped
        publish(document(config, corpus, runs, about, partial=True))
    return document(config, corpus, runs, about, partial=stopped)


def plan_runs(config: TrainConfig, recipes: Sequence[Recipe], seeds: int = 1) -> list[Run]:
    """The runs of a comparison, the bf16 reference first, whether asked for or not, and one seed after the other.

    With a single seed a noise run follows the reference: bf16 from perturbed weights. UserError where a recipe cannot
    be used for this model and device, or two have the same name.
    """
    names = [recipe.name for recipe in recipes]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise UserError(
            f"the recipe {twice!r} is given twice: name each once, and give recipe files names of their own"
        )
    for recipe in recipes:
        planned(config, recipe)
    reference = duotone.recipes.load(REFERENCE)
    others = [recipe for recipe in recipes if recipe.name != REFERENCE]
    if seeds == 1:
        return [
            Run(REFERENCE, reference, config.seed, is_reference=True),
            Run(NOISE, reference, config.seed, is_noise=True),
            *(Run(recipe.name, recipe, config.seed) for recipe in others),
        ]
    return [
        Run(
            recipe.name,
            recipe,
            seed,
            is_reference=recipe is reference,
            is_observed=seed == config.seed,
            label=f"{recipe.name}, seed {seed}",
        )
        for seed in range(config.seed, config.seed + seeds)
        for recipe in (reference, *others)
    ]

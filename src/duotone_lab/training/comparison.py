"""The same model, weights and batches once per recipe."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import torch

import duotone
from duotone import Plan
from duotone.errors import UserError
from duotone.observe.candidates import REFERENCE, load_candidates
from duotone.recipes import Recipe
from duotone_lab.training import models
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.document import NOTHING, PERTURBATION, document
from duotone_lab.training.loop import Progress, Run, Saving, train
from duotone_lab.training.schema import Document, Settings
from duotone_lab.training.trainer import Trainer

NOISE = "bf16 (noise)"
UNFINISHED = "unfinished"
OF_RUN = re.compile(r"[0-9a-f]{16}-[0-9]+")


def planned(config: TrainConfig, recipe: Recipe, device: str | None = None) -> Plan:
    """What would run for the model of `config`, whose weights are not made; raises like `convert`.

    `device` stands for that of the configuration, and may be an architecture, as "sm90".
    """
    model = models.outline(config.model, config.preset).to(torch.bfloat16)
    return duotone.plan(duotone.convert(model, recipe), recipe, device=device or config.device)


def compare(  # noqa: PLR0913 (the subject of the comparison, and options of tools)
    config: TrainConfig,
    runs: Sequence[Run],
    corpus: Corpus,
    about: Settings = NOTHING,
    *,
    progress: Progress | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    publish: Callable[[Document], None] | None = None,
    make: Callable[..., Trainer] = Trainer,
    saving: Saving | None = None,
) -> Document:
    """Train the unfinished runs among `runs`, which come from `plan_runs`. Returns the document of all runs.

    - `publish` gets the partial document before the first run and after each, so that a later failure loses no earlier
      run. Its UserError becomes a note.
    - A recipe that fails while it runs, or runs out of memory, gets that as its error. The others go on.
    - `make` builds the trainer of a run.
    - With `saving` a run continues from its newest checkpoint there; a damaged one is a UserError. The checkpoints of a
      run are removed when its end is published.
    """
    progress = progress or Progress()
    unfinished = [run for run in runs if not run.is_over(config.steps)]
    progress.expect(len(unfinished), config.steps)

    def publish_all() -> None:
        if publish is None:
            return
        try:
            publish(document(config, corpus, runs, about, partial=True))
        except UserError as error:
            progress.note(str(error))  # the next runs go on, and at the end it is an error
            return
        for run in runs:
            if saving is not None and run.is_over(config.steps):
                forget(saving.folder, run)

    stopped = False
    publish_all()
    for run in unfinished:
        if stopped := stopped or should_stop():
            break
        trainer, perturbation = None, PERTURBATION if run.is_noise else 0.0
        with _errors_of(run):
            trainer = make(replace(config, seed=run.seed), run.recipe, corpus, perturbation=perturbation)
        if trainer is not None:
            part = saving and replace(saving, folder=saving.folder / _folder(run))
            if part is not None and (newest := trainer.newest(part.folder)) is not None:
                run.resume(trainer, newest)
            with _errors_of(run):
                train(trainer, run, saving=part, progress=progress, should_stop=should_stop)
        stopped = run.stopped
        publish_all()
    return document(config, corpus, runs, about, partial=stopped)


@contextmanager
def _errors_of(run: Run) -> Iterator[None]:
    """The errors that end only this run."""
    try:
        yield
    except (UserError, torch.OutOfMemoryError) as error:
        run.error = str(error).splitlines()[0]


def saving(folder: Path, every: int) -> Saving:
    """The folder for checkpoints of unfinished runs of the comparison in `folder`."""
    return Saving(folder / UNFINISHED, every, keeps_last=False)


def _folder(run: Run) -> str:
    """A file name for a run: names of recipes may be too long, or contain characters that a file system refuses."""
    return f"{hashlib.sha256(run.name.encode()).hexdigest()[:16]}-{run.seed}"


def forget(folder: Path, run: Run | None = None) -> None:
    """Remove the checkpoints of `run` below `folder`, or of all runs if `run` is left out."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if OF_RUN.fullmatch(path.name) and (run is None or path.name == _folder(run)):
            shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):  # absent, or not empty
        folder.rmdir()


def plan_runs(config: TrainConfig, recipes: Sequence[Recipe], seeds: int = 1) -> list[Run]:
    """The runs of a comparison, the bf16 reference first, whether asked for or not, and one seed after the other.

    With a single seed a noise run follows the reference: bf16 from perturbed weights. UserError if a recipe cannot
    be used for this model and device, or two have the same name.
    """
    recipes = load_candidates("compare", recipes or [REFERENCE])
    for recipe in recipes:
        planned(config, recipe)
    reference = recipes[0]
    runs = [
        Run(
            recipe.name,
            recipe,
            seed,
            is_reference=recipe is reference,
            is_observed=seed == config.seed,
            label=f"{recipe.name}, seed {seed}" if seeds > 1 else "",
        )
        for seed in range(config.seed, config.seed + seeds)
        for recipe in recipes
    ]
    if seeds == 1:
        runs.insert(1, Run(NOISE, reference, config.seed, is_noise=True))
    return runs

"""The document of a comparison or a training run, of the types in `schema`."""

import platform
import shutil
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import duotone
from duotone.dispatch import compiled_casts
from duotone.errors import UserError
from duotone_lab.training import data, models
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.data import Corpus
from duotone_lab.training.loop import Run
from duotone_lab.training.ranking import Judgement
from duotone_lab.training.schema import Curves, Document, Machine, RunEntry, Settings

PERTURBATION = 1e-6
"""Relative noise on the initial weights of the noise run."""

NOTHING = Settings()


def document(
    config: TrainConfig, corpus: Corpus, runs: Sequence[Run], about: Settings = NOTHING, *, partial: bool
) -> Document:
    """Everything about `runs`; `partial` where they were stopped. Numbers that do not exist are None.

    `about` are settings that no run reads, such as the command.
    Runs of one name are a recipe under several seeds: one entry, which tells curves, memory and plan of the first.
    """
    judgement = Judgement(runs)
    entries = [_entry(recipe, judgement, config) for recipe in judgement.recipes.values()]
    return {
        "duotone": duotone.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "partial": partial,
        "machine": machine(config.device),
        "settings": {
            "command": "",
            "preset": config.preset.name,
            "model": models.describe(config.model, config.preset),
            "parameters": models.parameter_count(config.model, config.preset),
            "data": ", ".join(corpus.sources),
            "data_bytes": corpus.size,
            "digests": digests(config, corpus),
            "steps": config.steps,
            "tokens_per_step": config.preset.tokens_per_step,
            "context": config.preset.model.context,
            "seed": config.seed,
            "seeds": max(map(len, judgement.recipes.values())),
            "judged_step": judgement.step,
            "linears": {name: [*shape] for name, shape in models.linear_shapes(config.model, config.preset).items()},
            "learning_rate": config.preset.learning_rate,
            "noise": {"perturbation": PERTURBATION},
            "config": config.to_dict(),
            **about,
        },
        "runs": entries,
    }


def digests(config: TrainConfig, corpus: Corpus) -> dict[str, str]:
    """Digests of the data and of the model, which may change between a comparison and its continuation."""
    return {"data": corpus.digest, "model": models.get(config.model).digest(config.preset)}


def unchanged(config: TrainConfig, stored: object, since: str) -> Corpus:
    """The text of a config; UserError unless `stored` are the digests of it and of the model."""
    corpus = data.load(config.data, context=config.preset.model.context)
    if digests(config, corpus) != stored:
        raise UserError(f"the data or the model has changed since {since}")
    return corpus


def machine(device: str) -> Machine:
    """What the numbers were measured on."""
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "device": device,
        "processor": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "compiled_casts": compiled_casts(),
    }


def _entry(runs: Sequence[Run], judgement: Judgement, config: TrainConfig) -> RunEntry:
    """A recipe, whose runs differ in their seeds."""
    run = runs[0]
    memory, step_ms = run.memory, run.step_ms
    return {
        "name": run.name,
        "recipe": run.recipe.to_dict(),
        "is_reference": run.is_reference,
        "is_noise": run.is_noise,
        **curves_of(runs),
        **judgement.verdict(run.name),
        "step_ms": step_ms,
        "tokens_per_second": 1e3 * config.preset.tokens_per_step / step_ms if step_ms else None,
        "peak_memory_bytes": memory and memory.peak_bytes,
        "weight_bytes": memory and memory.weight_bytes,
        "saved_activation_bytes": memory and memory.saved_activation_bytes,
        **run.observed,
        "error": next((run.error for run in runs if run.error), None),
    }


def curves_of(runs: Sequence[Run]) -> Curves:
    """The curves of the first run of a recipe, and those of its repeats."""
    first, *others = runs
    return {
        "train_loss": first.train_loss,
        "heldout_loss": first.heldout_loss,
        "final_train_loss": first.final_train_loss,
        "final_heldout_loss": first.final_heldout_loss,
        "repeats": [
            {"seed": each.seed, "train_loss": each.train_loss, "heldout_loss": each.heldout_loss, "error": each.error}
            for each in others
        ],
    }


def _commit() -> str | None:
    """The commit of the clone that Duotone runs from, None if it is installed."""
    clone = Path(duotone.__file__).parents[2]
    if not (clone / ".git").exists() or not (git := shutil.which("git")):
        return None
    result = subprocess.run([git, "-C", clone, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return result.stdout.strip() or None


def _processor() -> str:
    """The name of the processor, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()

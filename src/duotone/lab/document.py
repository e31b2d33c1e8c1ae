"""The document of a comparison or a training run, of the types in `schema`."""

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

import torch

import duotone
from duotone.dispatch import compiled_casts
from duotone.lab import models
from duotone.lab.data import Corpus
from duotone.lab.loop import Run
from duotone.lab.schema import Document, Json, RunEntry
from duotone.lab.trainer import TrainConfig

PERTURBATION = 1e-6
"""Relative noise on the initial weights of the noise run."""


def document(config: TrainConfig, corpus: Corpus, runs: Sequence[Run], *, command: str, partial: bool) -> Document:
    """Everything about `runs`; `partial` where they were stopped. Numbers that do not exist are None."""
    reference = next((run for run in runs if run.is_reference), None)
    entries = [_entry(run, reference, config) for run in runs]
    noise = next((entry["gap_percent"] for entry in entries if entry["is_noise"]), None)
    return {
        "duotone": duotone.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "partial": partial,
        "machine": machine(config.device),
        "settings": {
            "command": command,
            "preset": config.preset.name,
            "model": models.describe(config.model, config.preset),
            "parameters": models.parameter_count(config.model, config.preset),
            "data": ", ".join(corpus.sources),
            "data_bytes": corpus.size,
            "steps": config.steps,
            "tokens_per_step": config.preset.tokens_per_step,
            "context": config.preset.model.context,
            "seed": config.seed,
            "learning_rate": config.preset.learning_rate,
            "noise": {"perturbation": PERTURBATION, "gap_percent": noise},
        },
        "runs": entries,
    }


def machine(device: str) -> Json:
    """What the numbers were measured on."""
    return {
        "torch": torch.__version__,
        "device": device,
        "processor": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "compiled_casts": compiled_casts(),
    }


def _entry(run: Run, reference: Run | None, config: TrainConfig) -> RunEntry:
    memory, step_ms = run.memory, run.step_ms
    return {
        "name": run.name,
        "recipe": run.recipe.to_dict(),
        "is_reference": run.is_reference,
        "is_noise": run.is_noise,
        "train_loss": run.train_loss,
        "heldout_loss": run.heldout_loss,
        "final_train_loss": run.final_train_loss,
        "final_heldout_loss": run.final_heldout_loss,
        "gap_percent": _gap_percent(run, reference, config.steps),
        "step_ms": step_ms,
        "tokens_per_second": 1e3 * config.preset.tokens_per_step / step_ms if step_ms else None,
        "peak_memory_bytes": memory and memory.peak_bytes,
        "weight_bytes": memory and memory.weight_bytes,
        "saved_activation_bytes": memory and memory.saved_activation_bytes,
        "plan": run.plan,
        "statistics": run.statistics,
        "error": run.error,
    }


def _gap_percent(run: Run, reference: Run | None, steps: int) -> float | None:
    """Held-out loss above the reference's, where both reached the last step."""
    runs = (run, reference) if reference is not None else ()
    if not runs or not all(run.heldout_loss and run.heldout_loss[-1][0] == steps for run in runs):
        return None
    loss, base = (run.final_heldout_loss for run in runs)
    return None if loss is None or base is None else 100.0 * (loss - base) / base


def _processor() -> str:
    """The name of the processor, as far as the system tells it."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()

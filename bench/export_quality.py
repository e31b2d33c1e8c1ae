"""What does an export lose? The perplexity of a small GPT before it and after it, for each recipe and scheme.

python -m bench.export_quality >> bench/results/DATE-cpu-export.jsonl

The records go to stdout, the table of docs/serving.md to stderr. Weights alone are rounded; activations stay in bf16.
"""

import copy
import math
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

import duotone
from bench.timing.records import emit
from duotone.lab import data, presets
from duotone.lab.config import TrainConfig
from duotone.lab.trainer import Trainer

STEPS = 400
RECIPES = ("bf16", "fp8-current", "mxfp8")
SCHEMES = ("BF16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4A16")


def perplexity(trainer: Trainer, model: nn.Module) -> float:
    """Of the held-out text, with products in bf16."""
    preset = trainer.config.preset
    batches = trainer.corpus.heldout_batches(preset.heldout_batches, count=preset.batch, context=preset.model.context)
    with torch.no_grad(), duotone.autocast(enabled=False):
        losses = [model(tokens, targets) for tokens, targets in batches]
    return math.exp(torch.stack(losses).double().mean().item())


def exported(model: nn.Module, scheme: str) -> nn.Module:
    """The model with the weights that a server would read."""
    other = duotone.revert(copy.deepcopy(model))
    with tempfile.TemporaryDirectory() as folder:
        duotone.export(other, Path(folder) / "model", scheme=scheme)
        weights = duotone.load(Path(folder) / "model")
    assert isinstance(weights, dict)
    plain = {n: t.dequantize() if isinstance(t, duotone.QuantizedTensor) else t for n, t in weights.items()}
    other.load_state_dict(plain, strict=False)
    return other


def main() -> None:
    preset = presets.get("demo")
    corpus = data.load((), context=preset.model.context)
    print("| trained under | before |", " | ".join(SCHEMES), "|", file=sys.stderr)
    for recipe in RECIPES:
        trainer = Trainer(TrainConfig(preset, STEPS), duotone.recipes.load(recipe), corpus)
        for _ in range(STEPS):
            trainer.step()
        before = perplexity(trainer, trainer.model)
        after = {scheme: perplexity(trainer, exported(trainer.model, scheme)) for scheme in SCHEMES}
        emit("cpu", {"bench": "export-quality", "recipe": recipe, "steps": STEPS, "before": before, **after})
        cells = [f"{value:.4f}" for value in (before, *after.values())]
        print(f"| `{recipe}` |", " | ".join(cells), "|", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

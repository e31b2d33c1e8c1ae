"""What does an export lose? The perplexity of a small GPT before it and after it, for each recipe and scheme.

python -m bench.export_quality >> bench/results/DATE-cpu-export.jsonl

The records go to stdout, the table of docs/serving.md to stderr. Schemes with a stored scale of activations, FP8 and
NVFP4, round the input of each linear under it, as a server does. In the others activations stay in bf16.
"""

import copy
import math
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import duotone
from bench.timing.records import emit
from duotone.formats.elements import E2M1
from duotone.serving.folder import open_files
from duotone_lab.training import data, presets
from duotone_lab.training.config import TrainConfig
from duotone_lab.training.trainer import Trainer

STEPS = 400
RECIPES = ("bf16", "fp8-current", "mxfp8")
SCHEMES = ("BF16", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8", "MXFP4", "NVFP4A16", "FP8", "NVFP4")
CALIBRATED = 8
"""Training batches that decide the scales of activations."""


def in_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x in E4M3 under a scale, fp32 (1,): codes are x / scale, and larger values saturate."""
    codes = (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return (codes.float() * scale).to(x.dtype)


def in_nvfp4(x: Tensor, factor: Tensor) -> Tensor:
    """x in NVFP4 under a global scale, fp32 (1,): blocks of 16 have E4M3 scales, which are multiplied by it."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scale = (blocks.abs().amax(-1, keepdim=True) / 6 * factor).clamp(max=448).to(torch.float8_e4m3fn).float() / factor
    codes = E2M1.narrow(torch.where(scale == 0, 0.0, blocks / scale))
    return (E2M1.widen(codes) * scale).flatten(-2).to(x.dtype)


ROUNDINGS = {"input_scale": in_fp8, "input_global_scale": in_nvfp4}
"""By what a file calls the stored scale."""


def perplexity(trainer: Trainer, model: nn.Module) -> float:
    """Of the held-out text, with products in bf16."""
    preset = trainer.config.preset
    batches = trainer.corpus.heldout_batches(preset.heldout_batches, count=preset.batch, context=preset.model.context)
    with torch.no_grad(), duotone.autocast(enabled=False):
        losses = [model(tokens, targets) for tokens, targets in batches]
    return math.exp(torch.stack(losses).double().mean().item())


def exported(trainer: Trainer, scheme: str) -> nn.Module:
    """The model with the weights that a server would read, and with its rounding of activations under stored scales."""
    other = duotone.revert(copy.deepcopy(trainer.model))

    def calibrate() -> None:
        for step in range(CALIBRATED):
            other(*trainer.batch(step))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        duotone.export(other, path, scheme=scheme, calibrate=calibrate)
        weights, files = duotone.load(path), open_files(path)
        scales = {name: file.read(name) for name, file in files.items() if name.rpartition(".")[2] in ROUNDINGS}
    assert isinstance(weights, dict)
    plain = {n: t.dequantize() if isinstance(t, duotone.QuantizedTensor) else t for n, t in weights.items()}
    other.load_state_dict(plain, strict=False)
    for name, scale in scales.items():
        linear, _, kind = name.rpartition(".")
        other.get_submodule(linear).register_forward_pre_hook(partial(_round, ROUNDINGS[kind], scale))
    return other


def _round(rounding: Callable[[Tensor, Tensor], Tensor], scale: Tensor, _: nn.Module, x: tuple[Tensor]) -> Tensor:
    return rounding(x[0], scale)


def main() -> None:
    preset = presets.get("demo")
    corpus = data.load((), context=preset.model.context)
    print("| trained under | before |", " | ".join(SCHEMES), "|", file=sys.stderr)
    for recipe in RECIPES:
        trainer = Trainer(TrainConfig(preset, STEPS), duotone.recipes.load(recipe), corpus)
        for _ in range(STEPS):
            trainer.step()
        before = perplexity(trainer, trainer.model)
        after = {scheme: perplexity(trainer, exported(trainer, scheme)) for scheme in SCHEMES}
        emit("cpu", {"bench": "export-quality", "recipe": recipe, "steps": STEPS, "before": before, **after})
        cells = [f"{value:.4f}" for value in (before, *after.values())]
        print(f"| `{recipe}` |", " | ".join(cells), "|", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()

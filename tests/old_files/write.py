"""Writes the old files. Run at the commit that `old_cases.COMMIT` names, with its source on PYTHONPATH.

It is not to be run again: the files show that later commits read what that commit wrote.
"""

import copy
import gzip
import io
import json
import sys
from typing import Any

import old_cases as cases
import torch

import duotone
from duotone import recipes
from duotone.lab import checkpoint, data
from duotone.lab.config import TrainConfig
from duotone.lab.presets import ModelConfig, Preset
from duotone.lab.trainer import Trainer

TEXT = "the quick brown fox jumps over the lazy dog\n" * 20
PRESET = Preset(
    name="old",
    model=ModelConfig(layers=1, dim=8, heads=1, hidden=8, context=8, tied=True),
    batch=2,
    steps=4,
    learning_rate=1e-2,
    warmup=1,
    heldout_batches=1,
)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases.FOLDER.mkdir(exist_ok=True)
    write_models()
    write_modules()
    write_values()
    write_checkpoint()
    (cases.FOLDER / "machine.json").write_text(json.dumps(cases.machine()) + "\n")
    size = sum(path.stat().st_size for path in cases.FOLDER.rglob("*") if path.is_file())
    print(f"{size} bytes", file=sys.stderr)


def save(value: Any, name: str) -> None:
    content = io.BytesIO()
    torch.save(value, content)
    (cases.FOLDER / f"{name}.pt.gz").write_bytes(gzip.compress(content.getvalue(), mtime=0))


def write_models() -> None:
    """State dicts of models with quantized parameters, and of an optimizer that goes on from there."""
    for recipe in cases.RECIPES:
        model = cases.quantized_model(recipe)
        state = copy.deepcopy(model.state_dict())
        decoded = {name: value.dequantize() for name, value in model.named_parameters() if hasattr(value, "quantizer")}
        with torch.no_grad(), duotone.autocast(recipe=cases.load_recipe(recipe)):
            output = model.eval()(cases.matrix())
        seeds = duotone.rng_state(model)
        save({"state": state, "decoded": decoded, "output": output, "rng_state": seeds}, f"state-{recipe}")
    model = cases.quantized_model("mxfp8")
    adamw = cases.optimizer(model)
    cases.step(model, adamw, 0)
    before = copy.deepcopy({"model": model.state_dict(), "optimizer": adamw.state_dict()})
    cases.step(model, adamw, 1)
    save({"before": before, "masters": cases.masters(adamw)}, "optimizer-state")
    save(adamw, "optimizer")


def write_modules() -> None:
    for name, (module, run) in cases.modules().items():
        with torch.no_grad():
            output = run(module.eval())
        save({"module": module, "output": output}, f"module-{name}")
    result = cases.small_ops().eval()
    with torch.no_grad():
        called = copy.deepcopy(result)  # some of that commit cannot be pickled once they were called
        output = cases.outputs_of(called)
    save({"module": result, "output": output}, "module-ops")


def write_values() -> None:
    save(cases.values(), "values")
    save(cases.bound_handle(), "bound-handle")
    result = cases.tensors()
    save({name: {"tensor": value, "decoded": value.detach().dequantize()} for name, value in result.items()}, "tensors")
    store = cases.tap()
    save({"tap": store, "rows": store.rows()}, "tap")
    written = {name: recipe.to_dict() for name, recipe in cases.built_in_recipes().items() if name != "custom"}
    written["fp8-block square"] = recipes.Float8BlockScaling(square_wgrad_input=True).to_dict()
    written["measured"] = recipes.MXFP8BlockScaling(min_gemm_work="measured").to_dict()
    written["schedule"] = cases.values()["schedule"].to_dict()
    (cases.FOLDER / "recipes.json").write_text(json.dumps(written, indent=1) + "\n")
    renamed = recipes.Float8BlockScaling(square_wgrad_input=True), recipes.MXFP8BlockScaling(min_gemm_work=4096)
    save(renamed, "renamed-fields")


def write_checkpoint() -> None:
    """A run of the laboratory after one step, and the loss of its second step."""
    text = cases.FOLDER / "text.txt"
    text.write_text(TEXT)
    config = TrainConfig(PRESET, steps=4)
    corpus = data.load([str(text)], context=PRESET.model.context)
    trainer = Trainer(config, cases.load_recipe("fp8-delayed"), corpus)
    trainer.step()
    saved = checkpoint.save(cases.FOLDER / "run", trainer.checkpoint({}))
    loss = trainer.step()
    (cases.FOLDER / "run.json").write_text(json.dumps({"folder": saved.name, "next_loss": loss}) + "\n")


if __name__ == "__main__":
    main()

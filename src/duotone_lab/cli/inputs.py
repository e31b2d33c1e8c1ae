"""Arguments of the command line as values of `duotone_lab.training`. Every failure is a UserError."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from duotone.recipes import Recipe, Schedule
from duotone_lab.cli.command_options import Typed
from duotone_lab.training import models, presets
from duotone_lab.training.config import TrainConfig, require_device

Chosen = TypeVar("Chosen", Recipe, Recipe | Schedule)


def config_from(typed: Mapping[str, Typed], stored: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config of the options; where one was not typed it is that of `stored`, else its default."""
    chosen: dict[str, Any] = dict(stored or {})
    chosen |= {key: value for key, value in typed.items() if value not in (None, ())}
    stored_preset = chosen.get("preset", "demo")  # a name, or a table with the sizes that were typed then
    if isinstance(stored_preset, str):
        stored_preset = {"name": stored_preset, "model": {}}
    preset = presets.get(stored_preset["name"]).resized(
        learning_rate=chosen.get("lr", stored_preset.get("learning_rate")),
        batch=chosen.get("batch", stored_preset.get("batch")),
        context=chosen.get("context_bytes", stored_preset["model"].get("context")),
    )
    device, model = chosen.get("device", "cpu"), chosen.get("model", models.DEFAULT)
    require_device(device)
    models.describe(model, preset)  # a UserError if there is no such model
    return TrainConfig(
        preset=preset,
        steps=chosen.get("steps", preset.steps),
        seed=chosen.get("seed", 0),
        device=device,
        data=tuple(chosen.get("data", ())),
        model=model,
    )


def make_strict(chosen: Chosen, strict: bool) -> Chosen:
    """The recipe, or the schedule with each of its recipes. With `strict`, a fallback is an error in them."""
    if not strict:
        return chosen
    if isinstance(chosen, Schedule):
        return chosen.map(lambda recipe: replace(recipe, strict=True))
    return replace(chosen, strict=True)

"""From what was typed to what the laboratory takes; every failure is a UserError."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from duotone.lab import models, presets
from duotone.lab.trainer import TrainConfig, require_device
from duotone.recipes import Recipe


def config_from(given: Mapping[str, Any], stored: Mapping[str, Any] | None = None) -> TrainConfig:
    """The config of the options `given`; where one is None it is that of `stored`, else its default."""
    chosen = {**(stored or {}), **{key: value for key, value in given.items() if value not in (None, ())}}
    name = chosen.get("preset", "demo")
    preset = presets.get(name if isinstance(name, str) else name["name"])
    device, model = chosen.get("device", "cpu"), chosen.get("model", models.DEFAULT)
    require_device(device)
    models.describe(model, preset)  # a UserError where there is no such model
    return TrainConfig(
        preset=preset,
        steps=chosen.get("steps", preset.steps),
        seed=chosen.get("seed", 0),
        device=device,
        data=tuple(chosen.get("data", ())),
        model=model,
    )


def make_strict(recipe: Recipe, strict: bool) -> Recipe:
    """The recipe, for which with `strict` a fallback to high precision is an error."""
    return dataclasses.replace(recipe, strict=True) if strict else recipe

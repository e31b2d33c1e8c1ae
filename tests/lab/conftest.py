"""A small corpus, and the smallest preset that still has two layers."""

import dataclasses
import random

import pytest

from duotone_lab.training import data, presets
from duotone_lab.training.config import TrainConfig


@pytest.fixture(scope="session")
def text_file(tmp_path_factory):
    """A text file of 40 kB with some structure to learn."""
    words = ["plane", "format", "scale", "block", "row", "column", "gradient", "weight"]
    draw = random.Random(0)
    path = tmp_path_factory.mktemp("data") / "words.txt"
    path.write_text(" ".join(draw.choice(words) for _ in range(6000)))
    return path


@pytest.fixture(scope="session")
def corpus(text_file):
    return data.load([str(text_file)], context=presets.get("tiny").model.context)


@pytest.fixture
def config(text_file):
    return TrainConfig(presets.get("tiny"), steps=6, seed=1, data=(str(text_file),))


@pytest.fixture
def untied(config):
    model = dataclasses.replace(config.preset.model, tied=False)
    return dataclasses.replace(config, preset=dataclasses.replace(config.preset, model=model))

"""Packages that tests run against: which versions were tried, and how to install them.

Trainers run on a GPU if there is one.
"""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
ON_CPU = not torch.cuda.is_available()
DEVICE = "cpu" if ON_CPU else "cuda"
OF_TESTS = "transformers accelerate peft lightning compressed-tensors trl deepspeed titan torchao te".split()
"""Extras with the versions that were tried."""


def require(name: str, module: str = "") -> ModuleType:
    """The package, or a skip with the command that installs the version that was tried."""
    module = module or name.replace("-", "_")
    return pytest.importorskip(module, reason=f"pip install '{pinned()[name]}'", exc_type=ImportError)


def pinned() -> dict[str, str]:
    """The requirement of each package of the extras, by its name."""
    table = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    lines = [line for extra in OF_TESTS for line in table[extra] if not line.startswith("duotone[")]
    return {re.match(r"[\w-]+", line)[0]: line for line in lines}

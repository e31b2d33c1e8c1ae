"""Packages that tests run against: which versions were tried, and how to install them."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRAS = ("trl", "integrations", "deepspeed", "titan", "torchao", "te")


def require(name: str, module: str = "") -> ModuleType:
    """The package, or a skip with the command that installs the version that was tried."""
    module = module or name.replace("-", "_")
    return pytest.importorskip(module, reason=f"pip install '{pinned()[name]}'", exc_type=ImportError)


def pinned() -> dict[str, str]:
    """The requirement of each package of the extras, by its name."""
    table = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return {re.match(r"[\w-]+", line)[0]: line for extra in EXTRAS for line in table[extra]}

"""Packages that tests run against: which versions were tried, and how to install them."""

import re
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
EXTRA = "integrations"


def require(name: str) -> ModuleType:
    """The package, or a skip with the command that installs the version that was tried."""
    return pytest.importorskip(name.replace("-", "_"), reason=f"pip install '{pinned()[name]}'", exc_type=ImportError)


def pinned() -> dict[str, str]:
    """The requirement of each package of the extra, by its name."""
    table = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    return {re.match(r"[\w-]+", line)[0]: line for line in table[EXTRA]}

"""`te`: `transformer_engine.pytorch` as scripts import it after `install()`, for one test."""

import sys
from collections.abc import Iterator
from importlib import import_module
from types import ModuleType

import pytest

from duotone.compat import te as compat

ROOT = "transformer_engine"


@pytest.fixture
def te() -> Iterator[ModuleType]:
    compat.install()
    yield import_module(f"{ROOT}.pytorch")
    sys.meta_path.remove(compat.FINDER)
    for name in [name for name in sys.modules if name.partition(".")[0] == ROOT]:
        del sys.modules[name]

"""The public surface: what each package offers, and that names lead where they say."""

import importlib
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest

import duotone

ROOT = Path(duotone.__file__).parent
PACKAGES = sorted(".".join(("duotone", *path.parent.relative_to(ROOT).parts)) for path in ROOT.rglob("__init__.py"))


def package(name: str) -> ModuleType:
    if name == "duotone.kernels":
        pytest.importorskip("triton")
    return importlib.import_module(name)


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_lists_what_it_offers(name: str) -> None:
    module = package(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_function_has_the_name_of_a_module_beside_it(name: str) -> None:
    module = package(name)
    beside = {found.name for found in pkgutil.iter_modules(module.__path__)}
    assert not {public for public in module.__all__ if callable(getattr(module, public))} & beside


def test_the_top_level_shows_its_names_and_no_module_but_five() -> None:
    shown = set(dir(duotone))
    assert shown == {*duotone.__all__, "__version__"}
    assert {name for name in shown if isinstance(getattr(duotone, name), ModuleType)} == {
        "formats",
        "observe",
        "ops",
        "optim",
        "recipes",
    }


def test_functions_stay_functions_after_every_module_was_imported() -> None:
    for info in pkgutil.walk_packages(duotone.__path__, "duotone."):
        if info.name.split(".")[1] not in ("kernels", "cli", "report", "lab", "__main__"):
            importlib.import_module(info.name)
    for name in duotone.__all__:
        assert isinstance(getattr(duotone, name), ModuleType) == (f"duotone.{name}" in PACKAGES)


def test_type_checkers_are_told_of_types() -> None:
    assert (ROOT / "py.typed").read_text() == ""

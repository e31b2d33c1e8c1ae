"""The public surface: what each package offers, and that names lead where they say.

`surface.txt` holds all public names and signatures. To renew it after a change: python tests/test_surface.py
"""

import enum
import importlib
import inspect
import pkgutil
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import duotone
import duotone.tensor

ROOT = Path(duotone.__file__).parents[1]
PACKAGES = sorted(".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("duotone*/**/__init__.py"))


ROOMS = ("distributed", "formats", "recipes", "ops", "optim", "observe")
PUBLIC = ("duotone", *(f"duotone.{name}" for name in ROOMS), "duotone_lab")
SNAPSHOT = Path(__file__).parent / "surface.txt"
SIMPLE = (bool, int, float, str, tuple, type(None))


def surface() -> str:
    """Every public name with its signature, one a line."""
    lines = []
    for name in PUBLIC:
        module = importlib.import_module(name)
        lines += [f"[{name}]", *(described(public, getattr(module, public)) for public in sorted(module.__all__)), ""]
    return "\n".join(lines)


def described(name: str, value: object) -> str:
    if isinstance(value, type) or inspect.isroutine(value):
        return f"{'class' if isinstance(value, type) else 'def'} {name}{signature(value)}"
    return f"{name}: {'module' if isinstance(value, ModuleType) else type(value).__name__}"


def signature(function: Any) -> str:
    """Names, kinds and simple defaults of the arguments. Those of an Enum differ between versions of Python."""
    if isinstance(function, type) and issubclass(function, enum.Enum):
        return "(*values)"
    try:
        arguments = inspect.signature(function).parameters.values()
    except ValueError:
        return "(...)"
    plain = [a.replace(annotation=a.empty, default=default(a)) for a in arguments]
    return str(inspect.Signature(plain))


def default(argument: inspect.Parameter) -> object:
    value = argument.default
    return value if value is argument.empty or isinstance(value, SIMPLE) else Other()


class Other:
    """A default that is no plain value."""

    def __repr__(self) -> str:
        return "..."


def package(name: str) -> ModuleType:
    if name == "duotone.kernels":
        pytest.importorskip("triton")
    return importlib.import_module(name)


def test_the_public_surface_is_the_one_on_record() -> None:
    """To renew the record after a change that is meant: python tests/test_surface.py"""
    assert surface().splitlines() == SNAPSHOT.read_text().splitlines()


@pytest.mark.parametrize("name", PACKAGES)
def test_every_package_lists_what_it_offers(name: str) -> None:
    module = package(name)
    assert len(set(module.__all__)) == len(module.__all__)
    assert all(hasattr(module, public) for public in module.__all__)


@pytest.mark.parametrize("name", PACKAGES)
def test_no_public_function_has_the_name_of_a_module_beside_it(name: str) -> None:
    module = package(name)
    beside = {result.name for result in pkgutil.iter_modules(module.__path__)}
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
        room, package = info.name.split(".")[1], info.name.rpartition(".")[2].split("_")[0]
        absent = room == "integrations" and find_spec(package) is None
        if not absent and room not in ("kernels", "__main__"):
            importlib.import_module(info.name)
    for name in duotone.__all__:
        assert isinstance(getattr(duotone, name), ModuleType) == (f"duotone.{name}" in PUBLIC)


def test_type_checkers_are_told_of_types() -> None:
    assert (ROOT / "duotone/py.typed").read_text() == ""


if __name__ == "__main__":
    SNAPSHOT.write_text(surface())

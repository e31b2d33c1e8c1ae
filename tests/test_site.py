"""The documentation site: a reference of every public name, and figures that say what formats say."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

import duotone
from duotone import formats

DOCS = Path(__file__).parent.parent / "docs"


def script(folder: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"make_{folder}", DOCS / folder / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


REFERENCE, FIGURES = script("api"), script("figures")


@pytest.mark.parametrize("module", [*REFERENCE.MODULES, *REFERENCE.READ])
def test_the_reference_has_every_public_name(module: str) -> None:
    """Where it has not: python docs/api/make.py"""
    if module in REFERENCE.MODULES and ".integrations." in module:
        pytest.importorskip(module.rpartition(".")[2], reason="pip install '.[integrations]'", exc_type=ImportError)
    page = DOCS / "api" / f"{module.rpartition('.')[2]}.md"
    assert page.read_text() == REFERENCE.page(module)


def test_each_module_of_the_integrations_has_a_page_with_what_is_public() -> None:
    """Those beside it hold what these share. Names are read from the source, because no library is needed for that."""
    for file in (DOCS.parent / "src" / "duotone" / "integrations").glob("[a-z]*.py"):
        module = f"duotone.integrations.{file.stem}"
        if module not in {*REFERENCE.MODULES, *REFERENCE.READ}:
            assert file.stem in {"requirement", "run_state", "transformers_attention", "transformers_parallel"}, module
            continue
        page = (DOCS / "api" / f"{file.stem}.md").read_text()
        public = re.findall(r"^(?:class|def) ([A-Za-z]\w*)", file.read_text(), re.MULTILINE)
        assert public and not [name for name in public if f"{module}.{name}" not in page], module


def test_public_names_have_docstrings() -> None:
    assert {"convert", "Linear", "export"} <= {*REFERENCE.names("duotone")}
    for module in [name for name in REFERENCE.MODULES if ".integrations." not in name]:
        for name in REFERENCE.names(module):
            value = getattr(importlib.import_module(module), name)
            assert not callable(value) or (value.__doc__ or "").strip(), f"{module}.{name}"


@pytest.mark.parametrize("name", FIGURES.NAMES)
def test_figures_are_those_of_the_formats(name: str) -> None:
    """Where they are not: python docs/figures/make.py"""
    assert (DOCS / "figures" / f"{name}.svg").read_text() == FIGURES.draw(formats.get(name))


def test_pages_name_formats_and_recipes_that_exist() -> None:
    """Names in code on the pages of formats, but for parts of names."""
    registered = {*formats.names(), *duotone.recipes.names(), "bf16"}
    for page in (DOCS / "formats").glob("*.md"):
        for name in re.findall(r"`((?:fp8|mxfp\d|nvfp4)[a-z0-9_-]*)`", page.read_text()):
            assert name in registered, f"{page.name}: {name}"


def test_the_first_page_loads_little() -> None:
    """200 kB in all: the theme sends 67 kB compressed, and the text 6. Nothing comes from elsewhere."""
    page = (DOCS / "index.md").read_text()
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", page)
    assert pictures and sum((DOCS / name).stat().st_size for name in pictures) < 120_000

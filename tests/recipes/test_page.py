"""docs/recipes.md: its examples load and run, and its tables name what there is."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from duotone import recipes
from duotone.recipes.builtin import BUILTIN
from duotone.recipes.recipe import Recipe

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("text", [text for kind, text in BLOCKS if kind == "toml"])
def test_every_file_of_the_page_loads(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text)
    assert recipes.load_any(str(path)).name.split(" (")[0] in ("mine", "nvfp4", "fp8-current")


def test_the_code_of_the_page_runs(capsys) -> None:
    names = {"torch": torch}
    for text in (text for kind, text in BLOCKS if kind == "python"):
        exec(text, names)
    assert capsys.readouterr().out.startswith("mxfp8_e4m3\n")
    assert names["schedule"].at(9).name == "bf16" and isinstance(names["recipe"], recipes.CustomRecipe)


def test_the_tables_name_every_key_recipe_and_factory() -> None:
    rows = "\n".join(line for line in PAGE.splitlines() if line.startswith("|"))
    documented = set(re.findall(r"`([\w-]+)`", rows))
    assert {field.name for field in fields(recipes.Rule)} - {"columnwise_source"} <= documented
    assert {field.name for field in fields(Recipe)} <= documented
    assert {factory.__name__ for factory in recipes.zoo.RECIPES.values()} | set(recipes.zoo.RECIPES) <= documented
    for recipe in (recipe for kind, recipe in BUILTIN.items() if kind != "fp8-delayed"):
        assert {recipe.__name__, *(field.name for field in fields(recipe))} <= documented

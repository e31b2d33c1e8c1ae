"""How many Python functions of the library one steady forward runs: the host's time is mostly these."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch

import duotone
from duotone import recipes

ROOT = str(Path(duotone.__file__).parent)
BUDGETS = {"mxfp8": (93, 14), "bf16": (28, 10)}
"""Recipe -> calls, and files that they are in. Numbers only fall."""


def calls(function: Callable[[], object]) -> list[tuple[str, str]]:
    """File and name of every function of the library that runs, in order."""
    found: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            found.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return found


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_steady_forward_keeps_to_its_calls(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining", raising=False)  # calls look for its stages
    module = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=recipes.load(recipe))
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        module(x).sum().backward()
    names = calls(lambda: module(x))
    most, files = BUDGETS[recipe]
    assert len(names) <= most, "\n".join(" ".join(name) for name in names)
    assert len({file for file, _ in names}) <= files


def test_a_weight_is_fetched_once_in_a_call() -> None:
    module = duotone.Linear(64, 64, bias=False, parameters_split=("q", "k"), recipe=recipes.load("mxfp8"))
    x = torch.randn(32, 64)
    module(x)
    assert [name for _, name in calls(lambda: module(x))].count("joined") == 1

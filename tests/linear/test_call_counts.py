"""How many Python functions of the library one steady forward runs: the host's time is mostly these."""

import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import Tensor

import duotone
from duotone import allocate, recipes
from duotone.dispatch import casts
from duotone.dispatch.target import Target
from duotone.linear import plan_builder
from duotone.state import history
from duotone.state.delayed import DelayedState
from duotone.state.region import STACK
from duotone.state.starts import Starts

ROOT = str(Path(duotone.__file__).parent)
BUDGETS = {"mxfp8": (25, 9), "bf16": (25, 9)}
"""Recipe -> calls, and files that they are in. Numbers only fall."""


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process: calls look for stages of pipelines, and for regions that tests left open elsewhere."""
    monkeypatch.delitem(sys.modules, "torch.distributed.pipelining", raising=False)
    monkeypatch.setattr(STACK, "starts", Starts())


def calls(function: Callable[[], object]) -> list[tuple[str, str]]:
    """File and name of every function of the library that runs, in order."""
    results: list[tuple[str, str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ROOT):
            results.append((frame.f_code.co_filename.removeprefix(ROOT), frame.f_code.co_qualname))

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    return results


@pytest.mark.parametrize("recipe", BUDGETS)
def test_a_steady_forward_keeps_to_its_calls(recipe: str) -> None:
    module = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=recipes.load(recipe))
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        module(x).sum().backward()
    names = calls(lambda: module(x))
    most, files = BUDGETS[recipe]
    assert len(names) <= most, "\n".join(" ".join(name) for name in names)
    assert len({file for file, _ in names}) <= files


def test_a_steady_evaluation_under_delayed_scaling_keeps_to_its_calls() -> None:
    """It measures the weight, which other code may have written without a version, and that is bound too."""
    module = duotone.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, recipe=recipes.load("fp8-delayed"))
    x = torch.randn(32, 64, dtype=torch.bfloat16)
    for _ in range(3):
        module(x).sum().backward()
    with torch.no_grad():
        y = [module(x) for _ in range(4)][-1]
        names = calls(lambda: module(x))
        assert len(names) <= EVALUATION, "\n".join(" ".join(name) for name in names)
        module.weight.data *= 128
        assert torch.equal(module(x), 128 * y)


def test_a_weight_is_fetched_once_in_a_call() -> None:
    module = duotone.Linear(64, 64, bias=False, parameters_split=("q", "k"), recipe=recipes.load("mxfp8"))
    x = torch.randn(32, 64)
    module(x)
    assert [name for _, name in calls(lambda: module(x))].count("joined") == 1


EVALUATION = 35
"""Calls of a steady evaluation under delayed scaling. The number only falls."""
ON_A_CARD = {"fp8-current": 19, "fp8-delayed": 62, "fp8-rowwise": 19, "fp8-block": 19}
"""Recipe -> calls of forward and backward where kernels run. Numbers only fall."""
NOWHERE = itertools.count(1000)
"""Numbers of cards that no machine has, so that launches which do nothing stay apart in caches."""


@pytest.mark.parametrize("recipe", ON_A_CARD)
def test_a_steady_step_on_a_card_keeps_to_its_calls(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU that passes for a card: launches do nothing, products only allocate."""
    pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")
    from duotone.kernels import launch

    number = next(NOWHERE)
    hopper, empty = Target("cuda", (9, 0), (13, 0)), torch._C._dynamo.guards._empty_strided_cpu  # type: ignore

    def product(a: Tensor, b: Tensor, *_: object, **__: object) -> Tensor:
        return a.new_empty((a.shape[0], b.shape[1]), dtype=torch.bfloat16)

    for module in (casts, history):
        monkeypatch.setattr(module, "runs_kernels", lambda index: True)
    monkeypatch.setattr(allocate, "empty_cuda", empty)
    for name, value in (("_cuda_getDevice", lambda: number), ("_cuda_getCurrentRawStream", lambda index: 0)):
        monkeypatch.setattr(torch._C, name, value, raising=False)
    for name in ("_scaled_mm", "_scaled_mm_v2"):
        monkeypatch.setattr(torch, name, product)
    monkeypatch.setattr(plan_builder, "target", lambda device: hopper)
    monkeypatch.setattr(launch, "DIRECT", True)
    monkeypatch.setattr(launch.Launch, "_compile", lambda *_: (lambda *_: None, ()))
    monkeypatch.setattr(torch.Tensor, "get_device", lambda x: number)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True))
    module = duotone.Linear(512, 512, bias=False, params_dtype=torch.bfloat16, recipe=recipes.load(recipe))
    x, dy = (torch.randn(32, 512, dtype=torch.bfloat16, requires_grad=needs) for needs in (True, False))
    for _ in range(6):
        module(x).backward(dy)
        for state in module.modules():
            if isinstance(state, DelayedState):  # as if the kernels had written scales
                state.scale.fill_(2)
                state._new = set()
    names = calls(lambda: module(x).backward(dy))
    assert len(names) <= ON_A_CARD[recipe], "\n".join(" ".join(name) for name in names)

"""torch.library.opcheck: schema, autograd registration, fake tensors and dynamic shapes of every op of the library."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.library import opcheck

import duotone
from duotone import recipes
from duotone.modules.traced_stages import PLANS, template_of
from duotone.pipeline.row_call import RowCall, RowPart

SEED = torch.tensor([5])
PARTS = [*duotone.formats.get("nvfp4").encode(torch.randn(40, 64)).values()]
PLAIN: dict[str, tuple[Any, ...]] = {
    "draw_seed": (SEED.clone(), 2, True),
    "take_seed": (SEED.clone(), 2),
    "encode_planes": (
        torch.randn(40, 64),
        "mxfp8_e4m3",
        "fp8_e4m3_row",
        [True, True],
        "original",
        True,
        torch.bfloat16,
        [None] * 3,
    ),
    "rotate": (torch.randn(4, 32).bfloat16(),),
    "random_bytes": (SEED.clone(), 5, 32, 0),
    "as_of_now": (torch.randn(5, 16).t(),),
    "cast_after": (torch.randn(5, 16).t(), torch.randn(7, 16).bfloat16()),
    "mm_fp32": (torch.randn(5, 16).bfloat16(), torch.randn(7, 16).bfloat16()),
}
NUMBERS = (2, 4, 32, 32, 1, 2, 32, 32, 32, 1, 1, 32, 1, 0)
"""Sizes and strides of x (4, 32), a weight (32, 32), a bias (32,) and no seed."""
OF_MODULES = {"delayed_scale"}
OF_ROWS = {"differentiable_row", "row", "row_gradients", "stateful_row", "stateful_row_gradients"}
KEEPING = {"stateful_row_gradients", "storing_row_gradients"}
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def test_every_op_is_checked_here() -> None:
    names = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("duotone::")]
    checked = PLAIN.keys() | OF_MODULES | OF_ROWS | KEEPING
    assert {name.removeprefix("duotone::") for name in names} == checked


@pytest.mark.parametrize("name", PLAIN)
def test_an_op_is_what_its_schema_says(name: str) -> None:
    opcheck(getattr(torch.ops.duotone, name).default, PLAIN[name])


def plan_of(m: duotone.Linear, x: torch.Tensor) -> str:
    """The name of a plan of the module in graphs."""
    m(x).sum().backward()
    torch.compile(m, backend="eager", fullgraph=True)(x)
    answers = getattr(m.plans.answered, m.recipe.key)
    plan = f"{m.plans.config}_{answers}_{m.recipe.key}_False_True_record_cpu_torch~dfloat32__False__"
    assert hasattr(PLANS, plan)
    return plan


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-delayed"])
def test_the_ops_of_a_row_are_what_their_schemas_say(recipe: str) -> None:
    m = duotone.Linear(32, 32, recipe=recipes.load(recipe))
    x, prefix = torch.randn(4, 32), "stateful_" * (recipe == "fp8-delayed")
    row = RowPart.of(template_of(plan_of(m, x)).stage.row_part)
    handles, call = [m.plans.handle] if prefix else [], RowCall((row.name,), (4,) * 4, (False,) * 5, (), NUMBERS)
    checks = CHECKS[:1] + CHECKS[2:3] if prefix else CHECKS  # a history keeps what a call of a check has recorded
    run, gradients = (getattr(torch.ops.duotone, f"{prefix}row{end}").default for end in ("", "_gradients"))
    arguments = (x, [m.weight.detach(), m.bias.detach(), None], handles, call.text, [])
    opcheck(run, arguments, test_utils=checks)
    y, *kept = run(*arguments)
    of_gradients = (y, kept, None, [None] * 5, handles, replace(call, sinks=(0, 1, 1, 0)).text, [])
    opcheck(gradients, of_gradients, test_utils=checks)
    operands = [m.weight, m.bias, None]
    whole = (x, operands, handles, None, row.text)
    opcheck(torch.ops.duotone.differentiable_row.default, whole, test_utils=checks[:1] + checks[2:])


@pytest.mark.parametrize("name", sorted(KEEPING))
def test_the_ops_of_a_row_that_keeps_tensors_are_what_their_schemas_say(name: str) -> None:
    m = duotone.Linear(32, 32, recipe=recipes.load("mxfp8"))
    x = torch.randn(4, 32)
    part = f"{template_of(plan_of(m, x)).stage.name}/None"
    call = RowCall((part,), (4,) * 4, (False,) * 5, (), NUMBERS)
    arguments = (x, [m.weight.detach(), m.bias.detach(), None], [m.plans.handle], call.text, [])
    # Two calls never give the same token.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    opcheck(torch.ops.duotone.stateful_row.default, arguments, test_utils=checks)
    y, token = torch.ops.duotone.stateful_row(*arguments)
    of_forward = (y, [], token.number, [None] * 5, [m.plans.handle])  # opcheck takes plain tensors
    call = replace(call, sinks=(0, 2 if name == "storing_row_gradients" else 1, 1, 0))
    opcheck(getattr(torch.ops.duotone, name).default, (*of_forward, call.text, []))


@pytest.mark.parametrize("name", sorted(OF_MODULES))
def test_an_op_that_finds_states_is_what_its_schema_says(name: str) -> None:
    x = torch.randn(4, 1, 2, 8)
    m = duotone.Linear(8, 32, recipe=recipes.load("fp8-delayed"))
    m(x)
    where = [m.duotone_forward.number, 0, "", "use", False]
    opcheck(getattr(torch.ops.duotone, name).default, (x.flatten(0, 2), *where))

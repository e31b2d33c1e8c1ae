"""Plans live as long as their module and their recipe."""

import gc

import pytest
import torch

import duotone
from duotone import CustomRecipe, recipes
from duotone.compat import IdentityQuantizer
from duotone.state import traced_stages as traced


def linear(recipe: recipes.Recipe) -> duotone.Linear:
    return duotone.Linear(16, 16, recipe=recipe, name="l")


def names_of(number: str) -> list[str]:
    return [name for name in vars(traced.PLANS) if name.startswith(f"{number}_")]


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of processes of other tests, which end as this one collects
def test_a_new_recipe_for_each_step_leaves_no_plans_behind() -> None:
    m, x = linear(recipes.load("bf16")), torch.randn(4, 16, requires_grad=True)
    for step in range(13):
        if step == 12:
            gc.collect()
        with duotone.autocast(recipe=CustomRecipe(qfactory=lambda role: IdentityQuantizer())):
            m(x, is_first_microbatch=True).sum().backward()
    assert len(m.plans.stages) <= 2 and len(m.plans.answers) <= 2 and len(m.plans.variants) <= 3


def test_a_new_recipe_for_each_trace_leaves_no_plans_behind() -> None:
    m = linear(recipes.load("bf16"))
    for step in range(13):
        if step == 12:
            gc.collect()
        recipe = CustomRecipe(qfactory=lambda role: IdentityQuantizer())
        traced.plan_name(m.plans.number, recipe.key, True, True, True, "cpu", "torch.float32", "")
        del recipe
    assert len(names_of(m.plans.number)) <= 2


def test_the_plans_of_a_dropped_compiled_model_go_with_it() -> None:
    torch._dynamo.reset()
    m = linear(recipes.load("mxfp8"))
    run = torch.compile(m, fullgraph=True, backend="aot_eager")
    run(torch.randn(32, 16)).sum().backward()
    number = m.plans.number
    assert names_of(number)
    del m, run
    torch._dynamo.reset()
    gc.collect()
    assert not names_of(number) and number not in traced._NAMES


def test_a_module_with_a_new_number_drops_what_was_traced_under_the_old_one() -> None:
    recipe = recipes.load("mxfp8")
    m = linear(recipe)
    number = m.plans.number
    traced.plan_name(number, recipe.key, True, True, True, "cpu", "torch.float32", "")
    assert names_of(number)
    m.forget_plans()
    assert not names_of(number)

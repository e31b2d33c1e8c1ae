"""Plans live as long as their module and their recipe."""

import gc
from unittest import mock

import pytest
import torch

import duotone
from duotone import CustomRecipe, Quantizer, formats, recipes
from duotone.compat import IdentityQuantizer
from duotone.modules import traced_stages as traced
from duotone.modules.answers import _ANSWERS, shared


def linear(recipe: recipes.Recipe) -> duotone.Linear:
    """A module of a size that no other test has: modules of equal content share plans."""
    return duotone.Linear(56, 72, recipe=recipe, name="l")


def names_of(config: str) -> list[str]:
    return [name for name in vars(traced.PLANS) if name.startswith(f"{config}_")]


def trace(m: duotone.Linear, recipe: recipes.Recipe) -> None:
    """What a trace of a call does outside of itself."""
    traced.ask(m.plans.config, recipe.key)
    where = ("cpu", "torch.float32", "", False, "", "")
    key = m.plans.config, getattr(m.plans.answered, recipe.key), recipe.key, True, True, "record", *where
    with mock.patch.object(traced, "is_trace_recomputed", return_value=False):  # which only a trace can tell
        traced.plan_name(key)


@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of processes of other tests, which end as this one collects
def test_a_new_recipe_for_each_step_leaves_no_plans_behind() -> None:
    m, x = linear(recipes.load("bf16")), torch.randn(4, 56, requires_grad=True)
    for step in range(13):
        if step == 12:
            gc.collect()
        with duotone.autocast(recipe=CustomRecipe(qfactory=lambda role: IdentityQuantizer())):
            m(x, is_first_microbatch=True).sum().backward()
    assert len(m.plans.stages) <= 2 and len(m.plans.answers) <= 2 and len(m.plans.variants) <= 3


def test_a_new_recipe_for_each_trace_leaves_no_plans_behind() -> None:
    m = linear(recipes.load("bf16"))
    before = len(_ANSWERS)
    for step in range(13):
        if step == 12:
            gc.collect()
        delayed = recipes.DelayedScaling(amax_compute_algo=lambda history: history.amax(0))  # equal to no other one
        recipe = CustomRecipe(qfactory=lambda role, formats=delayed: formats(role))
        trace(m, recipe)
        del recipe, delayed
    assert len(names_of(m.plans.config)) <= 2 and len(m.plans.answers) <= 2
    gc.collect()
    assert len(_ANSWERS) <= before + 2


def test_the_plans_of_a_dropped_model_stay_until_many_others_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traced, "MOST_GONE", 2)
    m = duotone.Linear(48, 16, recipe=recipes.load("mxfp8"))  # no other module of the suite has this content
    run = torch.compile(m, fullgraph=True, backend="aot_eager")
    run(torch.randn(32, 48)).sum().backward()
    config = m.plans.config
    del m, run
    torch._dynamo.reset()
    left = []
    for width in (8, 24, 40):
        gc.collect()
        linear(recipes.load("bf16"))  # what is gone is seen when a module comes
        left.append(bool(names_of(config)))
        duotone.Linear(48, width, recipe=recipes.load("mxfp8"))
    gc.collect()
    linear(recipes.load("bf16"))
    assert left[0] and not names_of(config)
    assert config not in traced._NAMES and config not in traced._ALIKE and config not in traced._GONE


def test_the_last_module_of_a_content_takes_plans_of_a_users_quantizers_along() -> None:
    """They hold objects of the user."""
    recipe = CustomRecipe(qfactory=lambda role: class_with_values(1)(formats.get("mxfp8_e4m3")))
    one, other = linear(recipe), linear(recipe)
    config = one.plans.config
    assert other.plans.config == config
    trace(one, recipe)
    one.save_original_input = True
    one.forget_plans()
    assert one.plans.config != config and names_of(config)
    other.save_original_input = True
    other.forget_plans()
    assert not names_of(config)


def test_answers_that_changed_are_not_those_of_a_new_quantizer() -> None:
    kind = class_with_values([1.0], [1.0])
    one, other = kind(formats.get("mxfp8_e4m3")), kind(formats.get("mxfp8_e4m3"))
    first = shared({"input": one})
    one.more[0] = 4.0
    assert shared({"input": other})["input"] is other and first["input"] is one


def class_with_values(*values: object) -> type[Quantizer]:
    """A class whose quantizers hold the next of these values, which dataclass equality does not compare."""
    rest = iter(values)

    class WithValue(Quantizer):
        def __post_init__(self) -> None:
            super().__post_init__()
            object.__setattr__(self, "more", next(rest))

    return WithValue


@pytest.mark.parametrize(
    ("values", "are_equal"),
    [
        ((1, 1), True),
        (((1, "a"), (1, "a")), True),
        ((0.0, -0.0), False),
        ((1, True), False),
        (([1, [2]], [1, [2]]), True),
        (([1, [2]], [1, [3]]), False),
        (([1], (1,)), False),
        (({"a": [1]}, {"a": [1]}), True),
        (({"a": 1}, {"a": 2}), False),
        ((Quantizer(), Quantizer()), True),
        ((torch.ones(1), torch.ones(1)), False),
    ],
)
def test_quantizers_of_a_class_of_the_user_are_equal_if_all_that_they_hold_is(
    values: tuple[object, object], are_equal: bool
) -> None:
    """Dataclass equality compares the fields of Quantizer, and such a class may hold more."""
    one, other = map(class_with_values(*values), [formats.get("mxfp8_e4m3")] * 2)
    assert one == other
    answers = [shared({"input": quantizer}) for quantizer in (one, other)]
    assert (answers[0] is answers[1]) == are_equal


def test_a_graph_whose_recipe_is_gone_is_one_line() -> None:
    """A backward may be the first to ask for a slot, after another trace dropped the plans of dead recipes."""
    m = linear(recipes.load("fp8-delayed"))
    with pytest.raises(duotone.UserError, match="l: its recipe is gone; keep it until the compiled backward ends"):
        m.plans.follow("gone")

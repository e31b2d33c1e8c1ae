"""Seeds of stochastic rounding: outside the state_dict, reproducible, independent of order."""

import gc
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import UserError


def build() -> nn.Module:
    torch.manual_seed(5)
    return nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)})


def test_seeds_are_buffers_but_not_in_the_state_dict() -> None:
    m = duotone.convert(build(), recipes.load("nvfp4"))
    assert set(duotone.rng_state(m)) == {"a.duotone_seed", "b.duotone_seed"}
    assert not any("seed" in key for key in m.state_dict())
    assert m.bfloat16()["a"].duotone_seed.dtype == torch.int64


def test_seeds_follow_torchs_seed_and_the_name_and_draw_nothing() -> None:
    first = build()
    before = torch.get_rng_state()
    duotone.convert(first, recipes.load("nvfp4"))
    assert torch.equal(torch.get_rng_state(), before)
    same_seed = duotone.rng_state(duotone.convert(build(), recipes.load("nvfp4")))
    state = duotone.rng_state(first)
    assert all(torch.equal(state[name], same_seed[name]) for name in state)
    assert not torch.equal(state["a.duotone_seed"], state["b.duotone_seed"])
    torch.manual_seed(6)
    other = nn.ModuleDict({"a": nn.Linear(32, 32)})
    duotone.convert(other, recipes.load("nvfp4"))
    assert not torch.equal(duotone.rng_state(other)["a.duotone_seed"], state["a.duotone_seed"])


def test_a_model_on_meta_starts_its_seeds_when_a_checkpoint_is_assigned() -> None:
    reference = duotone.convert(build(), "nvfp4")
    with torch.device("meta"):
        m = duotone.convert(build(), "nvfp4")
    m.load_state_dict(reference.state_dict(), assign=True)
    assert all(torch.equal(seed, duotone.rng_state(m)[name]) for name, seed in duotone.rng_state(reference).items())


def test_loading_seeds_of_another_model_changes_nothing() -> None:
    m = duotone.convert(build(), recipes.load("nvfp4"))
    before = duotone.rng_state(m)
    with pytest.raises(UserError, match="on one side only"):
        duotone.load_rng_state(m, {"a.duotone_seed": torch.tensor([1])})
    for wrong in (torch.tensor([1.5]), torch.tensor([1, 2]), None):
        with pytest.raises(UserError, match="must be an int64 tensor of one element"):
            duotone.load_rng_state(m, {**before, "b.duotone_seed": wrong})
    assert all(torch.equal(before[name], value) for name, value in duotone.rng_state(m).items())


@pytest.mark.parametrize("wrong", [None, 3, [torch.zeros(1)]], ids=str)
def test_seeds_that_are_no_dict_are_one_clear_error(wrong) -> None:
    m = duotone.convert(nn.Sequential(nn.Linear(64, 64)), recipes.load("nvfp4"))
    with pytest.raises(UserError, match="load_rng_state takes what rng_state gave, a dict of tensors; got") as caught:
        duotone.load_rng_state(m, wrong)
    assert "\n" not in str(caught.value)


def resumed(recipe: str) -> nn.Module:
    """A model that drew before its weights were loaded, so that its plans are there."""
    first, second = (duotone.convert(build(), recipes.load(recipe), ()) for _ in range(2))
    draw(second)
    second.load_state_dict(first.state_dict())
    return second


def draw(m: nn.Module) -> None:
    for part in m.values():
        part(torch.ones(4, 32)).sum().backward()


def test_a_loaded_model_that_draws_without_seeds_warns_once() -> None:
    m = resumed("nvfp4")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        draw(m)
        draw(m)
    assert [str(one.message) for one in caught if "load_rng_state" in str(one.message)] == [str(caught[0].message)]


@pytest.mark.parametrize("case", ["seeds loaded", "nothing stochastic", "nothing loaded", "other modules loaded"])
def test_nothing_is_said_where_no_seed_is_missing(case: str) -> None:
    m = resumed("mxfp8" if case == "nothing stochastic" else "nvfp4")
    if case == "seeds loaded":
        duotone.load_rng_state(m, duotone.rng_state(m))
    if case == "nothing loaded":
        m = duotone.convert(build(), recipes.load("nvfp4"), ())
    if case == "other modules loaded":
        m = duotone.convert(build(), recipes.load("nvfp4"), ())
        m.load_state_dict({}, strict=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        draw(m)


def test_seeds_restored_before_the_weights_are_those_of_the_checkpoint() -> None:
    model = duotone.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), duotone.recipes.load("nvfp4"), rules=())
    weights, seeds_of = model.state_dict(), duotone.rng_state(model)
    duotone.load_rng_state(model, seeds_of)
    model.load_state_dict(weights)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(torch.randn(4, 32))


@pytest.fixture
def _late_collection() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("_late_collection")
def test_a_model_that_is_gone_warns_in_no_trace_of_another_one() -> None:
    """Its module is part of a reference cycle, so Python deletes it late. Warnings are errors in all tests."""
    old, new = (duotone.LayerNormLinear(32, 48, recipe=recipes.load("nvfp4")) for _ in range(2))
    old.load_state_dict(new.state_dict())
    del old
    torch.compile(new, backend="eager", fullgraph=True)(torch.randn(4, 32)).sum().backward()


def test_each_loaded_model_warns_as_it_is_compiled() -> None:
    for _ in range(2):
        m = duotone.Linear(32, 48, recipe=recipes.load("nvfp4"))
        m.load_state_dict(m.state_dict())
        torch._dynamo.reset()
        with pytest.warns(UserWarning, match="load_rng_state"):
            torch.compile(m, backend="eager", fullgraph=True)(torch.randn(4, 32))


def test_names_that_come_later_bring_their_seeds_until_one_is_drawn() -> None:
    """Without names, modules count through the process, so that the same code gets other seeds when it runs again."""

    def seed_of(module: nn.Module, draws: bool = False) -> torch.Tensor:
        if draws:
            module(torch.ones(32, 32)).sum().backward()
        duotone.assign_names(module)
        return duotone.rng_state(module)["0.duotone_seed"]

    def unnamed() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(duotone.Linear(32, 32, recipe="nvfp4"))

    first, second = unnamed(), unnamed()
    assert not torch.equal(first[0].duotone_seed, second[0].duotone_seed)
    converted = duotone.convert(nn.Sequential(nn.Linear(32, 32)), "nvfp4", rules=())
    assert seed_of(first) == seed_of(second) == duotone.rng_state(converted)["0.duotone_seed"]
    drawn = unnamed()
    before = drawn[0].duotone_seed.clone()
    assert seed_of(drawn, draws=True) == before + 1

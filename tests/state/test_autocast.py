"""autocast: the innermost region decides, and whatever happens inside, the outside comes back."""

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.state.autocast_context import active_recipe

FP8, MX, NV = (recipes.load(name) for name in ("fp8-current", "mxfp8", "nvfp4"))


def test_the_innermost_region_decides_and_outside_its_own_recipe_applies() -> None:
    m = duotone.convert(nn.Linear(64, 64, bias=False), MX)
    x = torch.randn(8, 64)
    alone = {recipe: duotone.convert(m, recipe)(x) for recipe in (FP8, MX, NV)}
    duotone.convert(m, MX)
    with duotone.autocast(recipe=NV):
        with duotone.autocast(recipe=FP8):
            assert torch.equal(m(x), alone[FP8])
        assert torch.equal(m(x), alone[NV])
    assert torch.equal(m(x), alone[MX])


def test_none_is_fp8_current_scaling_and_disabled_is_high_precision() -> None:
    m = duotone.convert(nn.Linear(64, 64), MX)
    x = torch.randn(8, 64)
    with duotone.autocast():
        assert active_recipe() == FP8
    with duotone.autocast(recipe=NV), duotone.autocast(enabled=False, recipe=NV):
        inside = m(x)
    assert torch.equal(inside, nn.functional.linear(x, m.weight, m.bias))


def test_an_exception_restores_the_outer_region() -> None:
    with duotone.autocast(recipe=NV):
        with pytest.raises(ZeroDivisionError), duotone.autocast(recipe=MX):
            raise ZeroDivisionError
        assert active_recipe() is NV
    assert active_recipe() is None


def test_entering_an_instance_twice_is_an_error_and_reusing_it_is_not() -> None:
    region = duotone.autocast(recipe=MX)
    with region, pytest.raises(RuntimeError, match="entered already"):
        region.__enter__()
    with region:
        assert active_recipe() is MX


def test_backward_outside_the_region_follows_forward() -> None:
    m = duotone.convert(nn.Linear(64, 64, bias=False), recipes.load("bf16"))
    x, dy = torch.randn(8, 64), torch.randn(8, 64)
    grads = []
    for inside in (True, False):
        m.zero_grad()
        with duotone.autocast(recipe=MX):
            y = m(x)
            if inside:
                y.backward(dy)
        if not inside:
            with duotone.autocast(recipe=FP8):
                y.backward(dy)
        grads.append(m.weight.grad.clone())
    assert torch.equal(*grads)


def test_autocast_takes_recipes_only() -> None:
    with pytest.raises(UserError, match="autocast takes a recipe or its name; got list"):
        duotone.autocast(recipe=["mxfp8"])
    with pytest.raises(UserError, match="recipe 'mxfp9' is unknown"):
        duotone.autocast(recipe="mxfp9")


def test_a_recipe_may_come_first_and_anything_else_there_is_an_error() -> None:
    """core 69: `autocast(schedule.at(step))` never runs under another recipe without a word."""
    with duotone.autocast(NV):
        assert active_recipe() is NV
    for flag in (True, False):
        with duotone.autocast(NV, enabled=flag):
            assert (active_recipe() is NV) == flag
    for wrong in (b"mxfp8", 1, None):
        with pytest.raises(UserError, match="allowed are true and false"):
            duotone.autocast(wrong)
    with pytest.raises(UserError, match="enabled is"):
        duotone.autocast(NV, recipe=MX)
    with pytest.raises(UserError, match="enabled is 'mxfp8'; allowed are true and false: name the recipe as recipe="):
        duotone.quantized_model_init("mxfp8")


def test_a_schedule_is_refused_with_the_remedy() -> None:
    schedule = recipes.load_schedule("mxfp8-then-bf16-fprop")
    for options in ({"enabled": schedule}, {"recipe": schedule}):
        with pytest.raises(UserError, match=r"give it schedule\.at\(step\)"):
            duotone.autocast(**options)


def test_regions_come_back_after_exceptions_at_every_depth() -> None:
    """core 69."""
    for depth in range(1, 4):
        with pytest.raises(ZeroDivisionError):
            nest([NV, MX, FP8][:depth])
        assert active_recipe() is None


def nest(regions: list) -> None:
    if not regions:
        raise ZeroDivisionError
    with duotone.autocast(recipe=regions[0]):
        try:
            nest(regions[1:])
        finally:
            assert active_recipe() is regions[0]


def test_an_instance_that_failed_can_be_entered_again() -> None:
    """core 69."""
    region = duotone.autocast(recipe=NV)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), region:
            raise ZeroDivisionError
    with region:
        with pytest.raises(RuntimeError, match="entered already"):
            region.__enter__()
        assert active_recipe() is NV
    assert active_recipe() is None


def test_model_init_inside_of_a_region_leaves_its_recipe_alone() -> None:
    """core 79: two slots, also with an exception inside, and the other way round."""
    x = torch.randn(8, 64)
    plain = duotone.Linear(64, 64)
    with duotone.autocast(recipe=NV):
        expected = plain(x)
        with duotone.quantized_model_init(recipe=MX):
            assert active_recipe() is NV and torch.equal(plain(x), expected)
            inner = duotone.Linear(64, 64)
            with duotone.autocast(recipe=FP8):
                assert duotone.Linear(64, 64).weight.quantizer == inner.weight.quantizer
        with pytest.raises(ZeroDivisionError), duotone.quantized_model_init(recipe=MX):
            raise ZeroDivisionError
        assert active_recipe() is NV and torch.equal(plain(x), expected)
        assert type(duotone.Linear(64, 64).weight) is nn.Parameter

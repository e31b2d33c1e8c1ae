"""autocast: the innermost region decides, and whatever happens inside, the outside comes back."""

import threading
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.state.autocast_context import active_recipe
from duotone.state.region import STACK

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


def model(convert: bool) -> nn.Module:
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    return duotone.convert(layers, MX, rules=()) if convert else layers


def in_vain(act: Callable[[], object]) -> list[warnings.WarningMessage]:
    """The warnings that nothing followed a region."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        act()
    return [each for each in caught if "follows recipes, so it changed nothing" in str(each.message)]


def entered(act: Callable[[Tensor], object], **options: object) -> Callable[[], object]:
    def run() -> object:
        with duotone.autocast(**{"recipe": NV, **options}):
            return act(torch.randn(4, 32))

    return run


def decorated(act: Callable[[Tensor], object]) -> Callable[[], object]:
    return duotone.autocast(NV)(lambda: act(torch.randn(4, 32)))


@pytest.mark.parametrize("enter", [entered, decorated])
def test_a_region_that_nothing_follows_gives_one_warning(enter) -> None:
    (warning,) = in_vain(enter(model(convert=False)))
    text = (
        "nothing that ran under autocast('nvfp4') follows recipes, so it changed nothing; call duotone.convert(model, "
    )
    assert str(warning.message).startswith(text) and "\n" not in str(warning.message)
    assert not in_vain(enter(model(convert=True)))


def test_the_warning_names_the_line_of_the_region_and_comes_once_for_it() -> None:
    plain = model(convert=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for _ in range(3):
            with duotone.autocast(NV):
                plain(torch.randn(4, 32))
    assert [each.filename for each in caught] == [__file__]


def test_a_compiled_model_asks_for_its_region_in_every_call() -> None:
    converted, plain = (torch.compile(model(convert), backend="aot_eager") for convert in (True, False))
    for _ in range(3):
        assert not in_vain(entered(converted))
    entered(plain)()
    assert in_vain(entered(plain))


def test_regions_that_asked_for_nothing_or_ran_nothing_are_silent() -> None:
    plain, converted = model(convert=False), model(convert=True)

    def in_thread(x: Tensor) -> Tensor:
        thread = threading.Thread(target=converted, args=(x,))
        thread.start()
        thread.join()
        return x.requires_grad_() * 2

    def in_region_of_its_own(x: Tensor) -> Tensor:
        with duotone.autocast(enabled=False):
            return converted(x)

    @torch.compile(backend="aot_eager")
    def region_in_graph() -> Tensor:
        with duotone.autocast(NV):
            return plain(torch.ones(4, 32))

    loss = plain(torch.randn(4, 32)).sum()
    silent = {
        "high precision": entered(plain, enabled=False),
        "calibration": entered(plain, enabled=False, calibrating=True),
        "bf16": entered(plain, recipe="bf16"),
        "no forward": entered(lambda x: x),
        "no gradient": entered(torch.no_grad()(plain)),
        "a backward alone": entered(lambda x: loss.backward()),
        "an inner region": entered(in_region_of_its_own),
        "another thread": entered(in_thread),
        "a graph": region_in_graph,
        "a checkpoint": entered(lambda x: checkpoint(converted, x.requires_grad_(), use_reentrant=False)),
        "a reentrant checkpoint": entered(lambda x: checkpoint(converted, x.requires_grad_(), use_reentrant=True)),
        "an op": entered(duotone.ops.Linear(32, 32)),
        "attention": entered(lambda x: duotone.DotProductAttention(2, 16)(*[x.view(4, 1, 2, 16).requires_grad_()] * 3)),
    }
    assert [name for name, act in silent.items() if in_vain(act)] == []


def test_a_region_that_fails_says_no_more_than_its_error() -> None:
    plain = model(convert=False)

    def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            entered(lambda x: (plain(x), 1 / 0))()

    assert not in_vain(fail)


def test_replays_of_a_cuda_graph_are_silent(monkeypatch) -> None:
    """A replay asks for no region. So on a GPU nothing is said once any module asked."""
    plain = model(convert=False)
    model(convert=True)(torch.randn(4, 32))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr("duotone.state.region.is_capturing", lambda: False)
    assert not in_vain(entered(plain))
    monkeypatch.setattr(STACK, "was_followed", False)
    assert in_vain(entered(plain))

"""Regions of autocast belong to a thread and an async task: interleaved, out of order, started threads, traced code."""

import asyncio
import contextvars
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.recipes import DelayedScaling
from duotone.state.autocast_context import active_recipe
from duotone.state.parameters import construction
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

E4, E5 = (recipes.Float8CurrentScaling(fp8_format=element) for element in ("E4M3", "E5M2"))
FP8, MX, NV = (recipes.load(name) for name in ("fp8-current", "mxfp8", "nvfp4"))


def in_thread(function: Callable[[], Any], inside: Callable[[], Any] = lambda: None) -> Any:
    """What a new thread gives; `inside` runs here once it has been started, before it does anything."""
    results: list[Any] = []
    go = threading.Event()

    def run() -> None:
        go.wait(120)
        try:
            results.append(function())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    inside()
    go.set()
    thread.join(120)
    return results[0]


class Steps:
    """A thread that runs the functions it is handed, one at a time, while the caller waits."""

    def __enter__(self) -> "Steps":
        self.pool = ThreadPoolExecutor(1)
        return self

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        return self.pool.submit(function, *args).result(10)

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()


def entered(recipe: recipes.Recipe) -> duotone.autocast:
    return duotone.autocast(recipe=recipe).__enter__()


def leave(region: duotone.autocast) -> None:
    region.__exit__(None, None, None)


# Threads


def test_regions_of_two_threads_that_interleave_do_not_meet() -> None:
    """A enters, B enters, A leaves, B leaves: each computes under its own recipe, and nothing stays."""
    with Steps() as a, Steps() as b:
        assert (a(active_recipe), b(active_recipe)) == (None, None)
        region_a, region_b = a(entered, MX), b(entered, NV)
        assert (a(active_recipe), b(active_recipe)) == (MX, NV)
        a(leave, region_a)
        assert (a(active_recipe), b(active_recipe)) == (None, NV)
        b(leave, region_b)
        assert (a(active_recipe), b(active_recipe), active_recipe()) == (None, None, None)


def test_model_init_in_two_threads_does_not_meet() -> None:
    def build() -> tuple:
        with Steps() as other:
            region, region_of_thread = duotone.quantized_model_init(recipe=MX), duotone.quantized_model_init(recipe=NV)
            other(construction), region.__enter__()
            other(region_of_thread.__enter__)
            result = construction().recipe, other(lambda: construction().recipe)
            region.__exit__(None, None, None)
            after = construction() is not None, other(lambda: construction() is not None)
            other(region_of_thread.__exit__, None, None, None)
            return *result, *after, other(lambda: construction() is not None)

    assert build() == (MX, NV, False, True, False)


def test_a_thread_starts_from_what_its_creator_had() -> None:
    """As replicas of DataParallel do; also when it looks only after the region has ended."""
    with duotone.autocast(recipe=MX):
        assert in_thread(active_recipe) is MX
        with duotone.autocast(recipe=NV):
            assert in_thread(active_recipe) is NV
        assert in_thread(active_recipe) is MX
        with duotone.quantized_model_init(recipe=FP8):
            assert in_thread(lambda: (active_recipe(), construction().recipe)) == (MX, FP8)
    region = entered(MX)
    assert in_thread(active_recipe, inside=lambda: leave(region)) is MX


def test_a_thread_that_enters_regions_comes_back_to_what_it_started_from() -> None:
    def body() -> list:
        with duotone.autocast(recipe=NV):
            inside = active_recipe()
        return [inside, active_recipe()]

    with duotone.autocast(recipe=MX):
        assert in_thread(body) == [NV, MX]


def test_a_thread_that_was_started_before_a_region_is_not_in_it_and_a_warning_says_so() -> None:
    with Steps() as pool:
        assert pool(active_recipe) is None
        with duotone.autocast(recipe=MX):
            with pytest.warns(
                UserWarning, match=r"started outside of duotone.autocast.*enter duotone.autocast in this"
            ):
                assert pool(active_recipe) is None
            context = contextvars.copy_context()
            assert pool(context.run, active_recipe) is MX


def test_a_thread_that_first_looks_after_later_regions_were_entered_keeps_those_of_its_start() -> None:
    region = entered(MX)
    regions = []
    assert in_thread(active_recipe, inside=lambda: regions.append(entered(NV))) is MX
    leave(regions[0]), leave(region)


def test_the_main_thread_outside_of_regions_is_not_warned() -> None:
    with Steps() as pool:
        region = pool(entered, MX)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert active_recipe() is None
        pool(leave, region)


def test_where_the_creator_cannot_be_known_a_thread_raises_until_it_enters_a_region() -> None:
    def outcome() -> list:
        with pytest.raises(UserError, match="of several threads or tasks were open, and they differ; enter") as caught:
            active_recipe()
        assert "\n" not in str(caught.value)
        with duotone.autocast(recipe=FP8):
            inside = active_recipe()
        with pytest.raises(UserError):
            active_recipe()
        return [inside]

    with Steps() as other, duotone.autocast(recipe=MX):
        region = other(entered, NV)
        assert in_thread(outcome) == [FP8]
        other(leave, region)
        assert in_thread(active_recipe) is MX
        region = other(entered, recipes.MXFP8BlockScaling())  # another region that decides the same
        assert in_thread(active_recipe) == MX
        other(leave, region)


def test_a_thread_that_the_main_thread_may_have_started_outside_of_regions_takes_none_of_another_thread() -> None:
    with Steps() as other:
        region = other(entered, MX)
        assert isinstance(in_thread(active_recipe), UserError)
        other(leave, region)
        assert in_thread(active_recipe) is None


def test_a_thread_that_died_in_its_region_confuses_nobody() -> None:
    in_thread(lambda: entered(NV))
    assert active_recipe() is None
    with duotone.autocast(recipe=MX):
        assert in_thread(active_recipe) is MX


# Tasks


def test_async_tasks_of_one_thread_have_regions_of_their_own() -> None:
    async def train(recipe: recipes.Recipe, around: recipes.Recipe | None) -> None:
        for _ in range(3):
            assert active_recipe() is around
            with duotone.autocast(recipe=recipe):
                await asyncio.sleep(0)
                assert active_recipe() is recipe
                child = asyncio.create_task(asyncio.sleep(0, active_recipe()))
                assert await child is recipe
            await asyncio.sleep(0)

    async def look(around: recipes.Recipe | None) -> None:
        for _ in range(9):
            assert active_recipe() is around
            await asyncio.sleep(0)

    async def all_of(around: recipes.Recipe | None) -> None:
        await asyncio.gather(train(MX, around), train(NV, around), look(around))

    asyncio.run(all_of(None))
    with duotone.autocast(recipe=FP8):
        asyncio.run(all_of(FP8))
    assert active_recipe() is None


def test_a_task_keeps_the_region_that_it_was_started_in() -> None:
    async def main() -> None:
        with duotone.autocast(recipe=MX):
            task = asyncio.create_task(later())
        assert active_recipe() is None
        assert await task is MX
        with duotone.autocast(recipe=MX):
            assert await asyncio.to_thread(active_recipe) is MX

    async def later() -> recipes.Recipe | None:
        await asyncio.sleep(0)
        return active_recipe()

    asyncio.run(main())


# Generators and exits out of order


def generator(recipe: recipes.Recipe) -> Iterator[recipes.Recipe | None]:
    with duotone.autocast(recipe=recipe):
        yield active_recipe()
        yield active_recipe()


def test_generators_that_suspend_inside_of_regions_remove_their_own_only() -> None:
    first, second = generator(MX), generator(NV)
    assert (next(first), next(second)) == (MX, NV)
    first.close()
    assert active_recipe() is NV
    with duotone.autocast(recipe=FP8):
        second.close()
        assert active_recipe() is FP8
    assert active_recipe() is None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_a_region_removes_itself_wherever_it_is(order) -> None:
    regions = [entered(recipe) for recipe in (FP8, MX, NV)]
    remaining = [FP8, MX, NV]
    for i in order:
        leave(regions[i])
        remaining.remove((FP8, MX, NV)[i])
        assert active_recipe() is (remaining[-1] if remaining else None)


def test_a_region_that_another_thread_ends_has_ended() -> None:
    suspended = generator(MX)
    next(suspended)
    in_thread(suspended.close)
    assert active_recipe() is None
    with duotone.autocast(recipe=NV):
        assert active_recipe() is NV
    assert active_recipe() is None


# Traced code


@pytest.fixture
def compiled() -> tuple[Any, nn.Module, dynamo_testing.CompileCounterWithBackend]:
    m = duotone.convert(nn.Linear(64, 64, bias=False), recipes.load("bf16"), ())
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    return torch.compile(m, fullgraph=True, backend=counter), m, counter


def test_compiled_code_follows_the_region_of_the_calling_thread_and_task(compiled) -> None:
    run, m, counter = compiled
    x = torch.randn(8, 64)
    expected = {}
    for recipe in (E4, E5):
        with duotone.autocast(recipe=recipe):
            expected[recipe] = m(x)

    async def task(recipe: recipes.Recipe) -> None:
        for _ in range(2):
            with duotone.autocast(recipe=recipe):
                await asyncio.sleep(0)
                assert torch.equal(run(x), expected[recipe])
            await asyncio.sleep(0)
            assert torch.equal(run(x), nn.functional.linear(x, m.weight))

    async def tasks() -> None:
        await asyncio.gather(task(E4), task(E5))

    asyncio.run(tasks())
    assert counter.frame_count == 3
    with Steps() as other:
        region = other(entered, E5)
        with duotone.autocast(recipe=E4):
            assert torch.equal(other(run, x), expected[E5]) and torch.equal(run(x), expected[E4])
            assert "several threads or tasks" in str(in_thread(lambda: run(x)))
            other(leave, region)
            assert torch.equal(in_thread(lambda: run(x)), expected[E4])
    assert counter.frame_count == 3


def test_regions_inside_of_compiled_code() -> None:
    m = duotone.convert(nn.Linear(64, 64, bias=False), recipes.load("bf16"), ())

    @duotone.autocast(recipe=E5)
    def decorated(x: torch.Tensor) -> torch.Tensor:
        return m(x)

    def body(x: torch.Tensor) -> torch.Tensor:
        y = m(x)
        with duotone.autocast(recipe=E4):
            y = y + m(x) + decorated(x)
        return y + m(x)

    run = torch.compile(body, fullgraph=True, backend="eager")
    x = torch.randn(8, 64)
    for _ in range(2):
        assert torch.equal(run(x), body(x)) and active_recipe() is None
    with duotone.autocast(recipe=E5):
        assert torch.equal(run(x), body(x)) and active_recipe() is E5


# Rolling


def test_regions_of_two_threads_roll_their_own_states_at_their_own_ends() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    model, model_of_thread = (duotone.convert(nn.Sequential(nn.Linear(16, 16)), recipe, ()) for _ in range(2))
    x = torch.randn(8, 16)

    def newest(m: nn.Module) -> float:
        return m[0].duotone_forward.amax_history[-1, 0].item()

    with Steps() as other:
        region = other(entered, recipe)
        with duotone.autocast(recipe=recipe):
            model(x), other(model_of_thread, x)
            assert newest(model) == newest(model_of_thread) == 0
        assert newest(model) == x.abs().max() and newest(model_of_thread) == 0
        other(leave, region)
        assert newest(model_of_thread) == x.abs().max()


def test_a_thread_that_was_started_in_a_region_rolls_with_it() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    m = duotone.convert(nn.Sequential(nn.Linear(16, 16)), recipe, ())
    x = torch.randn(8, 16)
    with duotone.autocast(recipe=recipe):
        in_thread(lambda: m(x))
        assert not m[0].duotone_forward.amax_history[1:].any()
    assert m[0].duotone_forward.amax_history[-1, 0] == x.abs().max()


def test_the_last_region_to_end_rolls_where_the_outermost_ends_first() -> None:
    recipe = DelayedScaling(amax_history_len=4)
    m = duotone.convert(nn.Sequential(nn.Linear(16, 16)), recipe, ())
    outer, inner = entered(recipe), entered(recipe)
    m(torch.randn(8, 16))
    leave(outer)
    assert not m[0].duotone_forward.amax_history[1:].any()
    leave(inner)
    assert m[0].duotone_forward.amax_history[-1, 0] > 0


# As a decorator


def test_each_call_of_a_decorated_function_is_a_region() -> None:
    @duotone.autocast(recipe=MX)
    def recipe_and(depth: int) -> list:
        """Says where it is."""
        return [active_recipe(), *(recipe_and(depth - 1) if depth else [])]

    assert recipe_and(2) == [MX, MX, MX] and active_recipe() is None
    assert recipe_and.__doc__ == "Says where it is."

    class Model(nn.Module):
        @duotone.autocast(enabled=False)
        def forward(self, recipe: recipes.Recipe) -> bool:
            return active_recipe() == recipe

    with duotone.autocast(recipe=NV):
        assert Model()(recipes.load("bf16")) and active_recipe() is NV


def test_each_call_of_a_decorated_coroutine_function_is_a_region_of_its_task() -> None:
    @duotone.autocast(recipe=MX)
    async def body() -> recipes.Recipe | None:
        await asyncio.sleep(0)
        return active_recipe()

    async def main() -> list:
        return await asyncio.gather(body(), asyncio.sleep(0, active_recipe()), body())

    assert asyncio.run(main()) == [MX, None, MX]


def test_what_cannot_be_decorated_is_one_clear_error() -> None:
    async def steps() -> Any:
        yield 1

    for wrong, match in ((generator, "enter it inside of generator"), (steps, "enter it inside of steps")):
        with pytest.raises(UserError, match=match):
            duotone.autocast(recipe=MX)(wrong)
    for wrong in (nn.Linear, nn.Linear(2, 2)):
        with pytest.raises(UserError, match="autocast decorates functions; got"):
            duotone.autocast(recipe=MX)(wrong)


def test_a_reduction_group_is_a_group_of_this_process_or_its_name() -> None:
    with pytest.raises(UserError, match="process group 'x' does not exist here") as caught:
        duotone.autocast(recipe=MX, amax_reduction_group="x")
    assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="amax_reduction_group is a int; give a process group"):
        duotone.autocast(recipe=MX, amax_reduction_group=3)


@pytest.mark.filterwarnings("ignore:this thread was started outside")  # of regions that tests above left open
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_backward_in_another_thread_never_reads_the_stack(reentrant) -> None:
    """As on a GPU: a recompute goes as its forward went, in a thread that does not know its region."""
    layer = duotone.MultiheadAttention(32, 2, attention_dropout=0.0, recipe=MX)
    x = torch.randn(4, 2, 32)
    gradients = []
    with Steps() as other:
        assert other(active_recipe) is None
        for backward in (lambda loss: loss.backward(), lambda loss: other(loss.backward)):
            leaf = x.clone().requires_grad_()
            with duotone.autocast(recipe=FP8):
                loss = checkpoint(layer, leaf, use_reentrant=reentrant).square().sum()
                with warnings.catch_warnings():
                    warnings.simplefilter("error")
                    backward(loss)
            gradients.append(leaf.grad)
    assert torch.equal(*gradients)

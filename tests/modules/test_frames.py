"""Checkpoints whose forwards and backwards do not take turns: each recompute has what its own forward drew.

The oracle is the same step without a checkpoint, or what the forward itself computed, bit for bit.
"""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling
from duotone.tensor import Quantizer


def stochastic(role):
    """Stochastic input and gradient."""
    kind = "" if role is None else role.tensor_type
    fmt = get("nvfp4_sr" if kind in ("input", "grad_output") else "nvfp4")
    return Quantizer(fmt, fmt)


STOCHASTIC = CustomRecipe(qfactory=stochastic)
RECIPES = {"nvfp4": recipes.load("nvfp4"), "stochastic input": STOCHASTIC}
DELAYED = DelayedScaling(amax_history_len=2)


class PlainCheckpoint(torch.autograd.Function):
    """A checkpoint as other libraries write them."""

    @staticmethod
    def forward(context, run, x):
        context.run = run
        context.save_for_backward(x)
        return run(x)

    @staticmethod
    def backward(context, dy):
        (x,) = context.saved_tensors
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            y = context.run(leaf)
        torch.autograd.backward(y, dy)
        return None, leaf.grad


def selective(body, x, saves=lambda op: op is torch.ops.aten.mm.default):
    def policy(context, op, *args, **options):
        return CheckpointPolicy.MUST_SAVE if saves(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return checkpoint(body, x, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


KINDS = {
    "reentrant": lambda body, x: checkpoint(body, x, use_reentrant=True),
    "non-reentrant": lambda body, x: checkpoint(body, x, use_reentrant=False),
    "selective": selective,
    "another library's": PlainCheckpoint.apply,
}


def nested(outer: str, inner: str):
    return lambda body, x: KINDS[outer](lambda t: KINDS[inner](body, KINDS[inner](body, t)) + t, x)


NESTED = {f"{a} around {b}": nested(a, b) for a in KINDS for b in KINDS}


def model(recipe, dtype=torch.bfloat16) -> nn.Module:
    torch.manual_seed(3)
    return duotone.convert(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).to(dtype), recipe, ())


def assert_close(result, expected) -> None:
    """Frames accumulate gradients in another order, in fp32: a few roundings apart, where another seed is far off."""
    for a, b in zip(result, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * b.abs().max().item())


def inputs(count: int, dtype=torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [torch.randn(16, 32, generator=generator).to(dtype).requires_grad_() for _ in range(count)]


def microbatches(m: nn.Module, run, order) -> list[Tensor]:
    """Three forwards, then their backwards in an order; all gradients, and the seeds."""
    leaves = inputs(3, m[0].weight.dtype)
    losses = [run(m, leaf).float().square().sum() for leaf in leaves]
    for i in order:
        losses[i].backward()
    return [*[leaf.grad for leaf in leaves], *[p.grad for p in m.parameters()], *[b.clone() for b in m.buffers()]]


@cache
def without_frames(recipe: recipes.Recipe, dtype: torch.dtype, run: Callable, order: tuple[int, ...]) -> list[Tensor]:
    return microbatches(model(recipe, dtype), run, order)


def once(m: nn.Module, x: Tensor) -> Tensor:
    return m(x)


def twice_and_beside(m: nn.Module, x: Tensor) -> Tensor:
    return m(m(x)) + x


@pytest.mark.parametrize("order", [(2, 1, 0), (1, 0, 2)], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RECIPES)
def test_microbatches_in_flight_change_no_bit(name, kind, order) -> None:
    expected = without_frames(RECIPES[name], torch.bfloat16, once, order)
    result = microbatches(model(RECIPES[name]), KINDS[kind], order)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("name", RECIPES)
def test_a_selective_checkpoint_may_save_all_ops_but_one(name) -> None:
    """torch hands results of saved ops out by their order, so a recompute must not call fewer of them."""
    expected = without_frames(RECIPES[name], torch.bfloat16, once, (2, 1, 0))
    run = partial(selective, saves=lambda op: op is not torch.ops.aten.gelu.default)
    result = microbatches(model(RECIPES[name]), run, (2, 1, 0))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_module_that_runs_twice_in_one_frame_and_in_two_draws_the_same(kind) -> None:
    def twice(run):
        m, (x, other) = model(STOCHASTIC, torch.float32), inputs(2, torch.float32)
        (run(lambda t: m(m(t)), x) + run(m, other) + run(m, x)).float().square().sum().backward()
        return [x.grad, other.grad, *[p.grad for p in m.parameters()]]

    assert_close(twice(KINDS[kind]), twice(lambda body, x: body(x)))


@pytest.mark.parametrize("kind", NESTED)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_frames_draw_the_same(kind) -> None:
    expected = without_frames(STOCHASTIC, torch.float32, twice_and_beside, (1, 0, 2))
    *result, first, second = microbatches(model(STOCHASTIC, torch.float32), NESTED[kind], (1, 0, 2))
    assert torch.equal(first, expected[-2]) and torch.equal(second, expected[-1])
    assert_close(result, expected[:-2])


@pytest.mark.parametrize("kind", ["non-reentrant", "selective", "another library's"])
def test_a_second_backward_of_one_graph_draws_the_same(kind) -> None:
    m, (x,) = model(STOCHASTIC), inputs(1)
    loss = KINDS[kind](m, x).float().square().sum()
    gradients = []
    for _ in range(2):
        m.zero_grad()
        loss.backward(retain_graph=True)
        gradients.append([p.grad.clone() for p in m.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


@pytest.mark.parametrize("kind", [*KINDS, *NESTED])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad", "ignore:several forwards of a reentrant")
def test_scales_that_moved_between_forwards_stay_with_them(kind) -> None:
    """A region for each microbatch moves the scales at its end; growing inputs make each scale another one."""
    m, calls = model(DELAYED), []
    m[0].register_forward_hook(lambda *call: calls.append(call[2].detach()))
    run, losses = {**KINDS, **NESTED}[kind], []
    for i, x in enumerate(inputs(3)):
        with duotone.autocast(recipe=DELAYED):
            m(torch.ones(16, 32).bfloat16() * 3.0**i)  # records at once, also where the checkpoint leaves it for later
            calls.pop()
            losses.append(run(m, x).float().square().sum())
    forwards = calls[:]
    for i in (1, 0, 2):
        calls.clear()
        losses[i].backward()
        outputs = forwards[i * len(forwards) // 3 : (i + 1) * len(forwards) // 3]
        assert calls and all(any(torch.equal(again, y) for y in outputs) for again in calls)


@pytest.mark.parametrize("in_flight", [True, False])
def test_reentrant_checkpoints_in_flight_give_a_warning(in_flight: bool) -> None:
    """Each of their backwards is a step of delayed scaling, so amaxes of the first microbatch may be lost."""
    m, losses = model(DELAYED), []
    with pytest.warns(UserWarning, match="several forwards of a reentrant") if in_flight else nullcontext():
        for x in inputs(2):
            losses.append(checkpoint(m, x, use_reentrant=True).float().square().sum())
            if not in_flight:
                losses.pop().backward()
        for loss in losses:
            loss.backward()


def test_scales_of_microbatches_in_flight_change_no_bit() -> None:
    """Non-reentrant, so that forwards record as they do without a checkpoint."""

    def steps(run):
        m, (x, other) = model(DELAYED), inputs(2)
        losses = []
        for leaf in (x, other):
            with duotone.autocast(recipe=DELAYED):
                losses.append(run(m, leaf * (1 if leaf is x else 30)).float().square().sum())
        for loss in losses:
            loss.backward()
        return [x.grad, other.grad, *[p.grad for p in m.parameters()], *[b.clone() for b in m.buffers()]]

    result, expected = steps(KINDS["non-reentrant"]), steps(lambda body, x: body(x))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_regions_of_other_recipes_stay_with_their_forwards(kind) -> None:
    def steps(run):
        m, leaves = model(recipes.load("bf16")), inputs(2)
        losses = []
        for leaf, name in zip(leaves, ("mxfp8", "nvfp4"), strict=True):
            with duotone.autocast(recipe=recipes.load(name)):
                losses.append(run(m, leaf).float().square().sum())
        for loss in losses:
            loss.backward()
        return [*[leaf.grad for leaf in leaves], *[p.grad for p in m.parameters()]]

    result, expected = steps(KINDS[kind]), steps(lambda body, x: body(x))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_compiled_code_in_frames_changes_no_bit() -> None:
    if torch.cuda.is_available():
        torch.cuda.init()  # compilers look at random states of GPUs, which must not begin inside of a checkpoint
    m = model(STOCHASTIC)[:1]
    expected = microbatches(copy.deepcopy(m), lambda m, x: m(x), (1, 0, 2))
    compiled = torch.compile(m, backend="aot_eager", fullgraph=True)
    result = microbatches(m, lambda _, x: KINDS["non-reentrant"](compiled, x), (1, 0, 2))
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize(
    ("recipe", "kind"), [(DELAYED, "non-reentrant"), (STOCHASTIC, "non-reentrant"), (STOCHASTIC, "selective")]
)
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_checkpoints_inside_of_compiled_code_have_what_their_own_forwards_had(recipe, kind) -> None:
    """A region for each microbatch moves the scales, so the newest forward has others than those before it."""
    eager = model(recipe)
    compiled = copy.deepcopy(eager)

    def body(m: nn.Module, x: Tensor) -> Tensor:
        return KINDS[kind](m[2], KINDS[kind](lambda t: m[:2](m[:2](t)), x))

    def step(run: Callable, m: nn.Module, order: tuple[int, ...]) -> list[Tensor]:
        m.zero_grad()
        leaves, losses = inputs(3), []
        for i, leaf in enumerate(leaves):
            with duotone.autocast(recipe=recipe):
                losses.append(run(m, leaf * 3.0**i).float().square().sum())
        for i in order:
            losses[i].backward()
        return [*[leaf.grad for leaf in leaves], *[p.grad for p in m.parameters()], *[b.clone() for b in m.buffers()]]

    run = torch.compile(body, backend="aot_eager", fullgraph=True)
    for order in ((1, 0, 2), (2, 1, 0)):
        result, expected = step(run, compiled, order), step(body, eager, order)
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("recipe", [STOCHASTIC, DELAYED], ids=["stochastic", "delayed"])
def test_a_recompute_that_no_checkpoint_runs_is_an_error(recipe) -> None:
    m, (x,) = model(recipe), inputs(1)
    y = m(x)

    def again(gradient: Tensor) -> None:
        with torch.enable_grad():
            m(x)

    y.register_hook(again)
    with pytest.raises(UserError, match=r"inside a backward and no checkpoint recomputes it.*torch.utils.checkpoint"):
        y.sum().backward()


def test_forward_code_in_a_hook_follows_the_region_of_the_forward_that_has_a_backward() -> None:
    """An evaluation in another region came between. Its backward does not exist, so nothing recomputes for it."""
    m, (x,), again = duotone.Linear(32, 32, recipe="bf16").bfloat16(), inputs(1), []
    with duotone.autocast(recipe="mxfp8"):
        y = m(x)
    with torch.no_grad(), duotone.autocast(recipe="fp8-current"):
        other = m(x)

    def run(gradient: Tensor) -> None:
        with torch.enable_grad():
            again.append(m(x))

    y.register_hook(run)
    y.sum().backward()
    assert torch.equal(again[0], y) and not torch.equal(y, other)


def test_a_recompute_that_draws_more_is_an_error() -> None:
    m, (x,), calls = model(STOCHASTIC), inputs(1), []

    def body(t: Tensor) -> Tensor:
        calls.append(1)
        return m(m(t)) if len(calls) > 1 else m(t)

    with pytest.raises(UserError, match="draws more than its forward did"):
        checkpoint(body, x, use_reentrant=True).sum().backward()


def test_an_optimizer_inside_of_a_reentrant_backward_writes_with_the_scale_of_now() -> None:
    """A hook that the nested backward calls belongs to no recompute."""
    with duotone.quantized_model_init(recipe=DELAYED):
        m = duotone.Linear(32, 32, name="a", recipe=DELAYED)
    optimizer, (x,) = torch.optim.SGD(m.parameters(), lr=0.1), inputs(1)
    m.weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
    before = m.weight.dequantize().clone()
    for _ in range(2):
        m.zero_grad()
        checkpoint(m, x.float(), use_reentrant=True).square().sum().backward()
    assert not torch.equal(m.weight.dequantize(), before)

"""On a CUDA device: replays of CUDA graphs move delayed scales and seeds as eager steps do, to the bit."""

import contextlib
from collections.abc import Callable

import pytest
import torch
from comparing import bits
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone.recipes import DelayedScaling

pytestmark = [
    pytest.mark.skipif(
        not torch.cuda.is_available(),
        reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
    ),
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty"),  # torch's manager of graphs captures one first
    pytest.mark.filterwarnings(
        "ignore:The AccumulateGrad node's stream"
    ),  # of graphs that make_graphed_callables keeps
]

STEPS, ROWS, WIDTH = 20, 64, 128
NAMES = ["fp8-delayed", "fp8-current", "nvfp4", "mxfp8"]
RECIPE = DelayedScaling(amax_history_len=4)


def model(recipe: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)]
    m = nn.Sequential(*layers).to("cuda", torch.bfloat16)
    return duotone.convert(m, recipes.load(recipe), **options)


def batches() -> list[tuple[Tensor, Tensor]]:
    """Inputs and gradients whose magnitudes change from step to step, so that delayed scales do."""
    sizes = [2.0 ** (step % 5) for step in range(STEPS)]
    return [tuple((torch.randn(ROWS, WIDTH, device="cuda") * s).bfloat16() for _ in range(2)) for s in sizes]


def eager_step(m: nn.Module, x: Tensor, dy: Tensor, call: Callable | None = None) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = (call or m)(x)
    y.backward(dy)
    return [y, x.grad, *finish(m)]


@torch.no_grad()
def finish(m: nn.Module) -> list[Tensor]:
    """Take the gradients, and write other weights."""
    gradients = [p.grad.clone() for p in m.parameters()]
    for p in m.parameters():
        p -= 0.01 * p.grad
        p.grad.zero_()
    return gradients


def states(m: nn.Module) -> list[Tensor]:
    return [*duotone.recipe_state(m).values(), *duotone.rng_state(m).values()]


def follow(m: nn.Module, other: nn.Module) -> None:
    """Let `m` have the values, scales and seeds of `other`, which warmed up."""
    m.load_state_dict(other.state_dict())
    duotone.load_recipe_state(m, {name: value.clone() for name, value in duotone.recipe_state(other).items()})
    duotone.load_rng_state(m, duotone.rng_state(other))


def compare(
    m: nn.Module, graphed: nn.Module, step: Callable[[Tensor, Tensor], list[Tensor]], call: Callable | None = None
) -> None:
    """`call` is how `m` runs, if not by itself."""
    follow(m, graphed)
    for number, (x, dy) in enumerate(batches()):
        eager, replayed = eager_step(m, x, dy, call), step(x, dy)
        for a, b in zip([*eager, *states(m)], [*replayed, *states(graphed)], strict=True):
            assert torch.equal(bits(a), bits(b)), number


@pytest.mark.parametrize("name", NAMES)
def test_graphed_callables_replay_the_bits_of_eager_steps(name) -> None:
    m, graphed = model(name), model(name)
    for p in graphed.parameters():
        p.grad = torch.zeros_like(p)
    x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
    call = torch.cuda.make_graphed_callables(graphed, (x,))

    def step(x: Tensor, dy: Tensor) -> list[Tensor]:
        x = x.detach().requires_grad_()
        y = call(x)
        y.backward(dy)
        return [y, x.grad, *finish(graphed)]

    compare(m, graphed, step)


def captured(graphed: nn.Module, forward: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], list[Tensor]]:
    """A whole step in one graph, after three steps that warm up."""
    x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(ROWS, WIDTH, device="cuda").bfloat16()

    def run() -> Tensor:
        y = forward(x)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
            finish(graphed)
    torch.cuda.current_stream().wait_stream(side)
    x.grad.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()

    def step(new: Tensor, gradient: Tensor) -> list[Tensor]:
        with torch.no_grad():
            x.copy_(new), dy.copy_(gradient), x.grad.zero_()
        graph.replay()
        return [y, x.grad, *finish(graphed)]

    return step


@pytest.mark.parametrize("how", ["plain", "region", "checkpoint", "compiled"])
@pytest.mark.parametrize("name", NAMES)
def test_captured_whole_steps_replay_the_bits_of_eager_ones(name, how) -> None:
    """A region inside of the capture, a recompute, and compiled code."""
    m, graphed = model(name), model(name)
    forward = torch.compile(graphed) if how == "compiled" else graphed
    region = duotone.autocast(recipe=recipes.load(name)) if how == "region" else contextlib.nullcontext()

    def run(x: Tensor) -> Tensor:
        with region:
            if how == "checkpoint":
                return checkpoint(forward, x, use_reentrant=False)
            return forward(x)

    compare(m, graphed, captured(graphed, run), torch.compile(m) if how == "compiled" else m)


@pytest.mark.parametrize("name", NAMES)
def test_a_graph_of_later_microbatches_encodes_no_weight(name) -> None:
    """It reads the planes that replays of the graph of first microbatches write, at the same addresses."""
    m, graphed = (
        duotone.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device="cuda", recipe=recipes.load(name))
        for _ in range(2)
    )
    x, dy = (torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_(at == 0) for at in range(2))

    def run(first: bool) -> Tensor:
        y = graphed(x, is_first_microbatch=first)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for first in (True, False, True, False):
            run(first)
    torch.cuda.current_stream().wait_stream(side)
    finish(graphed)
    graphs, outputs = (torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()), []
    for graph, first in zip(graphs, (True, False), strict=True):
        with torch.cuda.graph(graph):
            outputs.append(run(first))
    follow(m, graphed)

    def replay(at: int, new: Tensor, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            x.copy_(new), dy.copy_(gradient)
        graphs[at].replay()
        return outputs[at]

    for number, (new, gradient) in enumerate(batches()):
        for at, first in enumerate((True, False)):
            y = m(new, is_first_microbatch=first)
            y.backward(gradient)
            assert torch.equal(bits(y), bits(replay(at, new, gradient))), (number, first)
        for a, b in zip([*finish(m), *states(m)], [*finish(graphed), *states(graphed)], strict=True):
            assert torch.equal(bits(a), bits(b)), number
    before = replay(1, new, gradient).clone()
    with torch.no_grad():
        graphed.weight.zero_()
    if name != "fp8-delayed":  # whose scale of the input moves with each replay
        assert torch.equal(bits(before), bits(replay(1, new, gradient)))
    assert before.count_nonzero() and not (replay(0, new, gradient) - graphed.bias).count_nonzero()


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("name", [*NAMES, "fp8-block", "fp8-rowwise"])
def test_one_graph_with_a_flag_serves_all_microbatches(name, kind) -> None:
    """Three a step. The first encodes the weight, which moves between steps. Outputs, gradients and scales."""

    def make() -> nn.Module:
        options = {"recipe": recipes.load(name), "params_dtype": torch.bfloat16, "device": "cuda"}
        return (
            duotone.Linear(WIDTH, WIDTH, **options)
            if kind == "linear"
            else duotone.GroupedLinear(2, WIDTH, WIDTH, **options)
        )

    m, graphed = make(), make()
    splits = ([ROWS // 2] * 2,) if kind == "grouped" else ()
    flag = torch.ones(1, dtype=torch.int32, device="cuda")
    x, dy = (torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_(at == 0) for at in range(2))

    def run() -> Tensor:
        y = graphed(x, *splits, is_first_microbatch=flag)
        y.backward(dy)
        return y

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    finish(graphed)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    follow(m, graphed)
    for number, (new, gradient) in enumerate(batches()):
        for first in (True, False, False):
            want = m(new, *splits, is_first_microbatch=first)
            want.backward(gradient)
            with torch.no_grad():
                x.copy_(new), dy.copy_(gradient), flag.fill_(first)
            graph.replay()
            assert torch.equal(bits(y), bits(want)), (number, first)
        for a, b in zip([*finish(m), *states(m)], [*finish(graphed), *states(graphed)], strict=True):
            assert torch.equal(bits(a), bits(b)), number


@pytest.mark.parametrize("name", NAMES)
def test_a_flagged_microbatch_of_another_weight_refuses_the_backwards_in_flight(name) -> None:
    linear, (x, _) = model(name)[0], batches()[0]
    flag, leaf = torch.ones(1, device="cuda"), x.detach().clone().requires_grad_()
    linear(leaf, is_first_microbatch=flag)
    first = linear(leaf, is_first_microbatch=flag.zero_())
    linear(leaf, is_first_microbatch=flag)
    (same,) = torch.autograd.grad(first.sum(), leaf)
    assert same.count_nonzero()
    late = linear(leaf, is_first_microbatch=flag)
    with torch.no_grad():
        linear.weight.mul_(-2.0)
    linear(leaf, is_first_microbatch=flag)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        late.sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_reduce_overhead_has_the_bits_of_compiled_code(name) -> None:
    """torch takes graphs of what it can; scales and seeds are those of code that is compiled without them."""
    m, graphed = model(name), model(name)
    plain, fast = torch.compile(m), torch.compile(graphed, mode="reduce-overhead")
    for number, (x, dy) in enumerate(batches()):
        eager = [one.clone() for one in eager_step(m, x, dy, plain)]
        torch.compiler.cudagraph_mark_step_begin()
        replayed = [one.clone() for one in eager_step(graphed, x, dy, fast)]
        graphed.zero_grad()  # gradients lie in memory that the next replay writes
        for a, b in zip([*eager, *states(m)], [*replayed, *states(graphed)], strict=True):
            assert torch.equal(bits(a), bits(b)), number


def test_a_capture_inside_of_an_older_region_is_refused_and_training_goes_on() -> None:
    m = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=RECIPE, device="cuda")
    x = torch.randn(32, 64, device="cuda").bfloat16().requires_grad_()
    with duotone.autocast(recipe=RECIPE), pytest.raises(UserError, match="older than the capture"):
        torch.cuda.make_graphed_callables(m, (x,))
    torch.cuda.synchronize()
    for _ in range(2):
        m(x).sum().backward()
    assert m.weight.grad.isfinite().all()


def test_a_capture_before_any_step_is_refused() -> None:
    m = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=RECIPE, device="cuda")
    x = torch.randn(32, 64, device="cuda").bfloat16().requires_grad_()
    with pytest.raises(UserError, match="run a step of forward and backward before the capture"):
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            m(x).sum().backward()

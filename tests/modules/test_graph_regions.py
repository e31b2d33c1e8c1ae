"""Regions, checkpoints and batches of several sizes inside of fullgraph=True, with eager's bits."""

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.state.region import STACK
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH = 32


@pytest.fixture(autouse=True)
def _no_recompile_limit_is_hit() -> Iterator[None]:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


def linears(name: str, count: int) -> nn.Sequential:
    options = {"params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    return nn.Sequential(*[duotone.Linear(WIDTH, WIDTH, **options) for _ in range(count)])


def same_as_eager(
    m: nn.Sequential,
    rows: tuple[int, ...] = (WIDTH, WIDTH),
    call: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x),
    backend: str = "aot_eager",
) -> int:
    """Compares steps with batches of these sizes. Returns the number of graphs."""
    eager = copy.deepcopy(m)
    counter = dynamo_testing.CompileCounterWithBackend(backend)
    for layer in m:
        layer.compile(backend=counter, fullgraph=True)
    for count in rows:
        x, dy = torch.randn(2, count, WIDTH).bfloat16()
        results = []
        for model in (m, eager):
            leaf = x.clone().requires_grad_()
            y = call(model, leaf)
            y.backward(dy)
            results.append([y.detach(), leaf.grad, *[p.grad for p in model.parameters()], *model.buffers()])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))
    return counter.frame_count


class Checkpointed(nn.Module):
    def __init__(self, name: str, reentrant: bool) -> None:
        super().__init__()
        self.layers, self.reentrant = linears(name, 2), reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.layers, x, use_reentrant=self.reentrant)


OTHERS = [slow(name) for name in ("bf16", "fp8-current", "mxfp8", "fp8-block")]


@pytest.mark.parametrize("reentrant", [False, slow(True)])
@pytest.mark.parametrize("name", ["fp8-delayed", slow("nvfp4"), *OTHERS])
def test_a_checkpoint_inside_of_a_graph_recomputes_the_bits_of_its_forward(name: str, reentrant: bool) -> None:
    m = nn.Sequential(*[Checkpointed(name, reentrant) for _ in range(2)])
    assert same_as_eager(m) == 1


class Nested(nn.Module):
    """A region in a region, each with a recipe."""

    def __init__(self, outer: str, inner: str) -> None:
        super().__init__()
        self.layers, self.outer, self.inner = linears("bf16", 4), recipes.load(outer), recipes.load(inner)

    def forward(self, x: Tensor) -> Tensor:
        first, second, third, last = self.layers
        with duotone.autocast(recipe=self.outer):
            x = first(x)
            with duotone.autocast(recipe=self.inner):
                x = second(x)
            with duotone.autocast(enabled=False):
                x = third(x)
            return last(x)


class RegionInCheckpoint(Nested):
    """The regions of `Nested`, entered by a checkpointed function."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


@pytest.mark.parametrize("block", [Nested, RegionInCheckpoint])
@pytest.mark.parametrize("around", [slow(None), slow("mxfp8"), "fp8-delayed"])
@pytest.mark.parametrize(
    ("outer", "inner"), [("fp8-delayed", "nvfp4"), slow("nvfp4", "fp8-delayed"), slow("mxfp8", "fp8-current")]
)
def test_regions_nest_inside_of_a_graph_and_around_it(
    outer: str, inner: str, around: str | None, block: type[Nested]
) -> None:
    def call(m: nn.Module, x: Tensor) -> Tensor:
        if around is None:
            return m(x)
        with duotone.autocast(recipe=around):
            return m(x)

    m = nn.Sequential(*[block(outer, inner) for _ in range(2)])
    backend = "aot_eager" if block is RegionInCheckpoint else "eager"  # only a cut graph recomputes
    assert same_as_eager(m, call=call, backend=backend) == 1


@pytest.mark.slow
def test_recipes_meet_in_a_checkpoint_under_symbolic_sizes() -> None:
    """torch 2.11 makes the numbers of a format inputs of such a graph, and a checkpoint does not take them there."""
    m = nn.Sequential(*[RegionInCheckpoint("fp8-current", "fp8-delayed") for _ in range(2)])
    compiled = torch.compile(copy.deepcopy(m), backend="eager", dynamic=True, fullgraph=True)
    x = torch.randn(WIDTH + 16, WIDTH).bfloat16()
    assert torch.equal(compiled(x), m(x))


class RegionInside(nn.Module):
    """A linear under the region around it, and one under a region of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = linears("bf16", 2)

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.layers
        with duotone.autocast(recipe="nvfp4"):
            x = second(x)
        return first(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["mxfp8", slow("fp8-delayed"), slow("nvfp4")])
def test_a_checkpoint_around_a_graph_recomputes_under_the_region_of_its_forward(name: str, reentrant: bool) -> None:
    """That region has ended, and another one is around the backward, which stays as it is."""
    m = RegionInside()
    eager, compiled = copy.deepcopy(m), torch.compile(m, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(2, WIDTH, WIDTH).bfloat16()
    results = []
    for model, run in ((m, compiled), (eager, eager)):
        leaf = x.clone().requires_grad_()
        with duotone.autocast(recipe=name):
            y = checkpoint(run, leaf, use_reentrant=reentrant)
        with duotone.autocast(recipe="fp8-block"):
            around = STACK.regions
            y.backward(dy)
            assert STACK.regions == around
        results.append([y.detach(), leaf.grad, *[p.grad for p in model.parameters()], *model.buffers()])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))


@pytest.mark.parametrize("name", ["fp8-delayed", *(slow(name) for name in ("bf16", "mxfp8", "nvfp4", "fp8-block"))])
def test_batches_of_any_size_share_few_graphs(name: str) -> None:
    """Without dynamic=True: the second size makes the graph dynamic; sizes that cut a block compile once more."""
    assert same_as_eager(linears(name, 1), rows=(1, 32, 33, 1, 32, 33, 40)) <= 3

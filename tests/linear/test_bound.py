"""Bound calls: the second call of a signature is recorded, later ones run the record, with the same bits."""

import copy
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import ops, recipes
from duotone.pipeline import bound
from duotone.pipeline.bound import Bindings, Recorder

RECIPES = ("fp8-current", "fp8-delayed", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "bf16")
LEAD, K, N = (2, 16), 64, 48
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Ran:
    """How many calls ran bound code."""

    def __init__(self) -> None:
        self.bound = self.all = 0


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ran]:
    """Counts calls of bindings, and those that had code."""
    counts, call = Ran(), Bindings.__call__

    def counted(self: Bindings, *arguments: object) -> object:
        codes = {key: _counting(code, counts) for key, code in self.codes.items()}
        before, self.codes = self.codes, codes
        try:
            counts.all += 1
            return call(self, *arguments)  # type: ignore[arg-type]
        finally:
            self.codes = {**before, **{key: code for key, code in self.codes.items() if key not in before}}

    monkeypatch.setattr(Bindings, "__call__", counted)
    yield counts


def _counting(code: Callable[..., object], counts: Ran) -> Callable[..., object]:
    def run(*arguments: object) -> object:
        counts.bound += 1
        return code(*arguments)

    return run


def model(recipe: str, bias: bool = True) -> nn.Sequential:
    torch.manual_seed(3)
    first = duotone.Linear(K, N, bias=bias, params_dtype=torch.bfloat16, recipe=recipes.load(recipe), name="first")
    second = duotone.Linear(N, K, bias=bias, params_dtype=torch.bfloat16, recipe=recipes.load(recipe), name="second")
    return nn.Sequential(first, nn.Identity(), second).to(DEVICE)


def inputs(count: int, lead: tuple[int, ...] = LEAD) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    values = [torch.randn(*lead, K, generator=generator) for _ in range(count)]
    return [x.to(DEVICE, torch.bfloat16).requires_grad_() for x in values]


def once(model: nn.Module, step: int) -> list[Tensor]:
    x, dy = inputs(12)[step], inputs(24)[step + 12].detach()
    y = model(x)
    y.backward(dy)
    return [y, x.grad]


def two_microbatches(model: nn.Module, step: int) -> list[Tensor]:
    xs, dy = inputs(24)[2 * step : 2 * step + 2], inputs(1)[0].detach()
    ys = [model(x) for x in xs]
    for y in ys:
        y.backward(dy)
    return [*ys, *[x.grad for x in xs]]


def twice(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    y = model(model(x))
    y.backward(torch.ones_like(y))
    return [y, x.grad]


def checkpointed(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    y = checkpoint(model, x, use_reentrant=False)
    y.backward(torch.ones_like(y))
    return [y, x.grad]


def reentrant(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    y = checkpoint(model, x, use_reentrant=True)
    y.backward(torch.ones_like(y))
    return [y, x.grad]


def in_region(model: nn.Module, step: int) -> list[Tensor]:
    with duotone.autocast(recipe=recipes.load("mxfp8" if step % 3 == 1 else "fp8-current")):
        return once(model, step)


def evaluated_between(model: nn.Module, step: int) -> list[Tensor]:
    results = once(model, step)
    with torch.no_grad():
        return [*results, model(inputs(12)[step])]


def expanded_gradient(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    y = model(x)
    (y.sum() if step % 2 else (y * 2).sum()).backward()
    return [y, x.grad]


def turned_input(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    turned = x.detach().transpose(0, 1) if step % 2 else x.detach().transpose(0, 1).contiguous()
    y = model(turned.requires_grad_())
    y.backward(torch.ones_like(y))
    return [y, turned.grad]


def other_rows(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12, (2, 8) if step % 2 else LEAD)[step]
    y = model(x)
    y.backward(torch.ones_like(y))
    return [y, x.grad]


def kept_graph(model: nn.Module, step: int) -> list[Tensor]:
    x = inputs(12)[step]
    y = model(x)
    y.backward(torch.ones_like(y), retain_graph=True)
    y.backward(torch.ones_like(y) * 3)
    return [y, x.grad]


def saved_elsewhere(model: nn.Module, step: int) -> list[Tensor]:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()):
        return once(model, step)


def frozen_weight(model: nn.Module, step: int) -> list[Tensor]:
    model[0].weight.requires_grad_(step % 2 == 0)
    results = once(model, step)
    model[0].weight.requires_grad_()
    return results


def other_data(model: nn.Module, step: int) -> list[Tensor]:
    weight = model[0].weight
    weight.data = weight.data.t().contiguous().t() if step % 2 else weight.data * 1.5
    return once(model, step)


def other_recipe(model: nn.Module, step: int) -> list[Tensor]:
    if step == 5:
        duotone.convert(model, "mxfp8")
    return once(model, step)


def copied(model: nn.Module, step: int) -> list[Tensor]:
    other = copy.deepcopy(model)
    return [*once(other, step), *once(model, step)]


def under_torch_autocast(model: nn.Module, step: int) -> list[Tensor]:
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=step % 2 == 0):
        return once(model, step)


def with_inference(model: nn.Module, step: int) -> list[Tensor]:
    with torch.inference_mode():
        y = model(inputs(12)[step].detach()).clone()
    return [y, *once(model, step)]


def hooked(model: nn.Module, step: int) -> list[Tensor]:
    handle = model[0].register_forward_hook(lambda m, args, y: y * 2)
    results = once(model, step)
    handle.remove()
    return [*results, *once(model, step)]


WAYS = (
    *(once, two_microbatches, twice, checkpointed, reentrant, in_region, evaluated_between, expanded_gradient),
    *(turned_input, other_rows, kept_graph, saved_elsewhere, frozen_weight, other_data, other_recipe, copied),
    *(under_torch_autocast, with_inference, hooked),
)


def results(recipe: str, way: Callable[[nn.Module, int], list[Tensor]], bias: bool) -> list[list[Tensor]]:
    """Outputs, gradients and buffers of eight steps, with a step of an optimizer after each."""
    trained = model(recipe, bias)
    collected: list[list[Tensor]] = []
    for step in range(8):
        found = way(trained, step)
        found += [p.grad for p in trained.parameters() if p.grad is not None]
        collected.append([t.detach().clone() for t in (*found, *trained.state_dict().values())])
        with torch.no_grad():
            for p in trained.parameters():
                if p.grad is not None:
                    p -= 0.001 * p.grad
        trained.zero_grad()
    return collected


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("recipe", RECIPES)
def test_bound_calls_have_the_bits_of_unbound_ones(
    recipe: str, way: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    bias = recipe != "fp8-current"
    bound_ones = results(recipe, way, bias)
    assert ran.bound > ran.all // 8
    monkeypatch.setattr(bound, "MOST", 0)
    ran.bound = 0
    plain_ones = results(recipe, way, bias)
    assert ran.bound == 0
    for step, (ours, plain) in enumerate(zip(bound_ones, plain_ones, strict=True)):
        assert len(ours) == len(plain)
        for i, (a, b) in enumerate(zip(ours, plain, strict=True)):
            assert a.dtype == b.dtype and torch.equal(a, b), (step, i)


KINDS: dict[str, Callable[..., nn.Module]] = {
    "layer norm linear": lambda recipe: duotone.LayerNormLinear(K, K, recipe=recipe, name="m"),
    "layer norm mlp": lambda recipe: duotone.LayerNormMLP(K, N, recipe=recipe, name="m", activation="swiglu"),
    "rms norm mlp": lambda recipe: duotone.LayerNormMLP(
        K, N, recipe=recipe, name="m", normalization="RMSNorm", bias=False
    ),
    "sequence": lambda recipe: ops.Sequential(
        ops.RMSNorm(K),
        ops.Linear(K, N, recipe=recipe, name="m"),
        ops.GELU(),
        ops.BasicLinear(N, K, recipe=recipe, name="n"),
        ops.Bias(K),
    ),
    "recomputing": lambda recipe: duotone.LayerNormMLP(
        K, N, recipe=replace(recipe, recompute_columnwise=True), name="m"
    ),
}
"""Pipelines of several stages, (*lead, K) -> (*lead, K)."""


@pytest.mark.parametrize("way", [once, two_microbatches, checkpointed, evaluated_between, kept_graph, saved_elsewhere])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "nvfp4", "bf16"])
@pytest.mark.parametrize("kind", KINDS)
def test_bound_pipelines_have_the_bits_of_unbound_ones(
    kind: str, recipe: str, way: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch, ran: Ran
) -> None:
    def steps() -> list[list[Tensor]]:
        torch.manual_seed(3)
        m = KINDS[kind](recipes.load(recipe)).to(DEVICE, torch.bfloat16)
        collected = []
        for step in range(6):
            m.zero_grad()
            found = way(m, step)
            gradients = [p.grad for p in m.parameters() if p.grad is not None]
            collected.append([t.detach().clone() for t in (*found, *gradients, *m.state_dict().values())])
        return collected

    ours = steps()
    if (kind, recipe) != ("recomputing", "fp8-delayed"):  # whose backward encodes with the scale of a moment
        assert ran.bound > ran.all // 8
    monkeypatch.setattr(bound, "MOST", 0)
    for step, (one, plain) in enumerate(zip(ours, steps(), strict=True)):
        for i, (a, b) in enumerate(zip(one, plain, strict=True)):
            assert a.dtype == b.dtype and torch.equal(a, b), (step, i)


OUTSIDE = torch.ones(2)


def bind(body: Callable[..., object], *arguments: object) -> Callable[..., object]:
    """Record one call of a body."""
    recorder = Recorder(arguments)
    with recorder:
        result = body(*arguments)
    code = recorder.code(result)
    assert code is not None
    return lambda *tensors: code([*tensors])


def test_a_write_is_repeated_and_what_it_writes_is_no_constant() -> None:
    def body(x: Tensor, live: Tensor) -> Tensor:
        total = torch.zeros(3)
        view = total[1:]
        view += x
        live.copy_(torch.maximum(live, x))
        return total * torch.full((), 2.0)

    x, live = torch.tensor([1.0, 2.0]), torch.zeros(2)
    code = bind(body, x, live)
    for factor in (3.0, 5.0):
        assert code(x * factor, live).tolist() == [0.0, 2 * factor, 4 * factor]  # type: ignore[attr-defined]
        assert live.tolist() == [factor, 2 * factor]


def test_what_a_caller_gets_is_new_in_each_call() -> None:
    code = bind(lambda x: (x + 1, torch.ones(2)), torch.zeros(2))
    first, second = code(torch.zeros(2)), code(torch.zeros(2))
    assert first[1].data_ptr() != second[1].data_ptr()  # type: ignore[index]


@pytest.mark.parametrize(
    "body",
    [
        lambda x: x * (2 if x.max().item() > 0 else 3),
        lambda x: x if bool(x.any()) else -x,
        lambda x: x * x.tolist()[0],
        lambda x: x * OUTSIDE,
    ],
    ids=["item", "bool", "tolist", "a tensor from outside"],
)
def test_a_body_that_values_decide_is_not_bound(body: Callable[..., Tensor]) -> None:
    x = torch.ones(2)
    recorder = Recorder((x,))
    with recorder:
        result = body(x)
    assert recorder.code(result) is None


class Watch(TorchFunctionMode):
    """Notes how many earlier results are alive at the end of each call of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.results: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def __torch_function__(self, func: Callable[..., Tensor], types: object, args: tuple = (), kwargs: object = None):
        result = func(*args)
        self.alive.append(sum(ref() is not None for ref in self.results))
        self.results.append(weakref.ref(result))
        return result


def test_memory_is_freed_after_its_last_use() -> None:
    def body(x: Tensor) -> Tensor:
        for _ in range(4):
            x = x * 2
        return x

    x = torch.ones(4)
    code = bind(body, x)
    with Watch() as watch:
        code(x)
    assert watch.alive == [0, 1, 1, 1]


def test_shapes_that_change_in_each_call_are_not_recorded_without_end(ran: Ran) -> None:
    linear = model("fp8-current")[0]
    for rows in range(1, 3 * bound.MOST):
        for _ in range(3):
            linear(torch.ones(rows, K, dtype=torch.bfloat16, device=DEVICE))
    _, backward, _ = next(iter(linear._rewritten.values()))
    assert backward.bound is not None and len(backward.bound.codes) == bound.MOST


def test_inference_tensors_are_taken_again_and_again() -> None:
    """They have no version, by which a recorder sees writes."""
    linear = model("fp8-current")[0]
    with torch.inference_mode():
        x = torch.ones(8, K, dtype=torch.bfloat16, device=DEVICE)
    with torch.no_grad():
        first, *others = (linear(x) for _ in range(4))
    assert all(torch.equal(first, other) for other in others)


def tied_then_apart() -> Tensor:
    """An MLP whose linears share a weight in the first calls."""
    m = duotone.convert(nn.Sequential(nn.Linear(K, K), nn.ReLU(), nn.Linear(K, K)), "bf16", rules=(), fuse=True)
    other, m[2].weight = m[2].weight, m[0].weight
    for x in inputs(3, (8,)):
        m(x.float()).sum().backward()
    m[2].weight = other
    x = inputs(1, (8,))[0].float()
    return m(x) - m[2].bias - torch.relu(x @ m[0].weight.t() + m[0].bias) @ other.t()


def product_with_itself() -> Tensor:
    """W W^T in the first calls, then another input of the shape of W."""
    m = duotone.Linear(K, K, bias=False)
    for _ in range(3):
        m(m.weight)
    x = torch.randn(K, K, requires_grad=True)
    return m(x) - x @ m.weight.t()


def input_as_gradient() -> Tensor:
    """The gradient of the output is the input in the first calls."""
    m = duotone.Linear(K, K, bias=False)
    x = torch.randn(K, K)
    for gradient in (x, x, x, torch.ones_like(x)):
        m.weight.grad = None
        m(x).backward(gradient)
    return m.weight.grad - torch.ones_like(x).t() @ x


@pytest.mark.parametrize("case", [tied_then_apart, product_with_itself, input_as_gradient])
def test_arguments_that_are_one_tensor_at_first_may_be_two_later(case: Callable[[], Tensor]) -> None:
    torch.manual_seed(0)
    assert case().abs().max() < 1e-4

"""What keeps tensors between calls, and what counts rows on a device, is part of a graph that equal layers share."""

import contextlib
import copy
import gc
import pickle
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.modules.moe import Router
from duotone.pipeline.rows import View
from duotone.pipeline.saved_forwards import FORWARDS
from later import Later

dynamo_testing = Later("torch._dynamo.testing")

pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
WIDTH, LAYERS = 32, 3
Step = Callable[[nn.Module, Tensor], Tensor]


@pytest.fixture(autouse=True)
def _no_recompile_limit_is_hit() -> Iterator[None]:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        yield


def linears(name: str, **options: object) -> nn.Module:
    options = {"params_dtype": torch.bfloat16, "recipe": recipes.load(name), **options}
    return nn.Sequential(*[duotone.Linear(WIDTH, WIDTH, **options) for _ in range(LAYERS)])


def in_turn(*arguments: object, **options: object) -> Step:
    def call(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m:
            x = layer(x, *arguments, **options)
        return x

    return call


def outcomes(m: nn.Module, steps: list[Step], after: Callable[[nn.Module], None]) -> list[Tensor | None]:
    """Outputs and gradients of inputs of all steps; then gradients, buffers and main_grads."""
    torch.manual_seed(3)
    values: list[Tensor | None] = []
    for step in steps:
        x = torch.randn(WIDTH, WIDTH).bfloat16().requires_grad_()
        y = step(m, x)
        y.backward(torch.randn_like(y))
        after(m)
        values += [y.detach().clone(), x.grad]
    values += [p.grad for p in m.parameters()] + [b.clone() for b in m.buffers()]
    return values + [vars(p).get("main_grad") for p in m.parameters()]


def same_as_eager(
    m: nn.Module, steps: list[Step], graphs: int, backend: str = "aot_eager", after: Callable = lambda m: None
) -> None:
    eager = copy.deepcopy(m)
    for parameter, twin in zip(m.parameters(), eager.parameters(), strict=True):
        for name, value in vars(parameter).items():
            setattr(twin, name, copy.deepcopy(value))
    counter = dynamo_testing.CompileCounterWithBackend(backend)
    for layer in m:
        layer.compile(backend=counter, fullgraph=True)
    for result, want in zip(outcomes(m, steps, after), outcomes(eager, steps, after), strict=True):
        assert (result is None and want is None) or torch.equal(result, want)
    if torch.__version__ >= "2.13":  # torch 2.11 guards on the values of marks on weights, too
        assert counter.frame_count == graphs


def slow(*values: object) -> object:
    return pytest.param(*values, marks=pytest.mark.slow)


NAMES = ["fp8-delayed", *(slow(name) for name in ("bf16", "fp8-current", "mxfp8", "fp8-block", "nvfp4"))]


@pytest.mark.parametrize("name", NAMES)
def test_cached_weights_are_encoded_by_one_graph_and_reused_by_another(name: str) -> None:
    """An optimizer writes the weights between two microbatches: a cache that is stale is filled again, as in eager."""
    m = linears(name)
    first, later = in_turn(is_first_microbatch=True), in_turn(is_first_microbatch=False)

    def written(m: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in m:
                layer.weight.mul_(0.5)
        return later(m, x)

    same_as_eager(m, [first, later, later, first, written], graphs=2)


def test_a_compiled_later_microbatch_encodes_no_weight() -> None:
    m = linears("mxfp8")[0]
    m.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(WIDTH, WIDTH).bfloat16()
    m(x, is_first_microbatch=True)
    cache = m.plans.options.caches[0]
    planes = cache.planes
    m(x, is_first_microbatch=False)
    assert cache.planes is planes and planes.rowwise is not None
    m(x, is_first_microbatch=True)
    assert cache.planes is not planes


@pytest.mark.parametrize("mark", [slow(False), True])
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_added_to_main_grad_in_a_graph(name: str, mark: bool) -> None:
    m = linears(name, fuse_wgrad_accumulation=True, bias=False)
    for layer in m:
        layer.weight.main_grad = torch.ones(WIDTH, WIDTH)
        if mark:
            layer.weight.grad_added_to_main_grad = False
    flags = (None, True, False) if name == "nvfp4" else (None, None)
    same_as_eager(m, [in_turn(is_first_microbatch=first) for first in flags], graphs=len(set(flags)))
    assert all(vars(layer.weight).get("grad_added_to_main_grad", mark) is mark for layer in m)


def test_a_graph_without_any_other_gradient_still_fills_main_grad() -> None:
    """The op of the backward has no output then, and no compiler may drop it."""
    m = linears("mxfp8", fuse_wgrad_accumulation=True, bias=False)[0]
    m.weight.main_grad = torch.zeros(WIDTH, WIDTH)
    m.compile(backend="aot_eager", fullgraph=True)
    m(torch.randn(WIDTH, WIDTH).bfloat16()).sum().backward()
    assert m.weight.main_grad.any() and m.weight.grad is None


def test_a_missing_main_grad_is_one_line() -> None:
    m = linears("mxfp8", fuse_wgrad_accumulation=True)[0]
    m.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(duotone.MissingPlaneError, match=r"needs weight\.main_grad of shape"):
        m(torch.randn(WIDTH, WIDTH).bfloat16()).sum().backward()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_that_are_put_off_wait_for_backward_dw(name: str) -> None:
    def now(m: nn.Module) -> None:
        for layer in m:
            layer.backward_dw()

    same_as_eager(linears(name, delay_wgrad_compute=True), [in_turn()] * 2, graphs=1, after=now)


@pytest.mark.parametrize("backend", ["aot_eager", slow("inductor")])
@pytest.mark.parametrize("name", NAMES)
def test_counts_in_a_tensor_are_no_constants_of_the_graph(name: str, backend: str) -> None:
    options = {"params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    m = nn.Sequential(*[duotone.GroupedLinear(3, WIDTH, WIDTH, **options) for _ in range(2)])
    counts = ([10, 0, 22], [32, 0, 0], [5, 7, 20])
    same_as_eager(m, [in_turn(torch.tensor(each)) for each in counts], graphs=1, backend=backend)


def test_counts_in_a_list_compile_too() -> None:
    m = nn.Sequential(duotone.GroupedLinear(2, WIDTH, WIDTH, params_dtype=torch.bfloat16, recipe="mxfp8"))
    same_as_eager(m, [in_turn([10, 22]), in_turn([32, 0]), in_turn([5, 27])], graphs=2)


def test_counts_that_do_not_add_up_are_refused_by_the_graph() -> None:
    m = duotone.GroupedLinear(2, WIDTH, WIDTH, recipe="mxfp8")
    m.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(duotone.UserError, match="sum to 30, and the input has 32 rows"):
        m(torch.randn(32, WIDTH), torch.tensor([10, 20]))


@pytest.mark.parametrize("name", NAMES)
def test_a_mixture_of_experts_is_one_graph(name: str) -> None:
    options = {"params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    m = nn.Sequential(*[duotone.MoE(WIDTH, 64, 4, **options) for _ in range(2)])
    same_as_eager(m, [in_turn()] * 2, graphs=1)


class Strange(Router):
    """A router that is not the library's, whose choices are checked."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights, index = super().forward(x)
        return weights, index + self.shift


def test_a_graph_refuses_choices_that_are_no_experts() -> None:
    m = duotone.MoE(WIDTH, 64, 4, recipe="mxfp8")
    m.router.__class__ = Strange
    m.router.register_buffer("shift", torch.zeros((), dtype=torch.int64))
    eager = copy.deepcopy(m)
    m.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(WIDTH, WIDTH)
    assert torch.equal(m(x), eager(x))
    for shift in (1, -1):
        m.router.shift.fill_(shift)
        with pytest.raises(duotone.UserError, match="row counts, integers that are not negative"):
            m(x)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["fp8-delayed", slow("nvfp4"), slow("mxfp8")])
def test_a_checkpoint_around_compiled_layers_recomputes_them(name: str, reentrant: bool) -> None:
    """Hooks for saved tensors replace the token of a forward. A reentrant one runs the forward without gradients."""
    m = linears(name, fuse_wgrad_accumulation=True)
    for layer in m:
        layer.weight.main_grad = torch.zeros(WIDTH, WIDTH)

    def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(in_turn(), m, x, use_reentrant=reentrant)

    same_as_eager(m, [checkpointed] * 2, graphs=3 if reentrant else 1)


@pytest.mark.parametrize("name", ["nvfp4", slow("fp8-delayed")])
def test_a_reentrant_checkpoint_around_plain_compiled_layers_advances_seeds_and_scales(name: str) -> None:
    def checkpointed(m: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(in_turn(), m, x, use_reentrant=True)

    same_as_eager(linears(name), [checkpointed] * 3, graphs=3, backend="eager")


@pytest.mark.parametrize("name", ["mxfp8", "fp8-current"])
def test_compiled_autograd_gives_the_gradients_of_eager_code(name: str) -> None:
    """It makes modules while Dynamo runs, so our hook for modules must not be traced."""
    m = linears(name)
    eager, x = copy.deepcopy(m), torch.randn(WIDTH, WIDTH).bfloat16()

    def step(m: nn.Module) -> None:
        in_turn()(m, x).sum().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(step, backend="aot_eager")(m)
    step(eager)
    for one, other in zip(m.parameters(), eager.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


def test_compiled_code_that_should_calibrate_is_one_line() -> None:
    """It would compute in high precision and record nothing."""
    m = duotone.Linear(32, 32, recipe=recipes.load("fp8-delayed"))
    compiled = torch.compile(m, backend="eager", fullgraph=True)
    with duotone.autocast(enabled=False, calibrating=True, recipe=m.recipe):
        with pytest.raises(Exception, match="compiled code calibrates no scales; calibrate in eager code"):
            compiled(torch.randn(4, 32))


HOOKS = {
    "none": contextlib.nullcontext,
    "copies": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda x: x),
    "save_on_cpu": torch.autograd.graph.save_on_cpu,
    "save_on_cpu, pinned": lambda: torch.autograd.graph.save_on_cpu(pin_memory=True),
}


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.parametrize("backend", ["eager", "aot_eager", slow("inductor")])
@pytest.mark.parametrize("options", [{"delay_wgrad_compute": True}, {}], ids=["put off", "cached"])
def test_what_a_compiled_forward_saved_is_there_also_if_hooks_copy_it(
    options: dict[str, bool], backend: str, hooks: str
) -> None:
    m = linears("mxfp8", **options)
    eager, called = copy.deepcopy(m), {} if options else {"is_first_microbatch": True}
    for layer in m:
        layer.compile(backend=backend, fullgraph=True)
    x = torch.randn(WIDTH, WIDTH).bfloat16()
    with HOOKS[hooks]():
        y = in_turn(**called)(m, x)
    expected = in_turn(**called)(eager, x)
    for model, result in ((m, y), (eager, expected)):
        result.square().sum().backward()
        for layer in model:
            layer.backward_dw()
    gc.collect()
    assert torch.equal(y, expected)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(m.parameters(), eager.parameters(), strict=True))


@pytest.mark.parametrize("form", ["transposed", "slice"])
@pytest.mark.parametrize("hooks", ["copies", "save_on_cpu, pinned"])
def test_what_shares_the_memory_of_an_input_is_there_if_hooks_copy_it_otherwise(form: str, hooks: str) -> None:
    """A copy has other strides than a part of a wider tensor, and may have others than a transposed one."""
    eager = linears("bf16")[0]
    m = copy.deepcopy(eager)
    m.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(WIDTH, 2 * WIDTH).bfloat16()
    x = x[:, :WIDTH] if form == "slice" else x[:, :WIDTH].t().contiguous().t()
    for module in (m, eager):
        with HOOKS[hooks]():
            y = module(x, is_first_microbatch=True)
        y.square().sum().backward()
    assert torch.equal(m.weight.grad, eager.weight.grad)


PACKS: list[Callable[[Tensor], object]] = [lambda x: x + 0, lambda x: torch.stack([x]), copy.deepcopy, pickle.dumps]


@pytest.mark.parametrize("pack", PACKS)
def test_hooks_that_keep_only_values_are_refused_in_one_line(pack: Callable[[Tensor], object]) -> None:
    m = linears("mxfp8", delay_wgrad_compute=True)[0]
    m.compile(backend="aot_eager", fullgraph=True)
    with pytest.raises(duotone.UserError, match="hooks for saved tensors may copy tensors, but not store"):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            y = m(torch.randn(WIDTH, WIDTH).bfloat16())
        y.sum().backward()


def test_what_forward_saved_goes_with_its_graph() -> None:
    m = linears("mxfp8", delay_wgrad_compute=True)[0]
    m.compile(backend="aot_eager", fullgraph=True)
    before = len(FORWARDS)
    y = m(torch.randn(WIDTH, WIDTH).bfloat16())
    assert len(FORWARDS) == before + 1
    del y
    gc.collect()
    assert len(FORWARDS) == before


def test_what_shares_the_memory_of_a_weight_comes_back_in_its_dtype() -> None:
    """Codes of a quantized weight are bytes, and a kernel for experts multiplied them as FP8."""
    codes = torch.arange(64, dtype=torch.uint8).view(8, 8)
    saved = codes.view(torch.float8_e4m3fn)[2:].t()
    view = View.of(saved, [torch.zeros(3), codes])
    assert view is not None
    restored = view.restore([torch.zeros(3), codes])
    assert restored.dtype is saved.dtype and torch.equal(restored.view(torch.uint8), saved.view(torch.uint8))


@pytest.mark.parametrize("name", ["mxfp8", slow("fp8-current"), slow("nvfp4")])
def test_a_quantized_weight_may_stand_twice_in_a_pipeline(name: str) -> None:
    """Dynamo takes no tensor twice, and knows no planes of a view. Gradients are added in the order of eager code."""
    with duotone.quantized_model_init(recipe=name):
        layer = duotone.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, recipe=name)
        mlp = duotone.LayerNormMLP(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16, recipe=name)
    mlp.fc2.weight = mlp.fc1.weight
    pipeline = duotone.ops.Sequential(layer, duotone.ops.GELU(), layer, layer)
    same_as_eager(nn.Sequential(pipeline, mlp), [in_turn(), in_turn()], graphs=2)

"""On a CUDA device: a linear compiles whole under every recipe, its graph calls the kernels, and gives eager's bits."""

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._ops import OpOverload
from torch.library import opcheck
from torch.utils._pytree import tree_leaves, tree_map_only

import duotone
from duotone import recipes
from duotone.formats.elements import FP8_DTYPES

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
RECIPES = ("fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4", "nvfp4-1d-weight")
PAIRS = ("mxfp8-fwd-nvfp4-bwd", "high-precision-fwd-mxfp8-bwd")
"""Two formats that no one kernel makes."""


def steps(module: torch.nn.Module, call: object, x: Tensor, count: int = 3) -> list[list[Tensor]]:
    """Output and gradients of some steps, whose delayed scales move."""
    results = []
    for i in range(count):
        inputs = (x.detach() * (1 + i)).requires_grad_()
        y = call(inputs)  # type: ignore[operator]
        gradients = torch.autograd.grad(y.square().sum(), [inputs, *module.parameters()])
        results.append([y.detach(), *gradients])
    return results


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", (*RECIPES, *PAIRS))
def test_a_compiled_linear_gives_the_bits_of_eager(name, backend) -> None:
    torch.manual_seed(0)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16)
    results = [
        duotone.Linear(512, 384, bias=False, device="cuda", params_dtype=torch.bfloat16, recipe=recipes.load(name))
        for _ in range(2)
    ]
    results[1].load_state_dict(results[0].state_dict(), strict=False)
    duotone.load_rng_state(results[1], duotone.rng_state(results[0]))
    compiled = torch.compile(results[1], backend=backend, fullgraph=True, dynamic=False)
    for eager, traced in zip(steps(results[0], results[0], x), steps(results[1], compiled, x), strict=True):
        for a, b in zip(eager, traced, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["fp8-delayed", "nvfp4", "mxfp8-fwd-nvfp4-bwd", "high-precision-fwd-mxfp8-bwd"])
def test_the_graph_of_a_compiled_linear_is_one_op_for_each_pass(name: str) -> None:
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> object:
        def look(inner: torch.fx.GraphModule, _: object) -> object:
            seen.extend(str(node.target) for node in inner.graph.nodes)
            return make_boxed_func(inner.forward)

        return aot_autograd(fw_compiler=look, bw_compiler=look)(graph, inputs)

    recipe = recipes.load(name)
    module = duotone.Linear(512, 384, bias=False, device="cuda", params_dtype=torch.bfloat16, recipe=recipe)
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    torch.compile(module, backend=backend, fullgraph=True)(x).sum().backward()
    ours = [each.removeprefix("duotone.") for each in seen if "duotone" in each and "seed" not in each]
    prefix = "stateful_" * (name == "fp8-delayed")
    assert ours == [f"{prefix}row.default", f"{prefix}row_gradients.default"]


Calls = dict[OpOverload, tuple[object, ...]]
CHECKS = "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"


def checks_for(arguments: tuple[object, ...]) -> tuple[str, ...]:
    """The checks of torch. That of the schema compares arguments by products, which CUDA has not in FP8."""
    has_fp8 = any(isinstance(leaf, Tensor) and leaf.dtype in FP8_DTYPES for leaf in tree_leaves(arguments))
    return CHECKS[has_fp8:]


def calls_of_own_ops(module: torch.nn.Module, x: Tensor) -> Calls:
    """The first arguments of each op of the library in the graphs of a step."""
    calls: Calls = {}

    class Recorder(torch.fx.Interpreter):
        def call_function(self, target: object, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
            if isinstance(target, OpOverload) and target.namespace == "duotone":
                calls.setdefault(target, tree_map_only(Tensor, Tensor.detach, args))
            return super().call_function(target, args, kwargs)

    def look(graph: torch.fx.GraphModule, _: object) -> object:
        return make_boxed_func(Recorder(graph).run)

    torch.compiler.reset()
    backend = aot_autograd(fw_compiler=look, bw_compiler=look)
    torch.compile(module, backend=backend, fullgraph=True)(x).sum().backward()
    return calls


@pytest.mark.parametrize(
    ("name", "kind", "op"),
    [
        ("fp8-delayed", "Linear", "stateful_row"),
        ("fp8-delayed", "LayerNormLinear", "stateful_row_gradients"),
        ("fp8-block", "Linear", "row"),
    ],
)
def test_the_ops_of_a_graph_are_what_their_schemas_say(name: str, kind: str, op: str) -> None:
    options = {"device": "cuda", "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
    x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    module = getattr(duotone, kind)(512, 384, **options)  # ops find its states by a number while it lives
    calls = calls_of_own_ops(module, x)
    assert f"duotone::{op}" in {target.name() for target in calls}
    for target, arguments in calls.items():
        opcheck(target, arguments, test_utils=checks_for(arguments))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("name", ("fp8-delayed", "fp8-current", "nvfp4", "bf16"))
def test_compiled_groups_main_grads_and_cached_weights_give_the_bits_of_eager(name, backend) -> None:
    """The memory of what forward saves is not the graph's, which reuses its own."""
    options = {"device": "cuda", "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}

    def outcomes(compiles: bool) -> list[Tensor]:
        torch.manual_seed(0)
        group = duotone.GroupedLinear(4, 512, 256, name="group", **options)
        linear = duotone.Linear(256, 512, name="linear", fuse_wgrad_accumulation=True, **options)
        linear.weight.main_grad = torch.zeros(512, 256, device="cuda")

        def run(x: Tensor, counts: Tensor, first: bool) -> Tensor:
            hidden = torch.relu(group(x.tanh(), counts))
            return linear(hidden * 2, is_first_microbatch=first).sin()

        call = torch.compile(run, backend=backend, fullgraph=True, dynamic=False) if compiles else run
        results = []
        for counts, first in (((64, 0, 128, 64), True), ((0, 256, 0, 0), False), ((16, 48, 64, 128), False)):
            x = torch.randn(256, 512, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            y = call(x, torch.tensor(counts, device="cuda"), first)
            y.backward(torch.ones_like(y))
            results += [y.detach(), x.grad]
        return [*results, linear.weight.main_grad, *[p.grad for p in group.parameters()], *group.buffers()]

    for a, b in zip(outcomes(False), outcomes(True), strict=True):
        if backend == "aot_eager":
            assert torch.equal(a, b)
        elif a.is_floating_point():  # inductor leaves out roundings between operations that it fuses
            assert (a.float() - b.float()).norm() <= 0.1 * a.float().norm()


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="for Hopper")
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "nvfp4"])
def test_compiled_groups_with_quantized_weights_give_the_bits_of_eager(name) -> None:
    """What is saved of a weight are its codes, in the dtype of the element where eager code has them so."""
    with duotone.quantized_model_init(recipe=recipes.load(name)):
        options = {"device": "cuda", "params_dtype": torch.bfloat16, "recipe": recipes.load(name)}
        module = duotone.GroupedLinear(4, 512, 256, name="group", **options)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    state = duotone.rng_state(module)
    results = []
    for call in (module, compiled):
        duotone.load_rng_state(module, state)
        x = torch.linspace(-2, 2, 256 * 512, device="cuda").view(256, 512).bfloat16().requires_grad_()
        y = call(x, torch.tensor([64, 0, 128, 64], device="cuda"))
        results.append([y, *torch.autograd.grad(y.square().sum(), [x, *module.parameters()])])
    assert all(torch.equal(*both) for both in zip(*results, strict=True))

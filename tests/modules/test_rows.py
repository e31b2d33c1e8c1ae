"""Rows of compiled code: gradients and sizes that eager code takes, too."""

import copy
import gc
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import modules, ops, recipes
from duotone.pipeline import rows


def results(module: nn.Module, call: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor | None]:
    """y and all gradients."""
    x = x.detach().requires_grad_()
    y = call(x)
    gradients = torch.autograd.grad(y.square().sum(), [x, *module.parameters()])
    return [y, *gradients]


@pytest.mark.parametrize(
    ("dtype", "times", "backend"),
    [
        (torch.bfloat16, 1, "aot_eager"),
        (torch.bfloat16, 2, "aot_eager"),
        (torch.float32, 1, "aot_eager"),
        (torch.float32, 1, "inductor"),
    ],
)
def test_the_gradient_of_a_norms_weight_is_that_of_eager_code(dtype: torch.dtype, times: int, backend: str) -> None:
    """torch computes it in fp32 for inputs in bf16, and a graph that took its bytes for bf16 gave noise."""
    torch.manual_seed(0)
    linear = ops.Linear(64, 64, params_dtype=torch.bfloat16, recipe=recipes.load("fp8-current"))
    module = ops.Sequential(ops.RMSNorm(64, params_dtype=dtype), linear)

    def call(x: Tensor) -> Tensor:
        for _ in range(times):
            x = module(x)
        return x

    x = torch.randn(32, 64).bfloat16()
    want = results(module, call, x)
    for a, b in zip(want, results(module, torch.compile(call, backend=backend, fullgraph=True), x), strict=True):
        assert a is not None and b is not None and a.dtype is b.dtype
        if backend == "aot_eager":
            assert torch.equal(a, b)
        else:  # inductor may keep the sum of two gradients in fp32
            assert (a - b).norm() <= 0.01 * a.norm()


@pytest.mark.parametrize("recipe", ["fp8-delayed", "mxfp8"])
@pytest.mark.parametrize(
    "strided",
    [
        lambda x: x[::2],
        lambda x: x[:1].expand(4, 8, 64),
        lambda x: torch.cat([x, x], -1)[..., :64],
        lambda x: x.transpose(0, 1),
    ],
    ids=["rows", "expanded", "columns", "transposed"],
)
def test_inputs_that_are_not_dense_are_encoded_again_with_the_bits_of_eager(
    strided: Callable[[Tensor], Tensor], recipe: str
) -> None:
    """Equal blocks share names, and one got in backward what the other had kept."""
    torch.manual_seed(0)
    rule = replace(recipes.load(recipe), recompute_columnwise=True)
    options = {"params_dtype": torch.bfloat16, "recipe": rule}
    blocks = [ops.Sequential(ops.Linear(64, 64, **options), ops.Linear(64, 64, **options)) for _ in range(2)]
    eager = nn.Sequential(*blocks)
    traced = copy.deepcopy(eager)
    compiled = torch.compile(traced, backend="aot_eager", fullgraph=True)
    x = strided(torch.randn(8, 8, 64).bfloat16())
    for _ in range(3):
        for a, b in zip(results(eager, eager, x), results(traced, compiled, x), strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


def test_more_kinds_of_layers_than_rows_are_remembered_run_behind_equal_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """All models share the norm in front, and what it remembered was gone before the backward of the first layers."""
    monkeypatch.setattr(rows, "MOST", 2)
    layers = [
        ops.Sequential(ops.RMSNorm(32), ops.Linear(32, 32, recipe=recipes.load(name)))
        for name in ("fp8-current", "mxfp8", "nvfp4", "fp8-block")
    ]
    module = nn.Sequential(*layers)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 32)
    assert all(each is not None and each.isfinite().all() for each in results(module, compiled, x))


def tied_norms() -> nn.Module:
    options = {"params_dtype": torch.bfloat16}
    norms = [ops.RMSNorm(64, **options) for _ in range(2)]
    linears = [ops.Linear(64, 64, recipe="fp8-current", **options) for _ in range(2)]
    return ops.Sequential(norms[0], linears[0], norms[1], linears[1])


def tied_products() -> nn.Module:
    recipe = replace(recipes.load("fp8-current"), recompute_columnwise=True)
    return modules.LayerNormMLP(64, 64, params_dtype=torch.bfloat16, recipe=recipe)


@pytest.mark.parametrize(("make", "first", "second"), [(tied_norms, "0", "2"), (tied_products, "fc1", "fc2")])
@pytest.mark.parametrize("is_flat", [False, True], ids=["one tensor", "one storage"])
def test_a_block_with_tied_weights_leaves_the_gradients_of_equal_blocks_alone(
    make: Callable[[], nn.Module], first: str, second: str, is_flat: bool
) -> None:
    """Equal blocks share what finds kept tensors, and the untied one got the gradients of the tied one's weight."""
    torch.manual_seed(0)
    blocks = [make(), make()]
    for parameter in nn.ModuleList(blocks).parameters():  # else all norms are equal
        nn.init.normal_(parameter, 0.5, 0.1)
    if is_flat:  # as FSDP1 holds weights, of which no two are tied
        parameters = [*blocks[1].parameters()]
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters).detach(), parameters)
    else:
        blocks[1].get_submodule(second).weight = blocks[1].get_submodule(first).weight
    eager = nn.Sequential(*blocks)
    traced = copy.deepcopy(eager)
    for block in traced:
        block.compile(backend="aot_eager", fullgraph=True)
    x = torch.randn(32, 64).bfloat16()
    for _ in range(3):
        for a, b in zip(results(eager, eager, x), results(traced, traced, x), strict=True):
            assert a is not None and b is not None and torch.equal(a, b)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.linear(x).relu())


def test_scales_of_a_linear_that_a_graph_calls_twice_follow_growing_inputs() -> None:
    """Bound code lost the writes of amaxes if it was recorded under autograd, and scales stood still."""
    torch.manual_seed(0)
    eager = duotone.convert(Twice().bfloat16(), "fp8-delayed", rules=())
    traced = copy.deepcopy(eager)
    calls = eager, torch.compile(traced, backend="aot_eager", fullgraph=True)
    dtype = torch.bfloat16
    for step in range(5):
        x = (torch.randn(32, 64) * 4.0**step).to(dtype)
        want, got = (results(module, call, x) for module, call in zip((eager, traced), calls, strict=True))
        for a, b in zip(want, got, strict=True):
            assert a is not None and b is not None and torch.equal(a, b)
        for a, b in zip(eager.buffers(), traced.buffers(), strict=True):
            assert torch.equal(a, b)
        if step == 0:
            dtype = torch.float32
            eager.float()
            traced.float()


KINDS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: modules.Linear(32, 32, recipe=recipes.load("fp8-delayed")),
    "cached": lambda: modules.Linear(32, 32, recipe=recipes.load("mxfp8")),
    "attention": lambda: duotone.DotProductAttention(1, 32, qkv_format="bshd", recipe=FP8_ATTENTION),
}
FP8_ATTENTION = duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)


@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_leaves_no_tensor_to_pythons_garbage_collector(kind: str) -> None:
    """It runs late, so that such tensors would fill a GPU for several steps."""
    module = KINDS[kind]()
    run = torch.compile(module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 16, 1, 32, requires_grad=True)

    inputs, options = (x,) * (3 if kind == "attention" else 1), {}
    if kind == "cached":
        options["is_first_microbatch"] = True

    def step() -> None:
        run(*inputs, **options).sum().backward()
        module.zero_grad()

    for _ in range(4):
        step()
    gc.collect()
    gc.disable()
    try:
        before = sum(isinstance(each, Tensor) for each in gc.get_objects())
        step()
        assert sum(isinstance(each, Tensor) for each in gc.get_objects()) == before
    finally:
        gc.enable()

"""On a CUDA device: modules give the bits of their parts called one by one, and of torch under Identity."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from duotone import ops, recipes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
CUDA = {"device": "cuda", "params_dtype": torch.bfloat16}


def same(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    for i, (a, b) in enumerate(zip(one, other, strict=True)):
        assert a.isfinite().all() and torch.equal(a, b), i


def test_mlp_under_identity_is_torch(norm_name="RMSNorm") -> None:
    for norm_name, norm in (("LayerNorm", nn.LayerNorm), ("RMSNorm", nn.RMSNorm)):
        mlp = duotone.LayerNormMLP(256, 512, normalization=norm_name, activation="swiglu", **CUDA)
        plain = norm(256, eps=1e-5, device="cuda", dtype=torch.bfloat16)
        x = torch.randn(64, 256, device="cuda").bfloat16().requires_grad_()
        dy = torch.randn_like(x)
        gate, up = F.linear(plain(x), mlp.fc1.weight, mlp.fc1.bias).chunk(2, -1)
        y = F.linear(F.silu(gate) * up, mlp.fc2.weight, mlp.fc2.bias)
        norms = list(plain.parameters())
        linears = [*mlp.fc1.parameters(), *mlp.fc2.parameters()]
        norm_parameters = [p for p in (mlp.layer_norm_weight, mlp.layer_norm_bias) if p is not None]
        output = mlp(x)
        same([output], [y])
        same(
            list(torch.autograd.grad(output, [x, *norm_parameters, *linears], dy)),
            list(torch.autograd.grad(y, [x, *norms, *linears], dy)),
        )


@pytest.mark.parametrize("name", recipes.names())
def test_a_pipeline_gives_the_bits_of_its_ops(name) -> None:
    outputs = [
        ops.Linear(256, 512, name="a", **CUDA),
        ops.SwiGLU(),
        ops.Linear(256, 128, **CUDA),
    ]
    whole, parts = ops.Sequential(*outputs), nn.Sequential(*copy.deepcopy(outputs))
    x = torch.randn(96, 256, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(96, 128, device="cuda").bfloat16()
    results = []
    for module in (whole, parts):
        with duotone.autocast(recipe=recipes.load(name)):
            y = module(x)
        results.append([y, *torch.autograd.grad(y, [x, *module.parameters()], dy)])
    same(*results)


@pytest.mark.parametrize("name", [name for name in recipes.names() if "row-scaled" not in name])  # asks for the type
def test_grouped_gives_the_bits_of_linears(name, monkeypatch) -> None:
    """Where each expert has a product of its own, as with large weights."""
    monkeypatch.setattr("duotone.linear.grouped.SMALL", 0)
    grouped = duotone.GroupedLinear(3, 256, 128, name="g", **CUDA)
    x = torch.randn(200, 256, device="cuda").bfloat16().requires_grad_()
    dy = torch.randn(200, 128, device="cuda").bfloat16()
    splits = torch.tensor([130, 0, 70])
    grouped.duotone_seed.fill_(5)
    with duotone.autocast(recipe=recipes.load(name)):
        y = grouped(x, splits)
        seeds = grouped.plan_for(x).seeds
        alone, linears = [], [duotone.Linear(256, 128, name="g", **CUDA) for _ in range(3)]
        for i, (one, rows) in enumerate(zip(linears, x.split([130, 0, 70]), strict=True)):
            one.weight, one.bias = grouped.weights[i], grouped.biases[i]
            one.duotone_seed.fill_(5 + i * seeds)
            alone.append(one(rows))
        other = torch.cat(alone)
    leaves = [x, *grouped.parameters()]
    same([y, *torch.autograd.grad(y, leaves, dy)], [other, *torch.autograd.grad(other, leaves, dy)])


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_moe_gives_the_values_of_its_experts(name) -> None:
    moe = duotone.MoE(128, 256, 4, **CUDA)
    x = torch.randn(60, 128, device="cuda").bfloat16()
    with duotone.autocast(recipe=recipes.load(name)):
        y = moe(x)
        weights, index = moe.router(x)
        want = torch.zeros(60, 128, device="cuda")
        for e in range(4):
            token, choice = torch.where(index == e)
            sizes = [len(token) if i == e else 0 for i in range(4)]
            rows = moe.fc2(moe.activation(moe.fc1(x[token], sizes)), sizes)
            want.index_add_(0, token, rows.float() * weights[token, choice, None])
    assert (y - want).norm() <= 2e-2 * want.norm()  # seeds differ, and sums are rounded to bf16


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="one product of all experts is Hopper's",
)
@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-rowwise"])
def test_moe_of_small_experts_does_not_wait_for_its_row_counts(name, monkeypatch) -> None:
    # a first delayed scale makes the host look once
    recipe = recipes.load(name) if name != "fp8-delayed" else recipes.DelayedScaling(first_scale_from_amax=False)
    moe = duotone.MoE(128, 256, 4, recipe=recipe, **CUDA)
    twin = copy.deepcopy(moe)
    x, dy = (torch.randn(60, 128, device="cuda").bfloat16() for _ in range(2))

    def train(module: torch.nn.Module) -> list[torch.Tensor]:
        y = module(x)
        return [y, *torch.autograd.grad(y, [*module.parameters()], dy)]

    monkeypatch.setattr("duotone.linear.grouped.SMALL", 0)
    expected = [train(twin) for _ in range(2)]
    monkeypatch.undo()
    train(moe)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        result = train(moe)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(result, expected[1], strict=True):
        assert a.isfinite().all() and (a - b).norm() <= 2e-2 * b.norm() + 1e-6  # two sums in an order of their own

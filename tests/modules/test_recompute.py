"""torch.utils.checkpoint, both kinds: recomputed forwards take the seeds, scales and recipe of the first one."""

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.formats import get
from duotone.recipes import CustomRecipe, DelayedScaling
from duotone.tensor import History, Quantizer


def stochastic(role):
    """Stochastic input and gradient, both planes, of one module."""
    kind = "" if role is None else role.tensor_type
    fmt = get("nvfp4_sr" if kind in ("input", "grad_output") else "nvfp4")
    return Quantizer(fmt, fmt)


def mixed(role):
    """Delayed input, stochastic gradient."""
    kind = "" if role is None else role.tensor_type
    if kind == "grad_output":
        return Quantizer(get("nvfp4_sr"), get("nvfp4_sr"))
    delayed = get("fp8_e4m3_delayed")
    return Quantizer(delayed, delayed, history=History(amax_history_len=3))


RECIPES = {
    "nvfp4": recipes.load("nvfp4"),
    "fp8-delayed": DelayedScaling(amax_history_len=3),
    "mxfp8": recipes.load("mxfp8"),
    "stochastic input": CustomRecipe(qfactory=stochastic),
    "delayed and stochastic": CustomRecipe(qfactory=mixed, emulate_mixed=True),
}


def train(recipe, kind: str, where: str, frozen: bool = False) -> list[Tensor]:
    """Every output, gradient, seed and scale of three steps; the region encloses the forward, or lies in it."""
    torch.manual_seed(3)
    root = nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)).bfloat16()
    inner = recipe if where == "none" else recipes.load("bf16")
    duotone.convert(root, inner, ())
    root[0].weight.requires_grad_(not frozen)
    inside = (lambda: duotone.autocast(recipe=recipe)) if where == "inside" else nullcontext
    outside = (lambda: duotone.autocast(recipe=recipe)) if where == "outside" else nullcontext

    def body(t: Tensor) -> Tensor:
        with inside():
            return root(t)

    results: list[Tensor] = []
    for _ in range(3):
        leaf = torch.randn(16, 32).bfloat16().requires_grad_()
        with outside():
            y = body(leaf) if kind == "none" else checkpoint(body, leaf, use_reentrant=kind == "reentrant")
        root.zero_grad()
        y.float().square().sum().backward()
        results += [y.detach(), leaf.grad, *[p.grad for p in root.parameters() if p.grad is not None]]
        results += [b.clone() for b in root.buffers()]
    return results


@pytest.mark.parametrize("where", ["none", "outside", "inside"])
@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", RECIPES)
def test_checkpointing_changes_no_bit(name, kind, where) -> None:
    """core 90: outputs, gradients, seeds and states of three steps."""
    expected = train(RECIPES[name], "none", where)
    result = train(RECIPES[name], kind, where)
    assert len(result) == len(expected) and all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("kind", ["reentrant", "non-reentrant"])
@pytest.mark.parametrize("name", ["nvfp4", "stochastic input"])
def test_checkpointing_with_a_frozen_weight_changes_no_bit(name, kind) -> None:
    """core 90, 86."""
    expected = train(RECIPES[name], "none", "outside", frozen=True)
    result = train(RECIPES[name], kind, "outside", frozen=True)
    assert len(result) == len(expected) and all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


@pytest.mark.parametrize("kind", [True, False])
def test_steps_under_a_checkpoint_draw_new_numbers_each_time(kind) -> None:
    """core 16, 90: the seed advances once per forward, not once more in its recompute."""
    m = duotone.convert(nn.Linear(32, 32).bfloat16(), RECIPES["stochastic input"], ())
    leaf = torch.randn(16, 32).bfloat16().requires_grad_()
    before, outputs = m.duotone_seed.clone(), []
    for _ in range(3):
        y = checkpoint(m, leaf, use_reentrant=kind)
        y.sum().backward()
        outputs.append(y.detach())
    assert torch.equal(m.duotone_seed, before + 6)
    assert not torch.equal(outputs[0], outputs[1]) and not torch.equal(outputs[1], outputs[2])


def test_a_quantized_weight_under_a_checkpoint_changes_no_bit() -> None:
    """core 90."""
    results = []
    for kind in (None, True, False):
        torch.manual_seed(3)
        with duotone.quantized_model_init(recipe=RECIPES["fp8-delayed"]):
            m = duotone.Linear(32, 32, name="a", recipe=RECIPES["fp8-delayed"])
        optimizer, out = torch.optim.SGD(m.parameters(), lr=0.1), []
        for _ in range(4):
            leaf = torch.randn(16, 32).requires_grad_()
            y = m(leaf) if kind is None else checkpoint(m, leaf, use_reentrant=kind)
            optimizer.zero_grad()
            y.square().sum().backward()
            optimizer.step()
            out += [y.detach(), leaf.grad, m.weight.dequantize().clone(), *[b.clone() for b in m.buffers()]]
        results.append(out)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("options", [{}, {"return_bias": True, "return_layernorm_output": True}])
@pytest.mark.parametrize("name", RECIPES)
def test_an_mlp_that_recomputes_itself_changes_no_bit_and_keeps_its_input_alone(name, options) -> None:
    """core 90, 6.3: two steps under regions that end before their backward."""

    def steps(recomputes: bool) -> tuple[list[Tensor], int]:
        torch.manual_seed(3)
        module = duotone.LayerNormMLP(32, 64, activation="swiglu", checkpoint=recomputes, name="m", **options)
        results: list[Tensor] = []
        sizes: list[int] = []
        for _ in range(2):
            x = torch.randn(16, 32).requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (sizes.append(t.numel()), t)[1], lambda t: t):
                with duotone.autocast(recipe=RECIPES[name]):
                    layer = module(x)
            outputs = layer if isinstance(layer, tuple) else (layer,)
            outputs[0].square().sum().backward()
            results += [*outputs, x.grad, *(p.grad.clone() for p in module.parameters() if p.grad is not None)]
            results += [b.clone() for b in module.buffers()]
        return results, sum(sizes)

    (plain, whole), (recomputed, less) = steps(False), steps(True)
    assert len(plain) == len(recomputed) and all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))
    assert less < whole


def test_an_mlp_that_recomputes_itself_runs_alone_in_a_sequential() -> None:
    module = duotone.LayerNormMLP(32, 64, checkpoint=True, recipe=RECIPES["mxfp8"])
    assert module.pipeline is None
    x = torch.randn(4, 32)
    assert torch.equal(duotone.ops.Sequential(module, duotone.ops.Identity())(x), module(x))
    with torch.no_grad():
        assert not module(x).requires_grad

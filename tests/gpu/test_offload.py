"""On a CUDA device: activations that wait on the host come back with their bits, and their memory is free meanwhile."""

import contextlib

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
NAMES = ["bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"]
LAYERS, ROWS, WIDTH = 6, 2048, 1024


def model(name: str) -> nn.Module:
    torch.manual_seed(0)
    m = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]).to("cuda", torch.bfloat16)
    return duotone.convert(m, recipes.load(name))


def steps(m: nn.Module, region, call=None) -> list[Tensor]:
    """Outputs and gradients of three steps."""
    results = []
    for number in range(3):
        torch.manual_seed(number)
        x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
        with region():
            y = (call or m)(x)
        gradients = torch.autograd.grad(y.square().sum(), [x, *m.parameters()])
        results += [y.detach(), *gradients]
    return results


@pytest.mark.parametrize("how", ["plain", "compiled", "checkpoint", "quantized"])
@pytest.mark.parametrize("name", NAMES)
def test_steps_have_the_bits_of_those_without_it(name, how) -> None:
    m, other = model(name), model(name)
    calls = [m, other]
    if how == "quantized":
        calls = [duotone.convert_parameters(one, recipes.load(name)) or one for one in (m, other)]
    elif how == "compiled":
        calls = [torch.compile(one) for one in (m, other)]
    elif how == "checkpoint":
        calls = [lambda x, one=one: checkpoint(one, x, use_reentrant=False) for one in (m, other)]
    offloaded = steps(m, lambda: duotone.offload_activations(m, smallest=0), calls[0])
    expected = steps(other, contextlib.nullcontext, calls[1])
    assert all(torch.equal(a, b) for a, b in zip(offloaded, expected, strict=True))


@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_what_is_saved_leaves_the_device(name) -> None:
    """But for the last layer, whose tensors backward reads at once."""
    m, left = model(name), []
    for region in (contextlib.nullcontext, lambda: duotone.offload_activations(m)):
        x = torch.randn(ROWS, WIDTH, device="cuda").bfloat16().requires_grad_()
        m(x).sum().backward()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        with region():
            y = m(x)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        left.append(torch.cuda.memory_allocated() - before)
        y.sum().backward()
    assert left[1] < 0.4 * left[0]


@pytest.mark.parametrize("pinned", [False, True])
def test_what_a_compiled_group_saved_leaves_the_device_with_save_on_cpu(pinned) -> None:
    """It lies in Python behind one number, which is all that hooks for saved tensors see."""
    torch.manual_seed(0)
    m = duotone.GroupedLinear(2, WIDTH, WIDTH, params_dtype=torch.bfloat16, recipe=recipes.load("fp8-block")).cuda()
    compiled, left, gradients = torch.compile(m), [], []
    for region in (contextlib.nullcontext, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pinned)):
        x = torch.randn(ROWS, WIDTH, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).bfloat16()
        for _ in range(2):  # the first call of a compiled function takes memory that stays
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            with region():
                y = compiled(x, [ROWS // 2, ROWS // 2]).square()
            torch.cuda.synchronize()
            after = torch.cuda.memory_allocated()
            grads = torch.autograd.grad(y.sum(), list(m.parameters()))
        left.append(after - before)
        gradients.append(grads)
    assert left[1] < 0.7 * left[0]  # what stays: y, and the output of the group until it is offloaded too
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))

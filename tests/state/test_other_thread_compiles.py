"""What eager code does while another thread compiles: `torch.compiler.is_compiling` is true in every thread then."""

import copy
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes


@pytest.fixture
def compiling() -> Iterator[None]:
    """Another thread is inside of a compilation of a plain torch function."""
    begun, end = threading.Event(), threading.Event()

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., object]:
        begun.set()
        end.wait(120)
        return graph.forward

    def double(x: Tensor) -> Tensor:
        return x + x

    thread = threading.Thread(target=lambda: torch.compile(double, backend=backend)(torch.ones(3)))
    thread.start()
    try:
        assert begun.wait(120)
        if not torch.compiler.is_compiling():
            pytest.skip("this release of torch tells threads apart; install a newer one: pip install --upgrade torch")
        yield
    finally:
        end.set()
        thread.join()


def penalty(module: nn.Module, x: Tensor) -> Tensor:
    """The weight's gradient of a gradient penalty."""
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(module(leaf).tanh().square().sum(), leaf, create_graph=True)
    gradient.square().sum().backward()
    assert isinstance(module.weight.grad, Tensor)
    return module.weight.grad


def test_second_derivatives_are_those_of_torch(compiling) -> None:
    plain = nn.Linear(32, 32)
    layer = duotone.convert(nn.Sequential(copy.deepcopy(plain)), recipes.load("bf16"), rules=())[0]
    x = torch.randn(8, 32)
    assert torch.equal(penalty(layer, x), penalty(plain, x))


def test_a_region_ends_and_new_threads_inherit_it(compiling) -> None:
    layer, x = duotone.Linear(32, 32), torch.randn(8, 32)
    results: list[Tensor] = []
    plain = layer(x)
    with duotone.autocast("mxfp8"):
        quantized = layer(x)
        thread = threading.Thread(target=lambda: results.append(layer(x)))
        thread.start()
        thread.join()
    assert not torch.equal(plain, quantized)
    assert torch.equal(results[0], quantized) and torch.equal(layer(x), plain)


@pytest.mark.parametrize("name", ["mxfp8", "fp8-delayed", "nvfp4"])
def test_a_recompute_has_the_bits_of_its_forward(name, compiling) -> None:
    """NVFP4 once recursed without end here."""
    layer = duotone.Linear(32, 32, recipe=recipes.load(name), name="layer")
    twin, x = copy.deepcopy(layer), torch.randn(32, 32)
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    twin(x).square().sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)

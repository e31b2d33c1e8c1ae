"""A new fused module is a class that builds its children: nothing else has to be written."""

import copy
import pickle
from typing import Any

import pytest
import torch

import duotone
from duotone import ops, recipes
from duotone.modules.fused_module import FusedModule

DTYPE = torch.bfloat16


class NormedGate(FusedModule):
    """RMSNorm, a linear and SwiGLU."""

    def __init__(self, width: int, out: int, **linear: Any) -> None:
        super().__init__()
        self.norm = duotone.RMSNorm(width, params_dtype=DTYPE)
        self.linear = duotone.Linear(width, 2 * out, params_dtype=DTYPE, **linear)
        self.activation = ops.SwiGLU()


def gradients(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.square().sum().backward()
    return [y, leaf.grad, *[p.grad for p in module.parameters()]]


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "fp8-current", "fp8-delayed"])
def test_it_has_the_bits_of_its_children_one_by_one(name) -> None:
    recipe, x = recipes.load(name), torch.randn(32, 64, dtype=DTYPE)
    fused = NormedGate(64, 32, recipe=recipe, name="gate")
    apart = torch.nn.Sequential(*copy.deepcopy(fused).children())
    for one, other in zip(gradients(fused, x), gradients(apart, x), strict=True):
        assert torch.equal(one, other)


def test_its_children_are_found_by_everything_that_looks_for_modules() -> None:
    fused = NormedGate(64, 32, recipe=recipes.load("mxfp8"), name="gate", delay_wgrad_compute=True)
    assert list(fused.state_dict()) == ["norm.weight", "linear.weight", "linear.bias"]
    assert "linear.input" in fused.get_quantizer_roles("forward")
    fused(torch.randn(32, 64, dtype=DTYPE)).sum().backward()
    assert fused.linear.weight.grad is None
    fused.backward_dw()
    assert fused.linear.weight.grad is not None
    before = fused.linear.weight.detach().clone()
    fused.reset_parameters()
    assert not torch.equal(before, fused.linear.weight)


def test_it_can_be_copied_pickled_compiled_and_put_into_a_pipeline() -> None:
    fused, x = NormedGate(64, 32, recipe=recipes.load("mxfp8"), name="gate"), torch.randn(32, 64, dtype=DTYPE)
    want = fused(x)
    assert torch.equal(copy.deepcopy(fused)(x), want)
    assert torch.equal(pickle.loads(pickle.dumps(fused))(x), want)
    assert torch.equal(torch.compile(fused, backend="aot_eager", fullgraph=True)(x), want)
    assert fused.pipeline == fused.ops == tuple(fused.children())
    assert torch.equal(ops.Sequential(fused, ops.Identity())(x), want)

"""A compiled TransformerLayer that rounds stochastically has eager's outputs, gradients and seeds."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import recipes
from later import Later

dynamo_testing = Later("torch._dynamo.testing")


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=str)
def test_a_compiled_layer_under_nvfp4_equals_eager(dtype: torch.dtype) -> None:
    """Bit for bit where nothing is fused: both draw one seed for each rounding, in the order of eager.

    Under inductor the sums of norms and softmax differ in their last bits, and four-bit codes flip with them: a few
    per cent of a gradient, all of that of the bias of the keys, which is 0 but for rounding.
    """
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": dtype, "attn_input_format": "bshd"}
    eager = duotone.TransformerLayer(32, 48, 2, recipe=recipes.load("nvfp4"), name="layer", **options)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x, dy = torch.randn(2, 16, 32).to(dtype), torch.randn(2, 16, 32).to(dtype)
        outcomes = []
        for call, m in ((run, compiled), (eager, eager)):
            m.zero_grad()
            leaf = x.clone().requires_grad_()
            y = call(leaf)
            y.backward(dy)
            outcomes.append(
                [y, leaf.grad, *(p.grad.clone() for p in m.parameters()), *(b.clone() for b in m.buffers())]
            )
        assert all(torch.equal(a, b) for a, b in zip(*outcomes, strict=True))


@pytest.mark.parametrize("name", ["mxfp8", pytest.param("fp8-delayed", marks=pytest.mark.slow)])
def test_equal_layers_share_a_graph_for_each_flag(name: str) -> None:
    """Layers that met a recipe before, and layers that never did: all of them are asked when the first is traced."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "params_dtype": torch.bfloat16}
    layers = [duotone.TransformerLayer(32, 48, 2, **options) for _ in range(3)]
    x, recipe = torch.randn(8, 2, 32).bfloat16(), recipes.load(name)
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    with duotone.autocast(recipe=recipe):
        layers[2](x)
        eager = copy.deepcopy(layers)
        for layer in layers:
            layer.compile(backend=counter, fullgraph=True)
        for first in (True, False):
            for compiled, plain in zip(layers, eager, strict=True):
                results = []
                for m in (compiled, plain):
                    m.zero_grad()
                    y = m(x, is_first_microbatch=first)
                    y.sum().backward()
                    results.append([y, *[p.grad for p in m.parameters()]])
                assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert counter.frame_count == 2


@pytest.mark.parametrize("scaling", [duotone.Float8CurrentScaling, duotone.DelayedScaling])
def test_more_layers_than_dynamo_compiles_share_a_graph_of_attention_in_low_precision(
    scaling: Callable[..., recipes.Recipe],
) -> None:
    """Dynamo gives up after 8 graphs of one function. Another model under another recipe compiles once beside it."""
    options = {
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "fuse_qkv_params": True,
        "qkv_weight_interleaved": False,
    }
    low = scaling(fp8_dpa=True, fp8_mha=True)
    plain = duotone.Float8CurrentScaling()
    models = [nn.Sequential(*(duotone.TransformerLayer(16, 16, 1, **options) for _ in range(n))) for n in (9, 2)]
    x = torch.randn(4, 1, 16, requires_grad=True)
    eager = copy.deepcopy(models)
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    for layer in (*models[0], *models[1]):
        layer.compile(backend=counter, fullgraph=True)
    for _ in range(2):
        for m, same, recipe in zip(models, eager, (low, plain), strict=True):
            results = []
            for model in (m, same):
                model.zero_grad()
                with duotone.autocast(recipe=recipe):
                    y = model(x)
                y.square().sum().backward()
                results.append([y, *(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())])
            assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert counter.frame_count == 2
    roles = {layer.self_attention.layernorm_qkv.output_quantizer_role for layer in models[0]}
    assert len(roles) == 9 and None not in roles


class Attend(nn.Module):
    """Attention beside a residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.core = duotone.DotProductAttention(1, 8, recipe=duotone.DelayedScaling(fp8_dpa=True, amax_history_len=2))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core(x, x + 1, x / 8).view_as(x)


class Loop(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Attend() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", ["one by one", "loop over compiled", pytest.param("whole", marks=pytest.mark.slow)])
def test_forty_cores_under_delayed_scaling_compile_once(kind: str) -> None:
    """Each core has its own scales and histories, which roll as in eager code."""
    m = Loop(40)
    eager = copy.deepcopy(m)
    counter = dynamo_testing.CompileCounterWithBackend("eager")
    for i, block in enumerate(m.blocks):
        if kind == "one by one":
            block.compile(backend=counter, fullgraph=True)
        elif kind == "loop over compiled":
            m.blocks[i] = torch.compile(block, backend=counter, fullgraph=True)
    if kind == "whole":
        m.compile(backend=counter, fullgraph=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for _ in range(2):
            x, results = torch.randn(4, 1, 1, 8), []
            for model in (m, eager):
                leaf = x.clone().requires_grad_()
                y = model(leaf)
                y.square().sum().backward()
                results.append([y, leaf.grad, *(b.clone() for b in model.buffers())])
            assert len(results[0]) == 2 + 40 * 6
            assert all(torch.equal(*both) for both in zip(*results, strict=True))
    assert counter.frame_count == 1

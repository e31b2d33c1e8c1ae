"""torch.compile(fullgraph=True) of attention equals eager bit for bit, whoever asks for what."""

import copy
import dataclasses
import gc
from collections.abc import Iterator
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.attention import DotProductAttention, MultiheadAttention, RotaryPositionEmbedding, TransformerLayer
from duotone.attention.picks import Pick
from duotone.dispatch.attention import LeastTokens
from duotone.numbered import constant_in_traces
from duotone.recipes import Rule, RuleRecipe
from later import Later

dynamo_testing = Later("torch._dynamo.testing")


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield


def step(run, module: nn.Module, *inputs: Tensor, **options) -> list[Tensor]:
    module.zero_grad()
    leaves = [x.clone().requires_grad_() for x in inputs]
    y = run(*leaves, **options)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(x.grad for x in leaves), *(p.grad.clone() for p in module.parameters())]


def compare(eager: nn.Module, *inputs: Tensor, **options) -> None:
    compiled = copy.deepcopy(eager)
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(compiled, fullgraph=True, backend=counter)
    for _ in range(2):
        for result, expected in zip(
            step(run, compiled, *inputs, **options), step(eager, eager, *inputs, **options), strict=True
        ):
            assert torch.equal(result, expected)
    assert counter.frame_count == 1


@pytest.mark.parametrize(("kind", "lengths"), [("causal", False), ("padding_causal", True)])
def test_dot_product_attention_compiles_to_the_bits_of_eager(kind, lengths) -> None:
    core = DotProductAttention(4, 8, num_gqa_groups=2, attn_mask_type=kind, window_size=(2, 0), qkv_format="bshd")
    options = {"cu_seqlens_q": torch.tensor([0, 3, 8])} if lengths else {}
    compare(core, torch.randn(2, 6, 4, 8), torch.randn(2, 6, 2, 8), torch.randn(2, 6, 2, 8), **options)


@pytest.mark.parametrize(("name", "norm"), [("mxfp8", "RMSNorm"), ("fp8-delayed", None)])
def test_multihead_attention_compiles_to_the_bits_of_eager(name, norm) -> None:
    options = {"input_layernorm": norm is not None, "qk_norm_type": norm, "recipe": recipes.load(name)}
    module = MultiheadAttention(32, 4, attention_dropout=0.0, fuse_qkv_params=True, name="a", **options)
    compare(module, torch.randn(5, 2, 32), rotary_pos_emb=RotaryPositionEmbedding(8)(5))


def test_packed_multihead_attention_compiles_to_the_bits_of_eager() -> None:
    options = {"attn_mask_type": "padding_causal", "qkv_format": "thd", "attention_dropout": 0.0}
    module = MultiheadAttention(32, 4, fuse_qkv_params=True, **options)
    cu = torch.tensor([0, 3, 7])
    compare(module, torch.randn(7, 32), rotary_pos_emb=RotaryPositionEmbedding(8)(7), cu_seqlens_q=cu)


def test_fp8_attention_compiles_where_a_default_device_is_set() -> None:
    """Dynamo then refuses methods of tensors that are written in Python."""
    low = dataclasses.replace(recipes.load("fp8-current"), fp8_dpa=True, dpa_min_tokens=0)
    with torch.device("cpu"):
        compare(MultiheadAttention(32, 2, attention_dropout=0.0, recipe=low), torch.randn(5, 2, 32))


def test_a_whole_layer_compiles_to_the_bits_of_eager() -> None:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True}
    compare(TransformerLayer(32, 48, 4, activation="swiglu", **options), torch.randn(5, 2, 32))


class Nested(nn.Module):
    """Attention in a region, and more in a region inside of that: the same module, or another one."""

    def __init__(self, outer: recipes.Recipe, inner: recipes.Recipe, same: bool) -> None:
        super().__init__()
        options = {"attention_dropout": 0.0, "fuse_qkv_params": True}
        self.first, self.second = (MultiheadAttention(32, 4, name=name, **options) for name in "ab")
        self.outer, self.inner = outer, inner
        self.second = self.first if same else self.second

    def forward(self, x: Tensor) -> Tensor:
        with duotone.autocast(recipe=self.outer):
            x = self.first(x)
            with duotone.autocast(recipe=self.inner):
                return self.second(x)


MHA = duotone.Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)


@pytest.mark.parametrize(("inner", "same"), [(recipes.load("fp8-current"), True), (MHA, False)], ids=["same", "mha"])
def test_regions_that_nest_in_a_graph(inner, same) -> None:
    compare(Nested(recipes.load("mxfp8"), inner, same), torch.randn(5, 2, 32))


def test_boundaries_are_told_in_compiled_code_too() -> None:
    module = MultiheadAttention(32, 4, attention_dropout=0.0, fuse_qkv_params=True, name="a")
    run, x = torch.compile(module, fullgraph=True, backend="aot_eager"), torch.randn(5, 2, 32)
    expected = run(x)
    assert module.qkv.output_quantizer_role is None
    with duotone.autocast(recipe=RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),))):
        out = run(x)
        assert torch.equal(out, module(x)) and not torch.equal(out, expected)
    assert module.qkv.output_quantizer_role == duotone.QuantizerRole("dpa", "qkv", "a.core_attention")


def test_compiled_code_takes_what_was_measured(monkeypatch) -> None:
    """Where measurements decide, a trace compares the call with them."""
    monkeypatch.setattr(DotProductAttention, "pick", lambda self, *where: Pick(True, LeastTokens(4, 8, 4, 4)))
    core = DotProductAttention(32, 8, qkv_format="bshd", name="a", recipe=duotone.Float8CurrentScaling(fp8_dpa=True))
    heads = [torch.randn(1, 6, 32, 8).bfloat16() for _ in range(3)]
    compare(core, *heads)
    with torch.no_grad():
        low = torch.compile(core, fullgraph=True, backend="aot_eager")(*heads)
        assert torch.equal(low, core(*heads))
    assert not torch.equal(low, DotProductAttention(32, 8, qkv_format="bshd")(*heads))


def test_a_dynamic_graph_serves_all_lengths_and_guards_the_dropout() -> None:
    """A dynamic trace has variables for floats of modules, and a stage is built for one dropout."""
    core = DotProductAttention(2, 8, qkv_format="bshd", name="a", recipe=duotone.Float8CurrentScaling(fp8_dpa=True))
    counter = dynamo_testing.CompileCounterWithBackend("aot_eager")
    run = torch.compile(core, fullgraph=True, dynamic=True, backend=counter)
    with torch.no_grad():
        counts = set()
        for tokens in (6, 9, 12):
            heads = [torch.randn(1, tokens, 2, 8) for _ in range(3)]
            assert torch.equal(run(*heads), core(*heads))
            counts.add(counter.frame_count)
        assert len(counts) == 1
        core.attention_dropout = 1 - 2**-16
        assert run(*heads).eq(0).float().mean() > 0.9


SHARED = {
    "all": lambda x, z: (x, x, x),
    "query and key": lambda x, z: (x, x, z),
    "key and value": lambda x, z: (z, x, x),
    "parts": lambda x, z: torch.cat((x, z, x), dim=2).split(x.shape[2], dim=2),
}


@pytest.mark.parametrize("kind", SHARED)
def test_query_key_and_value_may_share_a_tensor(kind: str) -> None:
    """Dynamo takes no tensor twice. Gradients of one tensor are added in eager's order, beside another one's."""

    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = DotProductAttention(2, 32, qkv_format="bshd", recipe=duotone.Float8CurrentScaling(fp8_dpa=True))

        def forward(self, x: Tensor, z: Tensor) -> Tensor:
            return self.core(*SHARED[kind](x, z)) + (x * z).flatten(2)

    compare(Shares(), torch.randn(2, 16, 2, 32).bfloat16(), torch.randn(2, 16, 2, 32).bfloat16())


KEPT = {
    "output": RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),)),
    "query and key": duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0, backward_override="high_precision"),
    "codes": duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0, backward_override="dequantized"),
    "delayed": duotone.DelayedScaling(fp8_dpa=True, dpa_min_tokens=0),
}


@pytest.mark.parametrize("layout", ["sbhd", "bshd"])
@pytest.mark.parametrize("kept", KEPT)
def test_what_backward_keeps_of_heads_in_any_memory_order(kept: str, layout: str) -> None:
    """Planes in high precision are the memory of heads or of the output, whose strides differ from call to call."""
    core = DotProductAttention(2, 32, qkv_format=layout, recipe=KEPT[kept], name="a")

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def forward(self, x: Tensor) -> Tensor:
            packed, apart = x.unflatten(2, (3, 2)).unbind(2), x.mT.contiguous().mT.split(2, 2)
            return self.core(*packed) * self.core(*apart)

    compare(Twice(), torch.randn(16, 16, 6, 32).bfloat16())


def test_backward_follows_after_the_model_is_gone() -> None:
    core = DotProductAttention(2, 32, qkv_format="bshd", recipe=duotone.Float8CurrentScaling(fp8_dpa=True))
    x = torch.randn(1, 16, 2, 32).bfloat16().requires_grad_()
    loss = core(x, x, x).float().square().sum()
    (expected,) = torch.autograd.grad(loss, x)
    loss = torch.compile(core, fullgraph=True, backend="aot_eager")(x, x, x).float().square().sum()
    del core
    gc.collect()
    assert torch.equal(torch.autograd.grad(loss, x)[0], expected)


def test_a_checkpoint_and_calls_without_gradients_record_delayed_scales_as_eager_code_does() -> None:
    """The scale of the saved output serves the backward alone. Inputs without gradients are measured, too."""
    recipe = duotone.DelayedScaling(fp8_dpa=True)
    eager = DotProductAttention(2, 32, qkv_format="bshd", recipe=recipe, name="a")
    compiled = copy.deepcopy(eager)

    def train(core: nn.Module, how) -> list[Tensor]:
        run = how(lambda x: checkpoint(lambda t: core(t, t * 2, t), x, use_reentrant=False))
        inputs = torch.randn(4, 2, 16, 2, 32, generator=torch.Generator().manual_seed(1)).bfloat16()
        leaves = [x.requires_grad_() for x in inputs[:3].unbind()]
        how(core)(*inputs[3:].expand(3, -1, -1, -1, -1).unbind())
        for x in leaves:
            run(x).float().square().sum().backward()
        return [*[x.grad for x in leaves], *core.buffers()]

    result, expected = (
        train(compiled, partial(torch.compile, backend="aot_eager", fullgraph=True)),
        train(eager, lambda f: f),
    )
    assert all(map(torch.equal, result, expected))


def test_a_frame_below_the_module_compiles_where_its_numbers_are_variables() -> None:
    """Dynamo gives up a frame that raised an error, and compiles those that it calls."""
    recipe = duotone.Float8CurrentScaling(fp8_dpa=True)
    core = DotProductAttention(4, 16, attn_mask_type="padding", qkv_format="bshd", recipe=recipe)
    heads = [torch.randn(1, 9, 4, 16) for _ in range(3)]
    expected = core(*heads, torch.zeros(1, 9, dtype=torch.bool))
    core.share(recipe)
    low = core._low_precision
    run = torch.compile(type(low).run, fullgraph=True, backend="aot_eager", dynamic=True)
    for window in ((5, 3), (20, 30), (9, 10)):
        seen = torch.ones(1, 1, 9, 9, dtype=torch.bool)
        assert torch.equal(run(low, tuple(heads), "bshd", seen, window, recipe, "", None), expected)


@constant_in_traces
def one_if_compiled(x: Tensor) -> Tensor:
    return x * 0 + torch.compiler.is_dynamo_compiling()


def test_what_a_trace_takes_as_constant_is_no_frame_of_its_own_behind_a_broken_graph() -> None:
    """A trace of it would write its own versions of the objects that it changes, which graphs name."""
    assert not torch.compile(lambda x: one_if_compiled(x) * 2, backend="eager")(torch.ones(2)).any()

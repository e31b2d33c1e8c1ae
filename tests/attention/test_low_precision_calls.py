"""How calls of attention in low precision behave: masks of nothing, NaN, dropout, recompute, compile, derivatives."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.attention import DotProductAttention, TransformerLayer
from duotone.attention.conditioning import hadamard
from duotone.dispatch import attention
from duotone.dispatch.attention import AttentionProblem
from duotone.errors import RecipeError, UserError
from duotone.recipes import Rule, RuleRecipe

DPA = recipes.load("nvfp4-linear-fp8-dpa")
MX = RuleRecipe(rules=(Rule(module_type="dpa", format="mxfp8_e4m3"),))
CURRENT = duotone.Float8CurrentScaling(fp8_dpa=True)


def core(recipe, **options) -> DotProductAttention:
    return DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", name="a", recipe=recipe, **options)


def heads(tokens: int = 150, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, tokens, count, 16, generator=generator) for count in (4, 2, 2)]


def step(run, x: list[Tensor], *args, **options) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in x]
    y = run(*leaves, *args, **options)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("recipe", [DPA, MX])
@pytest.mark.parametrize("queries", [0, 8])
def test_no_tokens_give_zeros(recipe, queries) -> None:
    """Planes over tokens have no columns then."""
    leaves = [torch.randn(2, tokens, 4, 64, requires_grad=True) for tokens in (queries, 0, 0)]
    run = DotProductAttention(4, 64, qkv_format="bshd", attn_mask_type="no_mask", recipe=recipe)
    y = run(*leaves)
    y.sum().backward()
    assert y.shape == (2, queries, 256) and not y.any() and not any(t.grad.any() for t in leaves)


@pytest.mark.parametrize("recipe", [DPA, MX])
def test_queries_that_see_no_key_give_zeros_and_no_gradient(recipe) -> None:
    module = core(recipe, attn_mask_type="arbitrary")
    mask = torch.zeros(150, 150, dtype=torch.bool)
    mask[3:7] = True
    out, dq, dk, dv = step(module, heads(), mask)
    assert torch.equal(out[:, 3:7], torch.zeros_like(out[:, 3:7])) and torch.equal(dq[:, 3:7], 0 * dq[:, 3:7])
    assert all(torch.isfinite(t).all() for t in (out, dq, dk, dv))
    for t in step(module, heads(), torch.ones_like(mask)):
        assert torch.equal(t, torch.zeros_like(t))


def test_nan_in_a_head_stays_there_unless_heads_share_a_scale() -> None:
    """MXFP8 scales 32 elements of one head. FP8 with a scale per tensor marks codes, and no scale becomes NaN."""
    x = heads()
    x[0][0, 5, 1, 3] = torch.nan
    for recipe in (MX, CURRENT):
        clean, out = core(recipe)(*heads()).unflatten(-1, (4, 16)), core(recipe)(*x).unflatten(-1, (4, 16))
        assert out[0, 5, 1].isnan().all()
        others = torch.ones(2, 150, 4, dtype=torch.bool)
        others[0, 5, 1] = False
        assert torch.isfinite(out[others]).all()
        if recipe is MX:
            assert torch.equal(out[others], clean[others])


@pytest.mark.parametrize(
    ("name", "value", "heads_reached"),
    [
        *[(name, torch.nan, 1) for name in ("fp8_e4m3_tensor", "fp8_e4m3_delayed", "fp8_e4m3_row", "mxfp8_e4m3")],
        *[(name, torch.inf, 1) for name in ("fp8_e4m3_delayed", "fp8_e4m3_row", "mxfp8_e4m3")],
        *[("fp8_e4m3_tensor", torch.inf, 4), ("nvfp4", torch.nan, 4), ("nvfp4", torch.inf, 4)],
    ],
)
def test_docs_say_which_heads_a_value_that_is_not_finite_reaches(name, value, heads_reached) -> None:
    x = heads(10)
    x[0][0, 5, 1, 3] = value
    out = core(RuleRecipe(rules=(Rule(module_type="dpa", format=name),)))(*x).unflatten(-1, (4, 16))
    assert (~out.isfinite()).any(-1).any(1).any(0).sum() == heads_reached


def test_a_sink_does_not_flush_the_probabilities_of_other_tokens() -> None:
    """Blocks go from the last keys to the first. The other way round, e^-14 would be below E4M3's 2^-17."""
    q, k, v = (torch.zeros(1, 256, 1, 16) for _ in range(3))
    q[..., 0], k[:, 0, :, 0] = 1.0, 14.0 * 4
    v[:, 128:] = torch.randn(128, 1, 16, generator=torch.Generator().manual_seed(0)) + 3
    module = DotProductAttention(1, 16, attn_mask_type="no_mask", qkv_format="bshd", recipe=CURRENT)
    exact = torch.nn.functional.scaled_dot_product_attention(*(t.transpose(1, 2).double() for t in (q, k, v)))
    out = module(q, k, v).view(1, 1, 256, 16)
    assert ((out - exact).norm() / exact.norm()) < 0.05


def test_dropout_keeps_the_mean_and_backward_drops_what_forward_dropped() -> None:
    recipe = RuleRecipe(rules=(Rule(module_type="dpa", tensor_type="dp", format="fp8_e5m2_tensor"),))
    module = core(recipe, attention_dropout=0.25, attn_mask_type="no_mask")
    q, k, v = heads(400)
    torch.manual_seed(0)
    out, _, _, dv = step(module, [q, k, v])
    # The output is linear in v, so <out, 1> is <v, dv> if both used one mask.
    assert torch.allclose(out.sum(), (v * dv).sum(), rtol=1e-4)
    mean = module(q, k, torch.ones_like(v)).mean()
    assert abs(mean - 1) < 0.01
    assert torch.equal(module.eval()(q, k, v), core(recipe, attn_mask_type="no_mask")(q, k, v))


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_recompute_repeats_dropout_and_delayed_scales(reentrant) -> None:
    results = []
    for again in (False, True):
        module = core(duotone.DelayedScaling(fp8_dpa=True), attention_dropout=0.2)
        torch.manual_seed(3)
        for seed in range(2):
            run = partial(checkpoint, module, use_reentrant=reentrant) if again else module
            results.append(step(run, heads(seed=seed)))
        results.append([buffer.clone() for buffer in module.buffers()])
    for first, second in zip(results[:3], results[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_delayed_scales_come_from_the_step_before_and_go_into_checkpoints() -> None:
    module = core(DPA)
    step(module, heads())
    assert module.duotone_forward.scale[6] == 448  # the largest probability is 1
    dp = module.duotone_backward.scale[2].item()
    other = core(DPA)
    other.load_state_dict(module.state_dict())
    first, second = (step(each, heads(seed=1)) for each in (module, other))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert module.duotone_backward.scale[2].item() != dp
    copied = copy.deepcopy(module)
    assert torch.equal(copied.duotone_backward.scale, module.duotone_backward.scale)
    step(copied, heads(seed=2))
    assert not torch.equal(copied.duotone_backward.scale, module.duotone_backward.scale)


def test_a_first_step_without_tokens_starts_no_scale() -> None:
    module, other = core(DPA), core(DPA)
    for tokens, batch in ((0, 2), (3, 0)):
        empty = [x[:batch] for x in heads(tokens)]
        assert [t.shape for t in step(module, empty)[1:]] == [t.shape for t in empty]
    for first, second in zip(step(module, heads(20)), step(other, heads(20)), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize(
    ("recipe", "dropout"), [(DPA, 0.0), (CURRENT, 0.3), (duotone.DelayedScaling(fp8_dpa=True), 0.0)]
)
def test_a_compiled_call_has_the_bits_of_an_eager_one(recipe, dropout) -> None:
    eager = core(recipe, attention_dropout=dropout)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for seed in range(2):
        torch.manual_seed(seed)
        results = step(run, heads(seed=seed))
        torch.manual_seed(seed)
        expected = step(eager, heads(seed=seed))
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(eager.buffers(), compiled.buffers(), strict=True))


def test_what_cannot_be_differentiated_again_says_so_in_one_line() -> None:
    module, x = core(CURRENT), [t.requires_grad_() for t in heads()]
    (gradient,) = torch.autograd.grad(module(*x).sum(), x[0], create_graph=True)
    with pytest.raises(UserError, match="a: the operands of attention are quantized, so it has no second") as error:
        gradient.sum().backward()
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"none of torch\.func"):
        torch.func.grad(lambda q: module(q, x[1], x[2]).sum())(x[0])


@pytest.mark.parametrize("override", ["high_precision", "dequantized"])
def test_a_backward_override_changes_gradients_alone(override) -> None:
    recipe = duotone.Float8CurrentScaling(fp8_dpa=True, backward_override=override)
    rows = {row.gemm: (row.a, row.b) for row in core(recipe).plan_rows(recipe, "cpu")}
    codes, plain = "fp8_e4m3_tensor", "identity"
    gradient = codes if override == "dequantized" else plain
    assert rows["QK^T again"] == (codes, codes) and rows["dO V^T"] == (plain, gradient)
    assert rows["dS K"] == (plain, gradient) and rows["P^T dO"] == (plain, plain)
    overridden, default = step(core(recipe), heads()), step(core(CURRENT), heads())
    assert torch.equal(overridden[0], default[0]) and not torch.equal(overridden[3], default[3])


def test_a_quantizer_that_encodes_by_itself_is_refused_in_one_line() -> None:
    class SelfEncoding(duotone.Quantizer):
        def encode(self, x, usage, ctx):
            raise AssertionError

    recipe = duotone.CustomRecipe(
        qfactory=lambda role: SelfEncoding() if role and role.module_type == "dpa" else duotone.Quantizer(),
        fp8_dpa=True,
    )
    with pytest.raises(
        RecipeError, match=r"attention takes a duotone\.Quantizer for qkv, whose formats it reads; got SelfEncoding"
    ):
        core(recipe)(*heads())


def test_a_layer_trains_under_the_recipe_file_as_written() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0, name="l", recipe=DPA)
    optimizer = torch.optim.SGD(layer.parameters(), 0.5)
    x, target = torch.randn(64, 2, 64), torch.randn(64, 2, 64)
    losses = []
    for _ in range(6):
        loss = nn.functional.mse_loss(layer(x), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.05
    rows = {(row.gemm, row.runs) for row in duotone.plan(layer).filter("self_attention.core_attention")}
    assert ("QK^T", "emulated") in rows and len(rows) == 7


@pytest.mark.parametrize("field", ["dpa_center_keys", "dpa_rotate"])
def test_centered_keys_and_rotated_heads_lose_less_and_change_nothing_else(field) -> None:
    """Keys with a large mean, and an outlier in one channel of query and key."""
    q, k, v = (torch.cat([x] * 4, -1) for x in heads())
    if field == "dpa_center_keys":
        k = k + 6
    else:
        q, k = (torch.cat((8 * x[..., :2], x[..., 2:]), -1) for x in (q, k))
    shape = {"num_gqa_groups": 2, "qkv_format": "bshd", "name": "a"}
    exact = DotProductAttention(4, 64, **shape)
    plain = step(exact, [q, k, v])
    errors = []
    for on in (False, True):
        recipe = duotone.Float8CurrentScaling(fp8_dpa=True, **{field: on})
        results = step(DotProductAttention(4, 64, recipe=recipe, **shape), [q, k, v])
        errors.append([((a - b).norm() / b.norm()).item() for a, b in zip(results, plain, strict=True)])
    assert all(errors[1][i] < 0.75 * errors[0][i] for i in (0, 1))
    gradient_alone = Rule(module_type="dpa", tensor_type="dp", format="fp8_e5m2_tensor")
    changed = DotProductAttention(4, 64, recipe=RuleRecipe(rules=(gradient_alone,), **{field: True}), **shape)
    assert torch.allclose(changed(q, k, v), plain[0], atol=1e-4)
    assert torch.allclose(hadamard(96, q.device) @ hadamard(96, q.device).T, torch.eye(32), atol=1e-6)


@pytest.mark.parametrize("fast_backward", [False, True])
def test_saved_activations_are_less_than_six_tenths_of_those_of_bf16(fast_backward, monkeypatch) -> None:
    """Issue 21. A GPU keeps the value in both directions."""
    if fast_backward:
        monkeypatch.setattr(AttentionProblem, "forward_refusal", lambda problem: "")
        monkeypatch.setattr(attention, "forward", lambda planes, sizes, *_: fused(planes, sizes))
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        saved[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    def fused(planes, sizes) -> tuple[Tensor, Tensor]:
        batch, groups, heads, queries, _, width = sizes
        lse = torch.zeros(batch, groups * heads, queries)
        return torch.zeros(batch, queries, groups * heads, width, dtype=torch.bfloat16), lse

    totals = []
    for recipe in (CURRENT, recipes.load("bf16")):
        module = DotProductAttention(8, 64, num_gqa_groups=2, qkv_format="bshd", name="a", recipe=recipe)
        x = [torch.randn(1, 512, count, 64).bfloat16().requires_grad_() for count in (8, 2, 2)]
        saved.clear()
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module(*x)
        totals.append(sum(saved.values()))
    assert totals[0] < 0.6 * totals[1]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
def test_a_scale_that_is_set_later_holds_from_the_next_call_on(is_compiled: bool) -> None:
    module, expected = core(CURRENT), core(CURRENT, softmax_scale=0.5)
    run = torch.compile(module, backend="aot_eager", fullgraph=True) if is_compiled else module
    assert not torch.equal(step(run, heads())[0], step(expected, heads())[0])
    module.softmax_scale = 0.5
    assert all(map(torch.equal, step(run, heads()), step(expected, heads())))


def test_docs_say_that_nan_in_values_reaches_queries_that_do_not_see_it() -> None:
    q, k, v = heads(200)
    v[0, 100, 0, 0] = float("nan")
    reached = core(CURRENT)(q, k, v).unflatten(-1, (4, 16)).isnan().any(-1)
    assert reached[0, 100:, :2].all() and reached[0, :100, :2].any(), "two heads share the first values"
    assert not reached[0, :, 2:].any() and not reached[1].any()


def test_docs_say_that_values_in_padding_enter_the_scale_of_the_tensor() -> None:
    """If this fails, attention has learned to leave padding out: then the page is wrong."""
    q, k, v = heads(200)
    padding = torch.arange(200).expand(2, -1) >= 150
    options = {"attn_mask_type": "padding"}
    exact = DotProductAttention(4, 16, num_gqa_groups=2, qkv_format="bshd", **options)
    k[:, 150:], v[:, 150:] = 1e5, 1e5

    def error(module: DotProductAttention) -> float:
        out, want = (m(q, k, v, attention_mask=padding)[:, :150] for m in (module, exact))
        return float((out - want).norm() / want.norm())

    assert error(core(CURRENT, **options)) > 0.1
    k[:, 150:], v[:, 150:] = 0.0, 0.0
    assert error(core(CURRENT, **options)) < 0.06

"""Kernels of attention: which calls run them, and in which layouts they get codes. Their bits: tests/kernels."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import duotone
from duotone.attention import DotProductAttention, picks
from duotone.attention.masks import seen_by
from duotone.dispatch import attention
from duotone.dispatch.attention import CUDNN_TOKENS, AttentionProblem
from duotone.dispatch.target import Target
from duotone.errors import RecipeError
from duotone.recipes import Recipe, Rule, RuleRecipe

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")

CURRENT = duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)
MEASURED = duotone.Float8CurrentScaling(fp8_dpa=True)
FILE = duotone.recipes.load("nvfp4-linear-fp8-dpa")
ALL_FP8 = RuleRecipe(
    rules=(
        Rule(module_type="dpa", tensor_type="dp", format="fp8_e5m2_tensor"),
        Rule(module_type="dpa", format="fp8_e4m3_tensor"),
    )
)
FORWARD_ALONE = duotone.Float8CurrentScaling(fp8_dpa=True, backward_override="dequantized", dpa_min_tokens=0)


def triangle(shape: torch.Size, causal: bool, spans: Tensor | None, mask: Tensor | None) -> Tensor:
    """Bool, True where a query sees a key."""
    queries, keys = shape[-2:]
    if spans is not None:
        seen = seen_by(spans[:, :2], slice(0, queries), slice(0, keys))
        if mask is None:
            return seen
        unread = seen_by(spans[:, 2:], slice(0, queries), slice(0, keys))
        return seen & (mask | unread)
    everything = torch.ones(queries, keys, dtype=torch.bool)
    return everything.tril() if causal else everything


def decoded_attention(codes, scales, p_scale, options, spans=None, mask=None) -> tuple[Tensor, Tensor]:
    """What `kernels.attention.attend` computes, without rounding probabilities."""
    scale, causal, _, dtype = options
    q, k, v = (x.float() * s for x, s in zip(codes, scales, strict=True))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.permute(2, 0, 3, 1)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    scores = scores.masked_fill(~triangle(scores.shape, causal, spans, mask), -torch.inf)
    out = (scores.softmax(-1).nan_to_num(0) @ v).transpose(1, 2).contiguous().to(dtype)
    return out, scores.logsumexp(-1).nan_to_num(neginf=0)


def decoded_backward(x, weights, lse, options, spans=None, mask=None, tiles=None) -> tuple[Tensor, ...]:
    """What `kernels.attention_backward.differentiate` computes, without rounding P and dS."""
    scale, causal, _, dtype = options

    def heads(name: str) -> Tensor:
        codes, factor = getattr(x, name)
        values = codes.float() * (1 if factor is None else factor)
        turned = codes.dtype in attention.FP8 and name.endswith("_col")
        values = values.permute(2, 0, 3, 1) if turned else values.transpose(1, 2)
        return values.repeat_interleave(lse.shape[1] // values.shape[1], 1)

    p = (heads("q_row") @ heads("k_row").mT * scale - lse[..., None]).exp()
    p = p * triangle(p.shape, causal, spans, mask)
    delta = (heads("do_row") * heads("out")).sum(-1, keepdim=True)
    ds = p * (heads("do_row") @ heads("v_row").mT - delta)
    groups = x.k_row.values.shape[2]
    dk, dv = (
        each.unflatten(1, (groups, -1)).sum(2) for each in (ds.mT @ heads("q_col") * scale, p.mT @ heads("do_col"))
    )
    gradients = (each.transpose(1, 2).to(dtype) for each in (ds @ heads("k_col") * scale, dk, dv))
    return *gradients, ds.abs().amax()


@pytest.fixture
def kernel(monkeypatch) -> list[str]:
    """A CPU that counts as a GPU with the kernel; the calls of it."""
    calls = []

    def attend(*arguments) -> tuple[Tensor, Tensor]:
        calls.append("attend")
        return decoded_attention(*arguments)

    def differentiate(*arguments) -> tuple[Tensor, ...]:
        calls.append("differentiate")
        return decoded_backward(*arguments)

    from duotone.kernels import attention as kernels
    from duotone.kernels import attention_backward

    monkeypatch.setattr(kernels, "attend", attend)
    monkeypatch.setattr(attention_backward, "differentiate", differentiate)
    for ability in ("runs_kernels", "has_large_blocks"):
        monkeypatch.setattr(Target, ability, property(lambda self: True))
    return calls


@pytest.mark.parametrize(("layout", "width"), [("bshd", 64), ("sbhd", 64), ("bshd", 96)])
@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, duotone.DelayedScaling(fp8_dpa=True), FILE, ALL_FP8])
def test_the_kernel_gets_the_codes_that_blocks_of_keys_multiply(kernel, monkeypatch, layout, width, recipe) -> None:
    """Heads of other widths have zeros at their end."""
    sizes = (2, 40) if layout == "bshd" else (40, 2)
    x = [torch.randn(*sizes, heads, width) for heads in (4, 2, 2)]
    options = {"num_gqa_groups": 2, "qkv_format": layout, "name": "a", "recipe": recipe}
    results = []
    for refusal in (AttentionProblem.forward_refusal, lambda self: "blocks of keys"):
        monkeypatch.setattr(AttentionProblem, "forward_refusal", refusal)
        core = DotProductAttention(4, width, **options)
        leaves = [t.clone().requires_grad_() for t in x]
        y = core(*leaves)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(t.grad for t in leaves)])
    # The first step of a delayed scale of dS measures its amax.
    backward = [] if recipe is FORWARD_ALONE else ["differentiate"] * (2 if recipe is FILE else 1)
    assert kernel == ["attend", *backward]
    for fused, blocks in zip(*results, strict=True):
        assert (fused - blocks).norm() < (0.09 if recipe in (FILE, ALL_FP8) else 0.04) * blocks.norm()


MASKS = {
    "window": ({"window_size": (15, 0)}, {}),
    "all keys around": ({"attn_mask_type": "no_mask", "window_size": (15, 7)}, {}),
    "packed": (
        {"attn_mask_type": "padding_causal", "qkv_format": "thd"},
        {"cu_seqlens_q": torch.tensor([0, 9, 9, 70])},
    ),
    "lengths": ({"attn_mask_type": "padding"}, {"cu_seqlens_q": torch.tensor([0, 25, 27])}),
    "padding on the left": (
        {"attn_mask_type": "padding_causal"},
        {"attention_mask": torch.arange(40) < torch.tensor([[11], [40]])},
    ),
    "a mask of pairs": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(40, 40) < 0.5}),
    "masks of heads": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(2, 4, 40, 40) < 0.5}),
    "a mask of keys": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(2, 1, 1, 40) < 0.5}),
    "a mask of queries": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(40, 1) < 0.5}),
}


@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, ALL_FP8], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("name", MASKS)
def test_windows_and_masks_run_in_kernels_as_by_blocks_of_keys(kernel, monkeypatch, name, recipe) -> None:
    """The kernels read which keys each query sees from two numbers or from a mask."""
    options, inputs = MASKS[name]
    lead = (80,) if name == "packed" else (2, 40)
    x = [torch.randn(*lead, heads, 64) for heads in (4, 2, 2)]
    results = []
    for refusal in (AttentionProblem.forward_refusal, lambda self: "blocks of keys"):
        monkeypatch.setattr(AttentionProblem, "forward_refusal", refusal)
        core = DotProductAttention(
            4, 64, num_gqa_groups=2, name="a", recipe=recipe, **{"qkv_format": "bshd", **options}
        )
        leaves = [t.clone().requires_grad_() for t in x]
        y = core(*leaves, **inputs)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(t.grad for t in leaves)])
    assert kernel == ["attend", "differentiate"]
    for fused, blocks in zip(*results, strict=True):
        assert (fused - blocks).norm() < (0.09 if recipe is ALL_FP8 else 0.04) * blocks.norm()


def test_backward_in_high_precision_runs_in_torchs_kernel_on_decoded_planes(kernel) -> None:
    core = DotProductAttention(4, 64, num_gqa_groups=2, qkv_format="bshd", name="a", recipe=FORWARD_ALONE)
    x = [torch.randn(2, 40, heads, 64, requires_grad=True) for heads in (4, 2, 2)]
    y = core(*x)
    y.backward(torch.ones_like(y))
    fmt = duotone.formats.get("fp8_e4m3_tensor")
    values = [fmt.decode(fmt.encode(t.detach().flatten(0, 2)), torch.float32).view(t.shape) for t in x]
    leaves = [t.transpose(1, 2).requires_grad_() for t in values]
    z = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    z.backward(torch.ones_like(z))
    assert torch.allclose(y, z.transpose(1, 2).flatten(2), atol=1e-5)
    for leaf, reference in zip(x, leaves, strict=True):
        error = leaf.grad - reference.grad.transpose(1, 2)
        assert error.norm() < 0.05 * reference.grad.norm()  # the output is kept in E4M3


def test_the_plan_of_an_absent_gpu_names_its_kernels() -> None:
    core = DotProductAttention(4, 64, name="a", recipe=CURRENT)
    rows = {row.gemm: (row.kernel, row.runs) for row in duotone.plan(core, device="sm90")}
    assert rows["QK^T"] == rows["PV"] == ("FP8 attention", "native")
    assert rows["P^T dO"] == ("FP8 attention", "native") and rows["dS K"] == ("FP8 attention", "high precision")
    rows = {row.gemm: (row.kernel, row.runs) for row in duotone.plan(core, FORWARD_ALONE, device="sm90")}
    assert rows["PV"] == ("FP8 attention", "native") and rows["QK^T again"] == ("cuDNN", "emulated")
    assert rows["dS K"] == ("cuDNN", "high precision")


@pytest.mark.parametrize(
    ("width", "recipe", "device", "reason"),
    [
        (48, CURRENT, "sm90", "heads of one width from 64 to 256"),
        (256, CURRENT, "sm120", "wider than 128 on Hopper or Blackwell alone"),
        (64, duotone.Float8CurrentScaling(fp8_dpa=True, fp8_format="E5M2"), "sm90", "multiplies E4M3 with E4M3"),
        (64, duotone.MXFP8BlockScaling(fp8_dpa=True), "sm90", "no attention kernel takes mxfp8_e4m3"),
        (64, CURRENT, "cpu", "needs an NVIDIA GPU with FP8"),
    ],
)
def test_what_the_kernel_does_not_take_is_emulated_with_the_reason(width, recipe, device, reason) -> None:
    core = DotProductAttention(4, width, name="a", recipe=recipe)
    row = duotone.plan(core, device=device)[0]
    assert row.kernel == "blocks of keys" and reason in row.reason


@pytest.mark.parametrize(
    ("change", "is_cudnn"),
    [
        ({}, True),
        ({"groups": 2}, True),
        ({"tokens": CUDNN_TOKENS - 1}, False),
        ({"width": 100}, False),
        ({"dtype": torch.float32}, False),
        ({"masked": True}, False),
        ({"deterministic": True}, False),
    ],
)
def test_on_hopper_long_attention_in_high_precision_is_cudnns_in_traces_too(monkeypatch, change, is_cudnn) -> None:
    """Heads on meta that count as tensors on a Hopper GPU. torch drops an order of kernels in a trace."""
    case = {"tokens": CUDNN_TOKENS, "width": 64, "groups": 4, "dtype": torch.bfloat16, "masked": False} | change
    monkeypatch.setattr(attention, "cuda_target", lambda index: Target("cuda", (9, 0)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: bool(change.get("deterministic")))
    query, key = (
        torch.empty(1, heads, case["tokens"], case["width"], dtype=case["dtype"], device="meta")
        for heads in (4, case["groups"])
    )
    mask = torch.empty(case["tokens"], case["tokens"], dtype=torch.bool, device="meta") if case["masked"] else None
    graph = make_fx(lambda q, k: attention.attend(q, k, k, dropout=0.0, scale=None, attn_mask=mask))(query, key)
    ops = {str(node.target) for node in graph.graph.nodes}
    assert ("aten._scaled_dot_product_cudnn_attention.default" in ops) == is_cudnn
    row = duotone.plan(DotProductAttention(4, 64), device="sm90")[0]
    assert row.reason == "attention runs in high precision, from 2048 queries on without a mask by cuDNN"


def test_short_attention_stays_in_high_precision_where_the_recipe_says_so(kernel) -> None:
    """Only where the kernel would run: emulation is no matter of speed."""
    recipe = duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=40)
    core, plain = (DotProductAttention(4, 64, qkv_format="bshd", name="a", recipe=r) for r in (recipe, "bf16"))
    for tokens in (39, 40):
        x = [torch.randn(1, tokens, 4, 64) for _ in range(3)]
        assert torch.equal(core(*x), plain(*x)) == (tokens < 40)
    assert kernel == ["attend"]
    assert "fewer than 40 queries in high precision" in core.plan_rows(recipe, "sm90")[0].reason
    with pytest.raises(RecipeError, match="dpa_min_tokens is -1; give a number of tokens from 0 on"):
        duotone.Float8CurrentScaling(dpa_min_tokens=-1)


@pytest.fixture
def measured(kernel, monkeypatch) -> list[str]:
    """The kernel of a device with measurements: 64 queries pay alone, and 128 in training, of 4 heads or more."""
    least = attention.LeastTokens(64, 128, 32, 40)
    monkeypatch.setattr(attention, "LEAST_TOKENS", {((0, 0), 64): least, ((9, 0), 64): least})
    monkeypatch.setattr(picks, "MEASURED_HEADS", 4)
    return kernel


def runs(kernel: list[str], core: DotProductAttention, tokens: int, trains: bool, mask: Tensor | None = None) -> bool:
    """Whether a call of 2 heads of a batch of 2 runs the kernel."""
    x = [torch.randn(2, tokens, 2, 64, dtype=torch.bfloat16, requires_grad=trains) for _ in range(3)]
    kernel.clear()
    y = core(*x, mask)
    if trains:
        y.sum().backward()
    return "attend" in kernel


@pytest.mark.parametrize("recipe", [MEASURED, duotone.DelayedScaling(fp8_dpa=True)], ids=lambda recipe: recipe.kind)
def test_the_plan_picks_what_was_measured_to_be_faster(measured, recipe) -> None:
    """By queries, by pairs of queries and keys, and by whether gradients follow, which are then in high precision."""
    core = DotProductAttention(2, 64, qkv_format="bshd", name="a", recipe=recipe)
    for trains, least in ((False, 64), (True, 128)):
        assert [runs(measured, core, tokens, trains) for tokens in (least - 1, least)] == [False, True]
        assert "differentiate" not in measured
    masked = DotProductAttention(2, 64, qkv_format="bshd", name="a", attn_mask_type="arbitrary", recipe=recipe)
    assert not runs(measured, masked, 128, False, torch.zeros(128, 128, dtype=torch.bool))
    window = DotProductAttention(2, 64, qkv_format="bshd", name="a", window_size=(9, 0), recipe=recipe)
    for trains in (False, True):  # torch masks all pairs, so less work pays
        assert [runs(measured, window, tokens, trains) for tokens in (31, 32)] == [False, True]
    padding = DotProductAttention(2, 64, qkv_format="bshd", name="a", attn_mask_type="padding_causal", recipe=recipe)
    nothing = torch.zeros(2, 32, dtype=torch.bool)
    assert runs(measured, padding, 32, True, nothing) and not runs(measured, padding, 31, True, nothing[:, :31])
    around = DotProductAttention(2, 64, qkv_format="bshd", name="a", attn_mask_type="padding", recipe=recipe)
    longer = torch.zeros(2, 40, dtype=torch.bool)
    assert runs(measured, around, 40, True, longer) and not runs(measured, around, 39, True, longer[:, :39])
    less = [torch.randn(1, 64, 2, 64, dtype=torch.bfloat16) for _ in range(3)]
    measured.clear()
    core(*less)
    assert not measured  # half of the work
    more = [torch.randn(2, 64, 2, 64) for _ in range(3)]
    core(*more)
    assert not measured  # fp32, whose backward has no kernel
    with torch.autocast("cpu", torch.bfloat16):
        core(*more)
    assert measured == ["attend"]
    rows = {row.gemm: row for row in core.plan_rows(recipe, "sm90")}
    assert "high precision, which is faster there" in rows["PV"].reason and rows["dS K"].kernel == "cuDNN"


@pytest.mark.parametrize(
    ("width", "words"), [(128, "padding below 4096 queries"), (64, "padding with gradients in all")]
)
def test_a_plan_says_which_masked_calls_run_in_high_precision(width, words) -> None:
    """Without gradients, heads of width 64 run in FP8 under windows, too: see `LeastTokens.for_call`."""
    core = DotProductAttention(2, width, name="a", recipe=MEASURED)
    assert f"windows, sequences and causal {words}" in core.plan_rows(MEASURED, "sm90")[0].reason


@pytest.mark.parametrize("recipe", [replace(MEASURED, strict=True), CURRENT, FILE, replace(MEASURED, fp8_mha=True)])
def test_a_demand_for_fp8_is_no_matter_of_speed(measured, recipe) -> None:
    core = DotProductAttention(2, 64, qkv_format="bshd", name="a", recipe=recipe)
    for trains in (False, True):
        assert runs(measured, core, 16, trains) and ("differentiate" in measured) == trains


def test_a_checkpoint_runs_forward_as_its_recompute(measured) -> None:
    """Its forward tracks no gradients, and would otherwise be in FP8 from 64 queries on."""
    core = DotProductAttention(2, 64, qkv_format="bshd", name="a", recipe=MEASURED)
    x = [torch.randn(2, 64, 2, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    checkpoint(core, *x, use_reentrant=True).sum().backward()
    assert not measured


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, FILE], ids=lambda recipe: recipe.name)
def test_fp8_attention_saves_at_most_six_tenths_of_the_bytes_of_bf16(kernel, recipe, groups) -> None:
    """Storages as they are, with and without groups of heads, as a GPU with the kernel saves them."""

    def saved(recipe: Recipe | str) -> int:
        core = DotProductAttention(4, 128, num_gqa_groups=groups, qkv_format="bshd", name="a", recipe=recipe)
        x = [torch.randn(1, 256, heads, 128, dtype=torch.bfloat16, requires_grad=True) for heads in (4, groups, groups)]
        sizes = {}

        def pack(t: Tensor) -> Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            core(*x)
        return sum(sizes.values())

    assert 0.45 * saved("bf16") < saved(recipe) <= 0.6 * saved("bf16")

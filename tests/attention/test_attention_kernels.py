"""Kernels of attention: which calls run them, and in which layouts they get codes. Their bits: tests/kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend

import duotone
from duotone.attention import DotProductAttention
from duotone.dispatch import attention
from duotone.dispatch.attention import CUDNN_TOKENS
from duotone.dispatch.target import Target
from duotone.errors import RecipeError

triton = pytest.importorskip("triton", reason="Triton is not installed; `make test` brings it on Linux on x86-64")

CURRENT = duotone.Float8CurrentScaling(fp8_dpa=True)
FORWARD_ALONE = duotone.Float8CurrentScaling(fp8_dpa=True, backward_override="dequantized")


def decoded_attention(codes, scales, p_scale, scale, causal, fast, dtype) -> tuple[Tensor, Tensor]:
    """What `kernels.attention.attend` computes, without rounding probabilities."""
    q, k, v = (x.float() * s for x, s in zip(codes, scales, strict=True))
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.permute(2, 0, 3, 1)
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * scale
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).tril() == 0, -torch.inf)
    return (scores.softmax(-1) @ v).transpose(1, 2).contiguous().to(dtype), scores.logsumexp(-1)


@pytest.fixture
def kernel(monkeypatch) -> list[str]:
    """A CPU that counts as a GPU with the kernel; the calls of it."""
    calls = []

    def attend(*arguments) -> tuple[Tensor, Tensor]:
        calls.append("attend")
        return decoded_attention(*arguments)

    from duotone.kernels import attention as kernels

    monkeypatch.setattr(kernels, "attend", attend)
    monkeypatch.setattr(Target, "runs_kernels", property(lambda self: True))
    return calls


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, duotone.DelayedScaling(fp8_dpa=True)])
def test_the_kernel_gets_the_codes_that_blocks_of_keys_multiply(kernel, layout, recipe) -> None:
    sizes = (2, 40) if layout == "bshd" else (40, 2)
    x = [torch.randn(*sizes, heads, 64) for heads in (4, 2, 2)]
    options = {"num_gqa_groups": 2, "qkv_format": layout, "name": "a", "recipe": recipe}
    with_mask = DotProductAttention(4, 64, attn_mask_type="arbitrary", **options)
    results = []
    for core, mask in ((DotProductAttention(4, 64, **options), None), (with_mask, ~torch.ones(40, 40).tril().bool())):
        leaves = [t.clone().requires_grad_() for t in x]
        y = core(*leaves, mask)
        y.backward(torch.ones_like(y))
        results.append([y.detach(), *(t.grad for t in leaves)])
    assert kernel == ["attend"]  # a call with a mask runs by blocks of keys
    for fused, blocks in zip(*results, strict=True):
        assert (fused - blocks).norm() < 0.04 * blocks.norm()


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
    for ours, theirs in zip(x, leaves, strict=True):
        error = ours.grad - theirs.grad.transpose(1, 2)
        assert error.norm() < 0.05 * theirs.grad.norm()  # the output is kept in E4M3


def test_the_plan_of_an_absent_gpu_names_its_kernels() -> None:
    core = DotProductAttention(4, 64, name="a", recipe=CURRENT)
    rows = {row.gemm: (row.kernel, row.runs) for row in duotone.plan(core, device="sm90")}
    assert rows["QK^T"] == rows["PV"] == ("FP8 attention", "native")
    assert rows["P^T dO"] == ("blocks of keys", "emulated")
    rows = {row.gemm: (row.kernel, row.runs) for row in duotone.plan(core, FORWARD_ALONE, device="sm90")}
    assert rows["PV"] == ("FP8 attention", "native") and rows["QK^T again"] == ("cuDNN", "emulated")
    assert rows["dS K"] == ("cuDNN", "high precision")


@pytest.mark.parametrize(
    ("width", "recipe", "device", "reason"),
    [
        (96, CURRENT, "sm90", "heads of width 64 or 128"),
        (64, duotone.Float8CurrentScaling(fp8_dpa=True, fp8_format="E5M2"), "sm90", "multiplies E4M3 with E4M3"),
        (64, duotone.MXFP8BlockScaling(fp8_dpa=True), "sm90", "no attention kernel takes mxfp8_e4m3"),
        (64, CURRENT, "cpu", "needs an NVIDIA GPU with FP8"),
    ],
)
def test_what_the_kernel_does_not_take_is_emulated_with_the_reason(width, recipe, device, reason) -> None:
    core = DotProductAttention(4, width, name="a", recipe=recipe)
    row = duotone.plan(core, device=device)[0]
    assert row.kernel == "blocks of keys" and reason in row.reason


@pytest.mark.parametrize("tokens", [CUDNN_TOKENS - 1, CUDNN_TOKENS])
def test_on_hopper_long_attention_in_high_precision_asks_for_cudnn_first(monkeypatch, tokens) -> None:
    """A tensor on meta that counts as one on a Hopper GPU; the order that was set before comes back."""
    monkeypatch.setattr(attention, "cuda_target", lambda index: Target("cuda", (9, 0)))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    heads = torch.empty(1, 4, tokens, 64, dtype=torch.bfloat16, device="meta")
    before = torch._C._get_sdp_priority_order()
    for masked in (False, True):
        with attention.favourite(heads, heads, masked):
            now = torch._C._get_sdp_priority_order()
        is_asked = tokens == CUDNN_TOKENS and not masked
        assert now[0] == (int(SDPBackend.CUDNN_ATTENTION) if is_asked else before[0])
    assert torch._C._get_sdp_priority_order() == before
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
    assert "queries" not in core.plan_rows(recipe, "sm90")[3].reason
    measured = duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens="measured")
    assert "fewer than 8192 queries" in core.plan_rows(measured, "sm90")[1].reason
    with pytest.raises(RecipeError, match="dpa_min_tokens is -1; give a number of tokens from 0 on"):
        duotone.Float8CurrentScaling(dpa_min_tokens=-1)

"""On a CUDA device: attention in FP8 kernels against blocks of keys in plain torch, and those on a CPU."""

import pytest
import torch
from torch import Tensor

import duotone
from duotone.attention import DotProductAttention

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
FORWARD_ALONE = duotone.Float8CurrentScaling(fp8_dpa=True, backward_override="dequantized")


def step(core: DotProductAttention, x: list[Tensor], mask: Tensor | None = None) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in x]
    y = core(*leaves, mask)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.mark.parametrize("recipe", [FORWARD_ALONE, duotone.DelayedScaling(fp8_dpa=True)], ids=lambda r: r.kind)
@pytest.mark.parametrize(("width", "groups", "tokens"), [(64, 4, 300), (128, 2, 256), (128, 1, 1000)])
def test_the_kernels_are_within_a_bound_of_blocks_of_keys(recipe, width, groups, tokens) -> None:
    """A mask of the causal triangle makes a call run by blocks of keys."""
    x = [torch.randn(2, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for heads in (4, groups, groups)]
    options = {"num_gqa_groups": groups, "qkv_format": "bshd", "name": "a", "recipe": recipe}
    triangle = ~torch.ones(tokens, tokens, device="cuda", dtype=torch.bool).tril()
    fused = step(DotProductAttention(4, width, **options), x)
    blocks = step(DotProductAttention(4, width, attn_mask_type="arbitrary", **options), x, triangle)
    for ours, theirs in zip(fused, blocks, strict=True):
        assert (ours.float() - theirs.float()).norm() < 0.04 * theirs.float().norm()
    rows = {row.gemm: row.kernel for row in DotProductAttention(4, width, **options).plan_rows(recipe)}
    assert rows["QK^T"] == "FP8 attention"


@pytest.mark.parametrize("recipe", [FORWARD_ALONE, duotone.MXFP8BlockScaling(fp8_dpa=True)], ids=lambda r: r.kind)
def test_blocks_of_keys_on_a_gpu_give_what_they_give_on_a_cpu(recipe) -> None:
    x = [torch.randn(1, 200, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    results = []
    for device in ("cpu", "cuda"):
        triangle = ~torch.ones(200, 200, device=device, dtype=torch.bool).tril()
        options = {"num_gqa_groups": 2, "qkv_format": "bshd", "attn_mask_type": "arbitrary", "name": "a"}
        results.append(step(DotProductAttention(4, 64, recipe=recipe, **options), [t.to(device) for t in x], triangle))
    for ours, theirs in zip(*results, strict=True):
        assert (ours.float() - theirs.cpu().float()).norm() < 0.01 * ours.float().norm()

"""Attention on a GPU against attention on the CPU: torch chooses other kernels there."""

import copy

import pytest
import torch
from torch import Tensor

from duotone import recipes
from duotone.attention import DotProductAttention, RotaryPositionEmbedding, TransformerLayer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run it on one")
EDGES = torch.tensor([0, 40, 40, 128])


def both(module, inputs: list[Tensor], **options) -> list[list[Tensor]]:
    """Output and gradients in fp32 on the CPU, and in the inputs' dtype on the GPU."""
    results = []
    for device in ("cpu", "cuda"):
        copied = copy.deepcopy(module).to(device)
        copied = copied.float() if device == "cpu" else copied
        leaves = [(x.float() if device == "cpu" else x).to(device, copy=True).requires_grad_() for x in inputs]
        moved = {key: x.to(device) if isinstance(x, Tensor) else x for key, x in options.items()}
        out = copied(*leaves, **moved)
        out.float().square().sum().backward()
        results.append([out, *(x.grad for x in leaves)])
    return results


def near(results: list[list[Tensor]], bound: float) -> None:
    for want, result in zip(*results, strict=True):
        assert result.isfinite().all() and (result.cpu().float() - want).norm() <= bound * want.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("widths", [(64, 64), (64, 32)])
@pytest.mark.parametrize(
    ("kind", "window", "arguments"),
    [
        ("no_mask", None, {}),
        ("causal", None, {}),
        ("causal", (16, 0), {}),
        ("padding_causal", None, {"cu_seqlens_q": torch.tensor([0, 100, 228])}),
        ("padding", None, {"attention_mask": torch.arange(128) >= torch.tensor([[90], [128]])}),
        ("arbitrary", None, {"attention_mask": torch.arange(128)[:, None] < torch.arange(128) + 5}),
    ],
)
def test_dot_product_attention_on_cuda_is_near_the_cpu(kind, window, arguments, widths, dtype) -> None:
    """The arbitrary mask leaves queries without any key."""
    core = DotProductAttention(8, widths, num_gqa_groups=2, attn_mask_type=kind, window_size=window, qkv_format="bshd")
    shapes = ((8, widths[0]), (2, widths[0]), (2, widths[1]))
    inputs = [torch.randn(2, 128, *shape).to(dtype) for shape in shapes]
    near(both(core, inputs, **arguments), 1e-2 if dtype is torch.float32 else 3e-2)


def test_packed_sequences_on_cuda_are_near_the_cpu() -> None:
    core = DotProductAttention(8, 64, num_gqa_groups=2, attn_mask_type="padding_causal", qkv_format="thd")
    inputs = [torch.randn(130, count, 64).bfloat16() for count in (8, 2, 2)]
    near(both(core, inputs, cu_seqlens_q=EDGES), 3e-2)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_whole_layer_on_cuda_is_near_the_cpu(compiled) -> None:
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "fuse_qkv_params": True, "qk_norm_type": "RMSNorm"}
    layer = TransformerLayer(256, 512, 4, recipe=recipes.load("fp8-current"), params_dtype=torch.bfloat16, **options)
    x, angles = torch.randn(64, 2, 256).bfloat16(), RotaryPositionEmbedding(64)(64)
    results = both(layer, [x], rotary_pos_emb=angles)
    if compiled:
        run = torch.compile(copy.deepcopy(layer).cuda(), fullgraph=True)
        leaf = x.cuda().requires_grad_()
        out = run(leaf, rotary_pos_emb=angles.cuda())
        out.float().square().sum().backward()
        results[1] = [out, leaf.grad]
    near(results, 6e-2)

"""On a CUDA device: attention in FP8 kernels against blocks of keys in plain torch, and those on a CPU."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from functorch.compile import make_boxed_func
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

import duotone
from duotone.attention import DotProductAttention
from duotone.dispatch.attention import AttentionProblem
from duotone.recipes import Rule, RuleRecipe

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)
CURRENT = duotone.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)
FORWARD_ALONE = replace(CURRENT, backward_override="dequantized")
DELAYED = duotone.DelayedScaling(fp8_dpa=True, dpa_min_tokens=0)
FILE = duotone.recipes.load("nvfp4-linear-fp8-dpa")
ALL_FP8 = RuleRecipe(
    rules=(
        Rule(module_type="dpa", tensor_type="dp", format="fp8_e5m2_tensor"),
        Rule(module_type="dpa", format="fp8_e4m3_tensor"),
    )
)

DS_HIGH = RuleRecipe(
    rules=(
        Rule(module_type="dpa", tensor_type="dp", format="identity"),
        Rule(module_type="dpa", format="fp8_e4m3_tensor"),
    )
)


def step(core: DotProductAttention, x: list[Tensor], **options: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in x]
    y = core(*leaves, **options)
    y.backward(torch.ones_like(y))
    return [y.detach(), *(t.grad for t in leaves)]


@pytest.fixture
def by_blocks(monkeypatch) -> Callable[[], None]:
    """by_blocks() -> calls run by blocks of keys from then on."""
    return lambda: monkeypatch.setattr(AttentionProblem, "forward_refusal", lambda self: "blocks of keys")


@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, DELAYED, FILE, ALL_FP8, DS_HIGH])
@pytest.mark.parametrize(
    ("width", "groups", "tokens"), [(64, 4, 300), (128, 2, 256), (128, 1, 1000), (96, 2, 300), (256, 2, 300)]
)
def test_the_kernels_are_within_a_bound_of_blocks_of_keys(by_blocks, recipe, width, groups, tokens) -> None:
    x = [torch.randn(2, tokens, heads, width, device="cuda", dtype=torch.bfloat16) for heads in (4, groups, groups)]
    options = {"num_gqa_groups": groups, "qkv_format": "bshd", "name": "a", "recipe": recipe}
    core = DotProductAttention(4, width, **options)
    fused = step(core, x)
    rows = {row.gemm: row.kernel for row in core.plan_rows(recipe)}
    assert rows["QK^T"] == "FP8 attention"
    if rows["dS K"] == "FP8 attention":
        again = step(DotProductAttention(4, width, **options), x)
        assert all(torch.equal(*pair) for pair in zip(fused, again, strict=True))
    by_blocks()
    blocks = step(DotProductAttention(4, width, **options), x)
    for result, reference in zip(fused, blocks, strict=True):
        bound = 0.09 if recipe is ALL_FP8 else 0.04  # dS has other scales
        assert (result.float() - reference.float()).norm() < bound * reference.float().norm()


EDGES = {
    "window": ({"window_size": (200, 0)}, {}),
    "all keys around": ({"attn_mask_type": "no_mask", "window_size": (100, 30)}, {}),
    "packed": ({"attn_mask_type": "padding_causal", "qkv_format": "thd"}, {"cu_seqlens_q": [0, 90, 90, 800, 1150]}),
    "lengths": ({"attn_mask_type": "padding"}, {"cu_seqlens_q": [0, 600, 603]}),
    "padding on the left": (
        {"attn_mask_type": "padding_causal"},
        {"attention_mask": torch.arange(600) < torch.tensor([[111], [600]])},
    ),
    "a mask of pairs": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(600, 600) < 0.5}),
    "masks of heads": ({"attn_mask_type": "arbitrary"}, {"attention_mask": torch.rand(2, 4, 600, 600) < 0.5}),
}


@pytest.mark.parametrize("recipe", [CURRENT, FORWARD_ALONE, ALL_FP8, DS_HIGH])
@pytest.mark.parametrize(
    ("name", "width"), [*((name, 128) for name in EDGES), ("packed", 64), ("masks of heads", 64), ("window", 256)]
)
def test_windows_and_masks_are_within_a_bound_of_blocks_of_keys(by_blocks, name, width, recipe) -> None:
    options, keywords = EDGES[name]
    keywords = {key: torch.as_tensor(each, device="cuda") for key, each in keywords.items()}
    lead = (1200,) if name == "packed" else (2, 600)
    x = [torch.randn(*lead, heads, width, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    options = {"num_gqa_groups": 2, "qkv_format": "bshd", "name": "a", "recipe": recipe, **options}
    fused = step(DotProductAttention(4, width, **options), x, **keywords)
    by_blocks()
    blocks = step(DotProductAttention(4, width, **options), x, **keywords)
    for result, reference in zip(fused, blocks, strict=True):
        assert not torch.equal(result, reference)  # other sums
        bound = 0.09 if recipe is ALL_FP8 else 0.04
        assert (result.float() - reference.float()).norm() < bound * reference.float().norm()


@pytest.mark.parametrize("recipe", [CURRENT, duotone.MXFP8BlockScaling(fp8_dpa=True)], ids=lambda r: r.kind)
def test_blocks_of_keys_on_a_gpu_give_what_they_give_on_a_cpu(by_blocks, recipe) -> None:
    by_blocks()
    x = [torch.randn(1, 200, heads, 64, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    results = []
    for device in ("cpu", "cuda"):
        options = {"num_gqa_groups": 2, "qkv_format": "bshd", "name": "a"}
        results.append(step(DotProductAttention(4, 64, recipe=recipe, **options), [t.to(device) for t in x]))
    for cpu, cuda in zip(*results, strict=True):
        assert (cpu.float() - cuda.cpu().float()).norm() < 0.01 * cpu.float().norm()


def test_compiled_attention_in_high_precision_runs_cudnn_as_eager_attention_does() -> None:
    """On Hopper; torch would take FlashAttention-2, which is half as fast. 2048 tokens are the least."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("cuDNN's attention is chosen on Hopper; run it on an H100 or H200")
    names: set[str] = set()

    def record(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> object:
        names.update(str(node.target) for node in graph.graph.nodes)
        return make_boxed_func(graph.forward)

    core = DotProductAttention(4, 128, num_gqa_groups=2, qkv_format="bshd", name="a")
    x = [torch.randn(2, 2048, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (4, 2, 2)]
    eager = step(core, x)
    compiled = step(torch.compile(core, backend=aot_autograd(fw_compiler=record), fullgraph=True), x)
    assert {f"aten._scaled_dot_product_cudnn_attention{end}.default" for end in ("", "_backward")} <= names
    assert torch.equal(eager[0], compiled[0])
    for result, expected in zip(compiled[1:], eager[1:], strict=True):
        assert (result.float() - expected.float()).norm() < 2**-8 * expected.float().norm()  # its sums are in any order

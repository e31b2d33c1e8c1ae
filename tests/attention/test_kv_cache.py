"""Generation with keys and values in low precision: token by token as all at once, less memory, and bad input."""

import pytest
import torch

import duotone
from duotone.attention import DotProductAttention, KVCache, RotaryPositionEmbedding, TransformerLayer
from duotone.errors import UserError


@pytest.mark.parametrize("layout", ["bshd", "sbhd"])
@pytest.mark.parametrize("name", ["identity", "fp8_e4m3_row", "mxfp8_e4m3"])
@torch.no_grad()
def test_tokens_one_by_one_see_what_all_at_once_see(layout, name) -> None:
    """In high precision the same; in a format the attention of keys and values that are quantized by rows."""
    core = DotProductAttention(4, 32, num_gqa_groups=2, qkv_format=layout)
    sizes, axis = ((2, 9), 1) if layout == "bshd" else ((9, 2), 0)
    q, k, v = (torch.randn(*sizes, heads, 32) for heads in (4, 2, 2))
    fmt = duotone.formats.get(name)
    coded = [fmt.decode(fmt.encode(x.reshape(-1, 32)), torch.float32).view(x.shape) for x in (k, v)]
    expected = core(q, *coded)
    cache = KVCache(2, 9, 2, 32, format=name, dtype=torch.float32)
    outs = [core(*(x.narrow(axis, 0, 4) for x in (q, k, v)), kv_cache=cache)]
    outs += [core(*(x.narrow(axis, i, 1) for x in (q, k, v)), kv_cache=cache) for i in range(4, 9)]
    assert torch.allclose(torch.cat(outs, axis), expected, atol=1e-5) and cache.tokens == 9
    cache.clear()
    assert torch.equal(core(*(x.narrow(axis, 0, 4) for x in (q, k, v)), kv_cache=cache), outs[0])


@torch.no_grad()
def test_a_layer_generates_with_half_the_memory() -> None:
    torch.manual_seed(0)
    layer = TransformerLayer(64, 128, 4, num_gqa_groups=2, attn_input_format="bshd", name="l").eval()
    x, rope = torch.randn(2, 8, 64), RotaryPositionEmbedding(16)
    expected = layer(x, rotary_pos_emb=rope(8))
    cache = KVCache(2, 8, 2, 16, dtype=torch.float32)
    first = layer(x[:, :5], rotary_pos_emb=rope(5), kv_cache=cache)
    next_tokens = [layer(x[:, i : i + 1], rotary_pos_emb=rope(1, offset=i), kv_cache=cache) for i in range(5, 8)]
    out = torch.cat([first, *next_tokens], 1)
    assert (out - expected).norm() < 0.02 * expected.norm() and not torch.equal(out, expected)
    wide = KVCache(2, 8, 2, 128)
    assert wide.nbytes < 0.52 * 2 * (2 * 8 * 2 * 128) * 2


@torch.no_grad()
def test_products_in_low_precision_read_the_cache() -> None:
    recipe = duotone.Float8CurrentScaling(fp8_dpa=True)
    core = DotProductAttention(4, 32, qkv_format="bshd", name="a", recipe=recipe)
    x = [torch.randn(1, 6, 4, 32) for _ in range(3)]
    cache = KVCache(1, 6, 4, 32, dtype=torch.float32)
    out = torch.cat([core(*(t[:, i : i + 1] for t in x), kv_cache=cache) for i in range(6)], 1)
    plain = DotProductAttention(4, 32, qkv_format="bshd")(*x)
    assert (out - plain).norm() < 0.1 * plain.norm()


def test_queries_may_have_another_dtype_than_the_cache() -> None:
    core, heads = DotProductAttention(2, 16, qkv_format="bshd"), torch.randn(1, 3, 2, 16)
    with torch.no_grad():
        out, plain = core(heads, heads, heads, kv_cache=KVCache(1, 4, 2, 16)), core(heads, heads, heads)
    assert out.dtype == torch.float32 and (out - plain).norm() < 0.1 * plain.norm()


def test_heads_in_high_precision_are_stored_in_the_dtype_of_the_cache() -> None:
    heads = torch.randn(1, 3, 2, 16)
    for dtype in (torch.float16, torch.float32):
        keys, _ = KVCache(1, 4, 2, 16, format="identity").append(heads.to(dtype), heads.to(dtype), "bshd")
        assert torch.equal(keys, heads.to(dtype).bfloat16())


def test_bad_input_is_refused_in_one_line_and_changes_nothing() -> None:
    cache = KVCache(1, 4, 2, 16)
    heads = torch.randn(1, 3, 2, 16)
    core = DotProductAttention(2, 16, qkv_format="bshd")
    with torch.no_grad():
        cache.append(heads, heads, "bshd")
        with pytest.raises(UserError, match=r"KVCache\(3 of 4 tokens, fp8_e4m3_row\) has no room for 3 more"):
            core(heads, heads, heads, kv_cache=cache)
        with pytest.raises(UserError, match=r"\(1, 2, 16\) got heads \(2, 1, 2, 16\)"):
            cache.append(torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16), "bshd")
        with pytest.raises(UserError, match="packed ones"):
            cache.append(heads[0], heads[0], "thd")
        with pytest.raises(UserError, match="a kv_cache goes with attn_mask_type 'causal' or 'no_mask'"):
            core(heads, heads, heads, torch.zeros(3, 3).bool(), attn_mask_type="arbitrary", kv_cache=cache)
        for options in ({"window_size": 3}, {"window_size": (-2, 0)}, {"cu_seqlens_kv": torch.tensor([0, 1])}):
            with pytest.raises(UserError, match=r"window_size is|a kv_cache goes with"):
                core(*(heads[:, :1],) * 3, kv_cache=cache, **options)
    with pytest.raises(UserError, match="generate under"):
        cache.append(heads[:, :1].requires_grad_(), heads[:, :1], "bshd")
    assert cache.tokens == 3
    for name in ("fp8_e4m3_tensor", "nvfp4_sr", "fp8_e4m3_128x128", "nvfp4"):
        with pytest.raises(UserError, match="scales belong to one row"):
            KVCache(1, 4, 2, 16, format=name)
    with pytest.raises(UserError, match=r"a floating dtype; got torch\.int32"):
        KVCache(1, 4, 2, 16, dtype=torch.int32)
    with pytest.raises(UserError, match="length is -1; give an integer of at least 0"):
        KVCache(1, -1, 2, 16)
    with pytest.raises(UserError, match=r"width is 16\.5; give an integer of at least 1"):
        KVCache(1, 4, 2, 16.5)

"""DotProductAttention against softmax attention in float64 with every mask written out."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone.attention import DotProductAttention, masks
from duotone.errors import UserError

BATCH, QUERIES, KEYS, HEADS, WIDTH = 2, 7, 7, 4, 8
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def reference(query: Tensor, key: Tensor, value: Tensor, visible, scale: float | None = None) -> Tensor:
    """bshd heads -> (b, s, h*d), float64; `seen(batch, i, j)` says whether query i sees key j."""
    query, key, value = (x.double() for x in (query, key, value))
    group = query.shape[2] // key.shape[2]
    out = torch.zeros(*query.shape[:3], value.shape[3], dtype=torch.float64)
    for b in range(query.shape[0]):
        for h in range(query.shape[2]):
            for i in range(query.shape[1]):
                keys = [j for j in range(key.shape[1]) if visible(b, i, j)]
                if keys:
                    scores = key[b, keys, h // group] @ query[b, i, h] * (scale or query.shape[3] ** -0.5)
                    out[b, i, h] = scores.softmax(0) @ value[b, keys, h // group]
    return out.flatten(2)


def heads(tokens: int = QUERIES, count: int = HEADS, width: int = WIDTH) -> Tensor:
    return torch.randn(BATCH, tokens, count, width)


def module(**options) -> DotProductAttention:
    return DotProductAttention(HEADS, WIDTH, qkv_format="bshd", **options)


@pytest.mark.parametrize("groups", [4, 2, 1])
@pytest.mark.parametrize(
    ("name", "window", "keys", "seen"),
    [
        ("no_mask", None, 7, lambda b, i, j: True),
        ("no_mask", None, 9, lambda b, i, j: True),
        ("causal", None, 7, lambda b, i, j: j <= i),
        ("causal", (-1, 0), 7, lambda b, i, j: j <= i),
        ("causal", None, 9, lambda b, i, j: j <= i),
        ("causal", (2, 0), 7, lambda b, i, j: i - 2 <= j <= i),
        ("causal", (2, -1), 7, lambda b, i, j: i - 2 <= j <= i),
        ("causal", (2, 2), 7, lambda b, i, j: i - 2 <= j <= i),
        ("causal", (0, 0), 7, lambda b, i, j: j == i),
        ("no_mask", (2, 1), 7, lambda b, i, j: i - 2 <= j <= i + 1),
        ("no_mask", (-1, 1), 7, lambda b, i, j: j <= i + 1),
        ("no_mask", (1, -1), 7, lambda b, i, j: j >= i - 1),
        ("no_mask", (1, 1), 9, lambda b, i, j: i + 1 <= j <= i + 3),
        ("causal_bottom_right", None, 9, lambda b, i, j: j <= i + 2),
        ("causal_bottom_right", None, 7, lambda b, i, j: j <= i),
        ("causal_bottom_right", None, 5, lambda b, i, j: j <= i - 2),
    ],
)
def test_each_type_of_mask_equals_the_sum_over_the_keys_that_it_names(name, window, keys, seen, groups) -> None:
    query, key, value = heads(), heads(keys, groups), heads(keys, groups)
    attention = module(attn_mask_type=name, window_size=window, num_gqa_groups=groups)
    torch.testing.assert_close(attention(query, key, value).double(), reference(query, key, value, seen), **CLOSE)


def test_gradients_are_those_of_the_reference() -> None:
    query, key, value = (x.requires_grad_() for x in (heads(), heads(count=2), heads(count=2)))
    dy = torch.randn(BATCH, QUERIES, HEADS * WIDTH)
    out = module(num_gqa_groups=2, window_size=(3, 0))(query, key, value)
    gradients = torch.autograd.grad(out, (query, key, value), dy)
    expected = reference(query, key, value, lambda b, i, j: i - 3 <= j <= i)
    for gradient, exact in zip(gradients, torch.autograd.grad(expected, (query, key, value), dy.double()), strict=True):
        torch.testing.assert_close(gradient, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "causal"), [("no_mask", False), ("causal", True)])
def test_without_a_mask_of_its_own_it_is_torchs_attention_bit_for_bit(name, causal) -> None:
    query, key, value = (heads().bfloat16().requires_grad_() for _ in range(3))
    output = module(attn_mask_type=name)(query, key, value)
    views = (x.transpose(1, 2) for x in (query, key, value))
    reference = F.scaled_dot_product_attention(*views, is_causal=causal).transpose(1, 2).flatten(2)
    assert torch.equal(output, reference)
    dy = torch.randn_like(output)
    for a, b in zip(*(torch.autograd.grad(y, (query, key, value), dy) for y in (output, reference)), strict=True):
        assert torch.equal(a, b)


def test_layouts_are_permutations_of_each_other() -> None:
    query, key, value = heads(), heads(), heads()
    expected = module()(query, key, value)
    swapped = module()(*(x.transpose(0, 1) for x in (query, key, value)), qkv_format="sbhd")
    assert swapped.shape == (QUERIES, BATCH, HEADS * WIDTH) and torch.equal(swapped.transpose(0, 1), expected)


def test_widths_of_keys_and_values_may_differ() -> None:
    query, key, value = heads(width=8), heads(count=2, width=8), heads(count=2, width=6)
    attention = DotProductAttention(HEADS, (8, 6), num_gqa_groups=2, qkv_format="bshd")
    expected = reference(query, key, value, lambda b, i, j: j <= i)
    torch.testing.assert_close(attention(query, key, value).double(), expected, **CLOSE)


def test_the_scale_of_the_softmax_is_the_one_given() -> None:
    query, key, value = heads(), heads(), heads()
    expected = reference(query, key, value, lambda b, i, j: j <= i, scale=0.7)
    torch.testing.assert_close(module(softmax_scale=0.7)(query, key, value).double(), expected, **CLOSE)


LENGTHS = (4, 7)


def padding(lengths: tuple[int, ...], tokens: int) -> Tensor:
    return torch.arange(tokens) >= torch.tensor(lengths)[:, None]


def edges(lengths: tuple[int, ...]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


@pytest.mark.parametrize("by", ["mask", "mask of four axes", "lengths"])
@pytest.mark.parametrize(
    ("name", "window", "inside"),
    [
        ("padding", None, lambda i, j: True),
        ("padding", (1, 1), lambda i, j: abs(i - j) <= 1),
        ("padding_causal", None, lambda i, j: j <= i),
        ("padding_causal", (1, 0), lambda i, j: i - 1 <= j <= i),
    ],
)
def test_padding_is_neither_seen_nor_sees(name, window, inside, by) -> None:
    query, key, value = (heads().requires_grad_() for _ in range(3))
    mask = padding(LENGTHS, QUERIES)
    options = {
        "mask": {"attention_mask": mask},
        "mask of four axes": {"attention_mask": mask[:, None, None]},
        "lengths": {"cu_seqlens_q": edges(LENGTHS)},
    }[by]
    out = module(attn_mask_type=name, window_size=window)(query, key, value, **options)

    def seen(b, i, j):
        return i < LENGTHS[b] and j < LENGTHS[b] and inside(i, j)

    torch.testing.assert_close(out.double(), reference(query, key, value, seen), **CLOSE)
    out.sum().backward()
    assert not out[mask].any() and not query.grad[mask].any() and not value.grad[mask].any()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


def test_padding_on_the_left_counts_positions_from_the_first_token() -> None:
    query, key, value = heads(), heads(), heads()
    mask = padding(LENGTHS, QUERIES).flip(1)
    out = module(attn_mask_type="padding_causal", window_size=(2, 0))(query, key, value, mask)
    for b, length in enumerate(LENGTHS):
        rows = (slice(b, b + 1), slice(QUERIES - length, None))
        alone = module(window_size=(2, 0))(query[rows], key[rows], value[rows])
        torch.testing.assert_close(out[rows], alone)


def test_queries_and_keys_may_be_padded_differently() -> None:
    query, key, value = heads(7), heads(9), heads(9)
    lengths = ((3, 7), (9, 5))
    masks = (padding(lengths[0], 7), padding(lengths[1], 9))
    by_mask = module(attn_mask_type="padding")(query, key, value, masks)
    options = {"cu_seqlens_q": edges(lengths[0]), "cu_seqlens_kv": edges(lengths[1])}
    by_length = module(attn_mask_type="padding")(query, key, value, **options)
    expected = reference(query, key, value, lambda b, i, j: i < lengths[0][b] and j < lengths[1][b])
    torch.testing.assert_close(by_mask.double(), expected, **CLOSE)
    assert torch.equal(by_mask, by_length)
    aligned = module(attn_mask_type="padding_causal_bottom_right")(query, key, value, masks)

    def seen(b, i, j):
        return i < lengths[0][b] and j < lengths[1][b] and j <= i + lengths[1][b] - lengths[0][b]

    torch.testing.assert_close(aligned.double(), reference(query, key, value, seen), **CLOSE)


@pytest.mark.parametrize("shape", [(7, 7), (2, 1, 7, 7), (1, 4, 7, 7), (2, 1, 1, 7)])
def test_an_arbitrary_mask_hides_what_is_true_in_it(shape) -> None:
    query, key, value = heads(), heads(), heads()
    mask = torch.rand(shape) < 0.4
    mask[..., 0] = False
    out = module(attn_mask_type="arbitrary")(query, key, value, mask)
    whole = mask.expand(BATCH, HEADS, 7, 7)
    for h in range(HEADS):
        part = [x[:, :, h : h + 1] for x in (query, key, value)]
        expected = reference(*part, lambda b, i, j, h=h: not whole[b, h, i, j])
        torch.testing.assert_close(out[..., h * WIDTH : (h + 1) * WIDTH].double(), expected, **CLOSE)


def test_a_window_narrows_an_arbitrary_mask() -> None:
    query, key, value = heads(), heads(), heads()
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[:, 2] = True
    out = module(attn_mask_type="arbitrary", window_size=(1, 1))(query, key, value, mask)
    expected = reference(query, key, value, lambda b, i, j: j != 2 and abs(i - j) <= 1)
    torch.testing.assert_close(out.double(), expected, **CLOSE)


def test_a_query_that_an_arbitrary_mask_hides_every_key_from_gives_zeros() -> None:
    query, key, value = (heads().requires_grad_() for _ in range(3))
    mask = torch.zeros(7, 7, dtype=torch.bool)
    mask[3] = True
    out = module(attn_mask_type="arbitrary")(query, key, value, mask)
    out.sum().backward()
    assert not out[:, 3].any() and not query.grad[:, 3].any() and key.grad.isfinite().all()


@pytest.mark.parametrize(("name", "window"), [("causal", None), ("padding", None), ("padding_causal", (2, 0))])
def test_packed_sequences_equal_each_sequence_alone(name, window) -> None:
    """Sequences of different lengths, an empty one among them, and tokens behind the last."""
    lengths = (3, 0, 6, 1)
    cu = edges(lengths)
    query, key, value = (torch.randn(12, count, WIDTH, requires_grad=True) for count in (4, 2, 2))
    attention = module(num_gqa_groups=2, attn_mask_type=name, window_size=window)
    out = attention(query, key, value, qkv_format="thd", cu_seqlens_q=cu)
    assert out.shape == (12, HEADS * WIDTH) and not out[10:].any()
    dy = torch.randn_like(out)
    dy[10:] = 0
    grads = torch.autograd.grad(out, (query, key, value), dy)
    for begin, end in itertools.pairwise(cu):
        if begin == end:
            continue
        part = [x[begin:end][None] for x in (query, key, value)]
        alone = attention(*part, attn_mask_type="no_mask" if name == "padding" else "causal")
        torch.testing.assert_close(out[begin:end], alone[0], **CLOSE)
        for result, want in zip(grads, torch.autograd.grad(alone, part, dy[begin:end][None]), strict=True):
            torch.testing.assert_close(result[begin:end], want[0], rtol=1e-4, atol=1e-5)
    assert not any(grad[10:].any() for grad in grads)


def test_packed_queries_and_keys_of_other_lengths_meet_in_their_sequence() -> None:
    cu_q, cu_kv = edges((2, 5)), edges((6, 5))
    query, key, value = torch.randn(7, 4, 8), torch.randn(11, 4, 8), torch.randn(11, 4, 8)
    attention = module(attn_mask_type="padding_causal_bottom_right")
    out = attention(query, key, value, qkv_format="thd", cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    first = reference(query[None, :2], key[None, :6], value[None, :6], lambda b, i, j: j <= i + 4)
    second = reference(query[None, 2:], key[None, 6:], value[None, 6:], lambda b, i, j: j <= i)
    torch.testing.assert_close(out.double(), torch.cat((first[0], second[0])), **CLOSE)


def test_dropout_acts_in_training_alone_and_zero_is_none() -> None:
    query, key, value = heads(), heads(), heads()
    plain = module()(query, key, value)
    dropping = module(attention_dropout=0.5)
    assert not torch.equal(dropping(query, key, value), plain)
    assert torch.equal(dropping.eval()(query, key, value), plain)
    assert torch.equal(module(attention_dropout=0.0)(query, key, value), plain)


def test_types_and_windows_of_a_call_go_before_the_modules_own() -> None:
    query, key, value = heads(), heads(), heads()
    expected = module(attn_mask_type="no_mask", window_size=(1, 1))(query, key, value)
    assert torch.equal(module()(query, key, value, attn_mask_type="no_mask", window_size=(1, 1)), expected)


def test_it_runs_on_meta_and_under_autocast_of_torch() -> None:
    on_meta = [heads().to("meta") for _ in range(3)]
    assert module(window_size=(2, 0))(*on_meta).device.type == "meta"
    with torch.autocast("cpu", torch.bfloat16):
        assert module()(heads().bfloat16(), heads(), heads().bfloat16()).dtype is torch.bfloat16


def test_batches_and_sequences_of_nothing_give_nothing() -> None:
    assert module()(*(torch.randn(0, 7, 4, 8) for _ in range(3))).shape == (0, 7, 32)
    assert module(window_size=(2, 0))(*(torch.randn(2, 0, 4, 8) for _ in range(3))).shape == (2, 0, 32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attn_mask_type": "triangle"}, "'triangle' is unknown; allowed are 'no_mask', 'causal'"),
        ({"qkv_format": "bhsd"}, "'bhsd' is unknown; allowed are 'sbhd', 'bshd', 'thd'"),
        ({"num_gqa_groups": 3}, "num_gqa_groups 3 does not divide num_attention_heads 4"),
        ({"attention_dropout": 1.0}, "attention_dropout is 1.0; give a probability"),
        ({"window_size": (-2, 0)}, "window_size is (-2, 0); give (left, right)"),
        ({"window_size": (3.5, 0)}, "window_size is (3.5, 0)"),
        ({"window_size": (True, 0)}, "window_size is (True, 0)"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0; give an integer of at least 1"),
        ({"num_attention_heads": 4.0}, "num_attention_heads is 4.0; give an integer"),
        ({"num_gqa_groups": -2}, "num_gqa_groups is -2; give an integer of at least 1"),
        ({"kv_channels": 0}, "kv_channels is 0; give an integer of at least 1"),
        ({"kv_channels": (8, -8)}, "kv_channels is -8; give an integer of at least 1"),
        ({"kv_channels": (8,)}, "kv_channels is (8,); give the width of a head"),
        ({"softmax_scale": -0.1}, "softmax_scale is -0.1; give a positive number, or None"),
        ({"softmax_scale": float("nan")}, "softmax_scale is nan; give a positive number, or None"),
    ],
)
def test_a_wrong_argument_is_one_line(options, message) -> None:
    with pytest.raises(UserError) as error:
        DotProductAttention(**{"num_attention_heads": HEADS, "kv_channels": WIDTH, **options})
    assert message in str(error.value) and "\n" not in str(error.value)


HALF = torch.randn(2, 7, 4, 8).bfloat16()
MASK, PAIRS = torch.zeros(2, 7, dtype=torch.bool), torch.zeros(7, 7, dtype=torch.bool)


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"query": heads(count=3)}, {}, "got (2, 7, 3, 8)"),
        ({"key": heads(width=6)}, {}, "of one batch and floating dtype"),
        ({"value": heads(6)}, {}, "keys and values alike"),
        ({"query": heads()[:1]}, {}, "got (1, 7, 4, 8)"),
        ({"query": heads()[0]}, {}, "got (7, 4, 8)"),
        ({"query": HALF}, {}, "in torch.bfloat16"),
        ({"key": heads().to("meta")}, {}, "in torch.float32 on meta"),
        ({}, {"attn_mask_type": "padding", "attention_mask": MASK.to("meta")}, "on cpu as the heads; got meta"),
        ({}, {"attn_mask_type": "padding", "cu_seqlens_q": torch.arange(3, device="meta")}, "as the heads; got meta"),
        ({}, {"attn_mask_type": "arbitrary", "attention_mask": PAIRS.to("meta")}, "on cpu as the heads; got meta"),
        ({}, {"attn_mask_type": "padding", "attention_mask": [MASK]}, "or a pair of queries and keys"),
        ({}, {"attn_mask_type": "padding", "attention_mask": (MASK,) * 3}, "of queries and of keys; got 3"),
        ({}, {"attention_mask": MASK}, "leave it out"),
        ({}, {"attn_mask_type": "padding"}, "need cu_seqlens"),
        ({}, {"attn_mask_type": "padding", "attention_mask": MASK.int()}, "bool (2, 7)"),
        ({}, {"attn_mask_type": "padding", "attention_mask": MASK[:, :6]}, "got (2, 6)"),
        ({}, {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 7])}, "sequences + 1"),
        ({}, {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0.0, 3.0, 7.0])}, "integers"),
        ({}, {"attn_mask_type": "padding", "cu_seqlens_q": torch.tensor([0, 8, 9])}, "for 7 tokens in each row"),
        ({}, {"attn_mask_type": "arbitrary"}, "needs one attention_mask"),
        ({}, {"attn_mask_type": "arbitrary", "attention_mask": MASK}, "broadcasts to (2, 4, 7, 7)"),
        ({}, {"window_size": (1, -2)}, "window_size is (1, -2)"),
        (
            {},
            {"cu_seqlens_q": torch.tensor([0, 4, 9])},
            "cu_seqlens are for packed sequences ('thd') and types of padd",
        ),
    ],
)
@pytest.mark.parametrize("recipe", [None, duotone.Float8CurrentScaling(fp8_dpa=True)])
def test_a_wrong_call_is_one_line(recipe, changed, options, message) -> None:
    inputs = {"query": heads(), "key": heads(), "value": heads(), **changed}
    with pytest.raises(UserError) as error:
        module(name="a.core", recipe=recipe)(*inputs.values(), **options)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_packed_sequences_need_their_edges_and_no_mask() -> None:
    packed = [torch.randn(7, 4, 8) for _ in range(3)]
    attention = DotProductAttention(HEADS, WIDTH, qkv_format="thd")
    for inputs, message in (
        ({}, "need cu_seqlens"),
        ({"cu_seqlens_q": edges((3, 4)), "cu_seqlens_kv": edges((7,))}, "of equal lengths; got 3 and 2"),
        ({"cu_seqlens_q": edges((3, 5))}, "got [0, 3, 8] for 7 tokens"),
        ({"cu_seqlens_q": edges((3, 4)), "attention_mask": MASK}, "leave it out"),
        ({"cu_seqlens_q": edges((3, 4)), "attn_mask_type": "arbitrary"}, "takes no packed sequences"),
    ):
        with pytest.raises(UserError) as error:
            attention(*packed, **inputs)
        assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["padding_causal", "padding_causal_bottom_right"])
def test_edges_that_cannot_be_read_end_with_the_tokens(monkeypatch, kind) -> None:
    """On a GPU they are not waited for. The sequence at the end is as long as there are tokens."""
    packed = [torch.randn(7, 4, 8) for _ in range(3)]
    attention = DotProductAttention(HEADS, WIDTH, qkv_format="thd", attn_mask_type=kind)
    expected = attention(*packed, cu_seqlens_q=edges((3, 4)))
    monkeypatch.setattr(masks, "checked_edges", lambda cu_seqlens, *_: cu_seqlens)
    assert torch.equal(attention(*packed, cu_seqlens_q=edges((3, 40, 2))), expected)
    rows = [x[None].expand(2, -1, -1, -1) for x in packed]
    padded = module(attn_mask_type=kind)
    assert torch.equal(padded(*rows, cu_seqlens_q=edges((9, 3))), padded(*rows, cu_seqlens_q=edges((7, 3))))

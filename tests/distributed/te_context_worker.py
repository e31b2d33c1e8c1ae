"""Sequences over a `cp_group`, as scripts for Transformer Engine share them, against one process."""

import copy
import itertools
import pickle
import sys
from pathlib import Path
from typing import Any

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import check
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel

from duotone.compat import te as compat

compat.install()

import transformer_engine.pytorch as te  # noqa: E402
import transformer_engine_torch as tex  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import (  # noqa: E402
    get_batch_on_this_cp_rank,
)

WIDTH, HEADS, GROUPS, BATCH = 32, 4, 2, 3
EDGES = [0, 8, 20, 24]
PADDED = [0, 8, 24, 32]
THD = {"qkv_format": "thd", "attn_mask_type": "padding"}
REAL = [0, 5, 17, 24]
"""Of sequences with 5, 12 and 7 tokens, padded to 8, 16 and 8."""


def rows(edges: list[int]) -> list[int]:
    """The tokens of this rank: the first and the last of four chunks of each sequence, or the two between."""
    pieces = []
    for start, end in itertools.pairwise(edges):
        chunks = torch.arange(start, end).chunk(4)
        pieces += [chunks[0], chunks[3]] if dist.get_rank() == 0 else [chunks[1], chunks[2]]
    return torch.cat(pieces).tolist()


def layer(layout: str, mask: str, **options: Any) -> nn.Module:
    torch.manual_seed(11)
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, "num_gqa_groups": GROUPS, **options}
    return te.TransformerLayer(
        WIDTH,
        2 * WIDTH,
        HEADS,
        attn_input_format=layout,
        self_attn_mask_type=mask,
        params_dtype=torch.float32,
        **options,
    )


def run(m: nn.Module, x: Tensor, dy: Tensor, **options: Any) -> list[Tensor]:
    """The output, the gradient of x, and those of parameters."""
    x = x.clone().requires_grad_()
    y = m(x, **options)
    y.backward(dy)
    gradients = [p.grad for p in m.parameters()]
    m.zero_grad()
    return [y.detach(), x.grad, *gradients]


def compare(m: nn.Module, x: Tensor, axis: int, edges: list[int], bound: float, **options: Any) -> None:
    """All tokens on one rank, then each rank's tokens in the group."""
    dy = torch.randn_like(x)
    want = run(m, x, dy, **options)
    index = torch.tensor(rows(edges))
    m.set_context_parallel_group(dist.group.WORLD, [0, 1], None)
    result = run(m, *(each.index_select(axis, index) for each in (x, dy)), **options)
    m.set_context_parallel_group(None)
    for gradient in result[2:]:
        dist.all_reduce(gradient)
    local = [each.index_select(axis, index) for each in want[:2]]
    for one, other in zip(result, [*local, *want[2:]], strict=True):
        assert one.shape == other.shape
        error = (one - other).norm() / other.norm().clamp(min=1)  # gradients of the bias of keys are noise around 0
        assert error <= bound, error


@check
def layers_compute_what_one_process_computes(folder: Path) -> None:
    angles = te.RotaryPositionEmbedding(WIDTH // HEADS)(EDGES[-1])
    lengths = torch.tensor(EDGES, dtype=torch.int32)
    cases = [
        ("sbhd", "causal", {}),
        ("bshd", "no_mask", {"rotary_pos_emb": angles, "cu_seqlens_q": lengths, "max_seqlen_q": 24}),
        ("bshd", "causal", {"rotary_pos_emb": angles, "window_size": (5, 0)}),
        ("bshd", "padding", {"cu_seqlens_q": torch.tensor([0, 24, 41, 60]), "rotary_pos_emb": angles}),
        ("thd", "padding", {"rotary_pos_emb": angles, "cu_seqlens_q": lengths, "cu_seqlens_kv": lengths}),
        ("thd", "padding_causal", {"cu_seqlens_q": lengths, "pad_between_seqs": True, "cu_seqlens_q_padded": lengths}),
    ]
    for layout, mask, options in cases:
        shape = {"sbhd": (24, BATCH), "bshd": (BATCH, 24), "thd": (24,)}[layout]
        x, axis = torch.randn(*shape, WIDTH), int(layout == "bshd")
        compare(layer(layout, mask), x, axis, EDGES if layout == "thd" else [0, 24], 1e-5, **options)


@check
def padding_between_sequences_is_not_seen(folder: Path) -> None:
    """Against torch's attention to each sequence alone. Also on one rank."""
    core = te.DotProductAttention(HEADS, 8, num_gqa_groups=GROUPS, attn_mask_type="padding_causal", qkv_format="thd")
    heads = [torch.randn(PADDED[-1], count, 8) for count in (HEADS, GROUPS, GROUPS)]
    want = torch.zeros(PADDED[-1], HEADS * 8)
    for start, (first, end) in zip(PADDED, itertools.pairwise(REAL), strict=False):
        part = slice(start, start + end - first)
        q, k, v = (x[part].transpose(0, 1)[None] for x in heads)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        want[part] = out[0].transpose(0, 1).flatten(1)
    lengths = {"cu_seqlens_q": torch.tensor(REAL), "cu_seqlens_kv": torch.tensor(REAL)}
    lengths |= {f"{name}_padded": torch.tensor(PADDED) for name in lengths}
    torch.testing.assert_close(core(*heads, **lengths), want)
    core.set_context_parallel_group(dist.group.WORLD)
    index = rows(PADDED)
    torch.testing.assert_close(core(*[x[index] for x in heads], **lengths), want[index])


@check
def layers_turn_heads_by_their_place_in_padded_sequences(folder: Path) -> None:
    """Real tokens of a padded batch give what they give without padding, on one rank and on two."""
    m, x = layer("thd", "padding_causal"), torch.randn(PADDED[-1], WIDTH)
    options = {"rotary_pos_emb": te.RotaryPositionEmbedding(WIDTH // HEADS)(16)}
    real = [start + i for start, n in zip(PADDED, (5, 12, 7), strict=False) for i in range(n)]
    want = m(x[real], cu_seqlens_q=torch.tensor(REAL), **options)
    options |= {"cu_seqlens_q": torch.tensor(REAL), "cu_seqlens_q_padded": torch.tensor(PADDED)}
    torch.testing.assert_close(m(x, **options)[real], want)
    dy = torch.zeros_like(x)
    dy[real] = torch.randn(len(real), WIDTH)
    index = torch.tensor(rows(PADDED))
    whole = run(m, x, dy, **options)
    m.set_context_parallel_group(dist.group.WORLD)
    y, dx, *gradients = run(m, x[index], dy[index], **options)
    torch.testing.assert_close(y, whole[0][index])
    torch.testing.assert_close(dx, whole[1][index])
    for gradient, other in zip(gradients, whole[2:], strict=True):
        dist.all_reduce(gradient)
        torch.testing.assert_close(gradient, other, atol=1e-5, rtol=1e-4)


@check
def a_recompute_inside_of_a_layer_has_its_padded_lengths(folder: Path) -> None:
    """Also of attention alone, where the lengths came with the call of the layer."""
    options = {"rotary_pos_emb": te.RotaryPositionEmbedding(WIDTH // HEADS)(16)}
    options |= {"cu_seqlens_q": torch.tensor(REAL), "cu_seqlens_q_padded": torch.tensor(PADDED)}
    index = torch.tensor(rows(PADDED))
    x, dy = torch.randn(2, PADDED[-1], WIDTH)[:, index]
    results = []
    for wrapped in ("", "self_attention", "core_attention"):
        m = layer("thd", "padding_causal")
        m.set_context_parallel_group(dist.group.WORLD)
        if wrapped == "self_attention":
            m.self_attention = checkpoint_wrapper(m.self_attention)
        elif wrapped:
            m.self_attention.core_attention = checkpoint_wrapper(m.self_attention.core_attention)
        results.append(run(m, x, dy, **options))
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


@check
def second_gradients_travel_too(folder: Path) -> None:
    """A penalty on gradients, over a product that torch differentiates twice, against one process."""
    core = te.DotProductAttention(HEADS, 8, attn_mask_type="causal", qkv_format="bshd")
    heads = [torch.randn(1, 16, HEADS, 8, dtype=torch.float64) for _ in range(3)]
    index, of_query = torch.tensor(rows([0, 16])), []
    for group in (None, dist.group.WORLD):
        core.set_context_parallel_group(group)
        leaves = [x if group is None else x[:, index] for x in heads]
        leaves = [x.clone().requires_grad_() for x in leaves]
        with sdpa_kernel(SDPBackend.MATH):
            first = torch.autograd.grad(core(*leaves).square().sum(), leaves, create_graph=True)
        of_query.append(torch.autograd.grad(sum(each.square().sum() for each in first), leaves[0])[0])
    torch.testing.assert_close(of_query[1], of_query[0][:, index])


@check
def attention_in_fp8_runs_over_ranks(folder: Path) -> None:
    """Each rank has its own scales of heads and of tokens. FP8 itself loses 0.11 of these gradients."""
    for recipe in (Float8CurrentScaling(fp8_dpa=True, fp8_mha=True), DelayedScaling(fp8_dpa=True)):
        m, x = layer("bshd", "causal"), torch.randn(BATCH, 24, WIDTH)
        with te.autocast(recipe=recipe):
            compare(m, x, 1, [0, 24], 0.2)


@check
def compiled_layers_are_eager_layers(folder: Path) -> None:
    m, index = layer("bshd", "causal"), rows([0, 24])
    x, dy = (torch.randn(BATCH, 24, WIDTH)[:, index] for _ in range(2))
    m.set_context_parallel_group(dist.group.WORLD)
    options = {"rotary_pos_emb": te.RotaryPositionEmbedding(WIDTH // HEADS)(24)}
    want = run(m, x, dy, **options)
    result = run(torch.compile(m, backend="aot_eager", fullgraph=True), x, dy, **options)
    for one, other in zip(result, want, strict=True):
        torch.testing.assert_close(one, other)


@check
def a_batch_is_cut_as_layers_take_it(folder: Path) -> None:
    group = dist.group.WORLD
    for layout, edges, shape in (("thd", EDGES, (1, 24)), ("thd", EDGES, (24,)), ("bshd", [0, 24], (BATCH, 24))):
        x = torch.randn(shape)
        axis = x.dim() - 1
        want = x.index_select(axis, torch.tensor(rows(edges)))
        for ranks in (group, None):
            parts = get_batch_on_this_cp_rank(torch.tensor(edges), x, -x, None, cp_group=ranks, qvk_format=layout)
            assert torch.equal(parts[0], want) and torch.equal(parts[1], -want) and parts[2] is None
    indices = tex.thd_get_partitioned_indices(torch.tensor(EDGES), EDGES[-1], 2, dist.get_rank())
    assert indices.tolist() == rows(EDGES) and indices.dtype is torch.int32
    parts = get_batch_on_this_cp_rank(
        torch.tensor(EDGES), torch.randn(1, 24, 3), torch.arange(24), torch.arange(24)[None]
    )
    assert parts[0].shape == (1, 12, 3) and parts[1].tolist() == rows(EDGES) == parts[2][0].tolist()
    x = torch.randn(24, BATCH)
    of_other = get_batch_on_this_cp_rank(None, x, x, x, group, "sbhd", cp_rank=1 - dist.get_rank())
    assert sorted(rows([0, 24]) + [x[:, 0].tolist().index(v) for v in of_other[2][:, 0].tolist()]) == [*range(24)]


@check
def what_cannot_be_shared_is_one_line(folder: Path) -> None:
    """On the CPU, whose values are read. A GPU asserts them, which ends its process."""
    world = dist.group.WORLD
    core = te.DotProductAttention(HEADS, 8, qkv_format="bshd", cp_group=world)
    mask, edges = torch.zeros(1, 8, dtype=torch.bool, device="cpu"), torch.tensor([0, 8, 16], device="cpu")

    def heads(tokens: int) -> list[Tensor]:
        return [torch.ones(1, tokens, HEADS, 8)] * 3

    def packed(tokens: int) -> list[Tensor]:
        return [x[0] for x in heads(tokens)]

    def lengths(padded: object) -> dict[str, object]:
        return {"cu_seqlens_q": edges, "cu_seqlens_q_padded": padded, **THD}

    def few_rows(cp_group: object) -> None:
        m = layer("thd", "padding", device="cpu")
        m.set_context_parallel_group(cp_group)
        m(torch.randn(8, WIDTH), rotary_pos_emb=torch.ones(12, 8), cu_seqlens_q=torch.tensor([0, 16]))

    cases = {
        "do not divide": lambda: te.DotProductAttention(3, 8, cp_group=world),
        "one process group": lambda: core.set_context_parallel_group([world, world]),
        "'a2a'": lambda: core.set_context_parallel_group(world, cp_comm_type="ring"),
        "multiple of 4 tokens": lambda: core(*heads(3)),
        "call set_context_parallel_group": lambda: pickle.loads(pickle.dumps(core))(*heads(4)),
        "no attention_mask": lambda: core(*heads(8), mask, attn_mask_type="padding"),
        "key_layer is missing": lambda: core(heads(8)[0]),
        "takes query, key and value": lambda: core(torch.ones(1, 8, 2 * HEADS, 8), *heads(8)[1:]),
        "one of cu_seqlens_q_padded": lambda: core(*packed(8), cu_seqlens_kv=edges, **lengths(edges)),
        "cu_seqlens_kv_padded comes without": lambda: core(*packed(8), cu_seqlens_kv_padded=edges, **THD),
        "longer than its place": lambda: core(*packed(8), **lengths(torch.tensor([0, 4, 16]))),
        "in ascending order": lambda: core(*packed(8), **lengths(torch.tensor([0, 32, 16]))),
        "give a tensor": lambda: core(*packed(8), **lengths([0, 8, 16])),
        "integers": lambda: core(*packed(8), **lengths(torch.tensor([0.0, 8.5, 16.0]))),
        "of equal lengths": lambda: core(*packed(8), **lengths(torch.tensor([0, 8, 12, 16]))),
        "for 12 positions": lambda: few_rows(world),
        "cp_rank is 2": lambda: get_batch_on_this_cp_rank(edges, mask, mask, cp_rank=2),
    }
    for text, call in cases.items():
        with torch.device("cpu"):
            checks.refused(call, text)
    assert core.cp_group and copy.deepcopy(core).cp_group == core.cp_group


if __name__ == "__main__":
    assert "transformer_engine" in sys.modules
    checks.main()

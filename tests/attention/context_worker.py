"""Attention under torch's context parallelism against one process. CPUs get torch's ring over their own kernel."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any
from unittest import mock

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import check
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from duotone import autocast, recipes
from duotone.attention import DotProductAttention, MultiheadAttention, TransformerLayer, picks
from duotone.dispatch.attention import NEVER, AttentionProblem, LeastTokens
from duotone.errors import RecipeError

aten, SDPA = torch.ops.aten, F.scaled_dot_product_attention
TOKENS, WIDTH, HEADS = 64, 128, 2
DTYPE = torch.bfloat16 if checks.DEVICE == "cuda" else torch.float32
BOUND = 3e-2 if checks.DEVICE == "cuda" else 1e-5
"""Of the norm of an error: sums of each ring step are merged in another order."""


MOVED = 5e-2
"""Blocks of 32 tokens hold other tokens where ranks have fewer in a row, so weight gradients have other codes."""

FP8 = 0.2
"""Projections of a rank's tokens have scales of that rank. FP8 itself loses 0.11 of these gradients."""


class RingOnCPU(torch.autograd.Function):
    """torch's ring over the kernel of CPUs, for which it has no handler."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None) -> Tensor:
        op = aten._scaled_dot_product_flash_attention_for_cpu.default
        ctx.options = {"is_causal": causal, "dropout_p": 0.0, "scale": scale}
        out, sums = ring._templated_ring_attention(
            dist.group.WORLD, 2, op, query=query, key=key, value=value, **ctx.options
        )
        ctx.save_for_backward(query, key, value, out, sums)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        names = ("query", "key", "value", "out", "logsumexp")
        saved = dict(zip(names, ctx.saved_tensors, strict=True))
        of_heads = ring._templated_ring_attention_backward(
            dist.group.WORLD, 2, op, grad_out=gradient.contiguous(), grad_out_name="grad_out", **saved, **ctx.options
        )
        return *of_heads[:3], None, None


def scaled_dot_product_attention(query: Any, key: Any, value: Any, **options: Any) -> Any:
    heads = [x.to_local().contiguous() for x in (query, key, value)]
    assert not options["dropout_p"] and options.get("attn_mask") is None
    heads[1:] = [x.repeat_interleave(heads[0].shape[1] // x.shape[1], 1) for x in heads[1:]]
    out = RingOnCPU.apply(*heads, options["is_causal"], options["scale"])
    return DTensor.from_local(out, query.device_mesh, [Shard(2)], run_check=False)


@wraps(SDPA)  # torch goes by its name
def of_own_tokens(query: Any, key: Any, value: Any, **options: Any) -> Any:
    """Attention of a rank to its own tokens. No graph holds the backward of `RingOnCPU`."""
    out = SDPA(*[x.to_local() for x in (query, key, value)], **options)
    return DTensor.from_local(out, query.device_mesh, [Shard(2)], run_check=False)


@contextmanager
def parallel(
    tensors: list[Tensor], dims: list[int], on_cpu: Callable[..., Any] = scaled_dot_product_attention
) -> Iterator[None]:
    """The tensors are shards of tokens meanwhile, as torch balances them, and attention goes round."""
    shim = mock.patch.object(F, "scaled_dot_product_attention", on_cpu)
    with shim if checks.DEVICE == "cpu" else warnings.catch_warnings():
        with context_parallel(checks.mesh(), buffers=tensors, buffer_seq_dims=dims):
            yield


def near(result: Tensor, want: Tensor, what: str, bound: float) -> None:
    assert result.shape == want.shape, f"{what}: {result.shape}, {want.shape}"
    error = (result - want).float().norm() / want.float().norm()
    assert error <= bound, f"{what}: {error}"


def compare(
    m: nn.Module,
    inputs: list[Tensor],
    what: str,
    bound: float = BOUND,
    options: dict[str, Any] | None = None,
    shards_of: dict[str, int] | None = None,
) -> None:
    """Outputs and gradients of all tokens of (tokens, ...), and of parameters, against those of one process.

    `shards_of` are the options that a rank has a shard of, and along which dimension.
    """
    options, shards_of = options or {}, shards_of or {}
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = m(*leaves, **options)
    dy = torch.randn_like(want)
    want.backward(dy)
    of_parameters = [parameter.grad for parameter in m.parameters()]
    m.zero_grad()
    shards = [*(x.clone() for x in inputs), dy.clone(), want.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]
    cut = {name: options[name].clone() for name in shards_of}
    with parallel([*shards, *cut.values()], [0] * len(shards) + list(shards_of.values())):
        leaves = [x.clone().requires_grad_() for x in shards[: len(inputs)]]
        y = m(*leaves, **{**options, **cut})
        y.backward(shards[len(inputs)])
        for at, (result, right) in enumerate(
            zip([y, *(x.grad for x in leaves)], shards[len(inputs) + 1 :], strict=True)
        ):
            near(result, right, f"{what} {at}", bound)
    for parameter, right in zip(m.parameters(), of_parameters, strict=True):
        dist.all_reduce(parameter.grad)  # each rank saw its tokens
        near(parameter.grad, right, f"{what}, gradient of a parameter", bound)


@check
def heads_go_round_and_give_the_attention_of_one_process(folder: Path) -> None:
    for kind, groups in itertools.product(("causal", "no_mask"), (2, 1)):
        m = DotProductAttention(HEADS, 64, num_gqa_groups=groups, attn_mask_type=kind)
        ring._cp_options.enable_load_balance = kind == "causal"
        heads = [torch.randn(TOKENS, 2, count, 64, dtype=DTYPE) for count in (HEADS, groups, groups)]
        compare(m, heads, f"{kind}, {groups}")


@check
def layers_under_recipes_go_round(folder: Path) -> None:
    ring._cp_options.enable_load_balance = True
    for recipe, bound in (("bf16", BOUND), ("mxfp8", MOVED)):
        options = {"attention_dropout": 0.0, "recipe": recipes.load(recipe), "params_dtype": DTYPE, "bias": False}
        m = MultiheadAttention(WIDTH, HEADS, **options)
        angles = torch.rand(TOKENS, 64)
        layer = TransformerLayer(WIDTH, 256, HEADS, hidden_dropout=0.0, **options)
        x = [torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)]
        compare(m, x, f"heads, {recipe}", bound, {"rotary_pos_emb": angles}, {"rotary_pos_emb": 0})
        compare(layer, x, f"layer, {recipe}", bound)


LOW = recipes.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)
ONLY_HEADS = recipes.RuleRecipe(
    rules=tuple(recipes.Rule(module_type="dpa", tensor_type=each, format="fp8_e4m3_tensor") for each in ("qkv", "s")),
)
ALL_FP8 = recipes.RuleRecipe(rules=(recipes.Rule(module_type="dpa", format="fp8_e4m3_tensor"),))
CODES = {
    "current": (LOW, BOUND),
    "keys less their mean": (replace(LOW, dpa_center_keys=True), BOUND),
    "backward in high precision": (
        replace(LOW, backward_override="dequantized"),
        2e-2,
    ),  # O is kept under a local scale
    "scales of the step before": (recipes.DelayedScaling(fp8_dpa=True), BOUND),
    "a scale for each row": (recipes.MXFP8BlockScaling(fp8_dpa=True), BOUND),
    "all in FP8": (ALL_FP8, 5e-2),  # dS has a scale for each tile of a rank's queries
}
"""Recipes, and bounds of what differs from one process. Codes of query, key, value and dO are those of one process."""


@check
def codes_go_round_and_give_the_fp8_attention_of_one_process(folder: Path) -> None:
    for name, (recipe, bound) in CODES.items():
        for kind in ("causal", "no_mask") if recipe is LOW else ("causal",):
            m = DotProductAttention(HEADS, 64, num_gqa_groups=1, attn_mask_type=kind, recipe=recipe)
            assert m.requested(recipe)
            ring._cp_options.enable_load_balance = kind == "causal"
            heads = [torch.randn(TOKENS, 2, count, 64, dtype=DTYPE) for count in (HEADS, 1, 1)]
            compare(m, heads, f"{name}, {kind}", bound=max(bound, BOUND))


@check
def windows_of_codes_reach_over_ranks(folder: Path) -> None:
    for window, kind, is_balanced in (
        ((5, 0), "causal", True),
        ((40, 7), "no_mask", False),
        ((-1, 3), "no_mask", True),
    ):
        ring._cp_options.enable_load_balance = is_balanced
        m = DotProductAttention(HEADS, 64, num_gqa_groups=1, attn_mask_type=kind, window_size=window, recipe=LOW)
        heads = [torch.randn(TOKENS, 2, count, 64, dtype=DTYPE) for count in (HEADS, 1, 1)]
        compare(m, heads, f"{window}, {is_balanced}")


@check
def quantized_projections_go_round(folder: Path) -> None:
    ring._cp_options.enable_load_balance = True
    recipe = recipes.Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)
    m = MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, recipe=recipe, params_dtype=DTYPE, bias=False)
    angles, x = {"rotary_pos_emb": torch.rand(TOKENS, 64)}, [torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)]
    compare(m, x, "fp8_mha", FP8, angles, {"rotary_pos_emb": 0})
    x = torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)
    with parallel([x], [0]), torch.no_grad():
        outputs = []
        for each in (recipe, LOW):  # heads are encoded once, under the scale of all ranks, by both
            with autocast(recipe=each):
                outputs.append(m(x))
        near(*outputs, "encoded once", 0.0)


def random_heads(*lead: int) -> list[Tensor]:
    return [torch.randn(*lead, count, 64, dtype=DTYPE) for count in (2 * HEADS, HEADS, HEADS)]


def padding() -> Tensor:
    """Two sequences: one has its padding at the start and at random, the other one all of the second half."""
    mask = torch.rand(2, TOKENS) < 0.2
    mask[0, : TOKENS // 4], mask[1] = True, torch.arange(TOKENS) >= TOKENS // 2
    return mask


@check
def masks_of_codes_reach_over_ranks(folder: Path) -> None:
    """Masks of padding are shards, as tokens are. Arbitrary ones have a rank's rows; lengths are those of all ranks."""
    blocks = torch.rand(2, 1, TOKENS // 8, TOKENS // 8) < 0.5
    edges = torch.tensor([0, 5, 5, TOKENS // 2 + 3, TOKENS - 2])  # one is empty, and two tokens are behind the last
    pairs = {"attention_mask": blocks.repeat_interleave(8, 2).repeat_interleave(8, 3)}
    lengths = {"cu_seqlens_q": torch.tensor([0, TOKENS - 3, TOKENS + 4])}
    packed = {"cu_seqlens_q": edges, "qkv_format": "thd"}
    shards = {"attention_mask": 1}
    for kind, window, options, shards_of, is_balanced in (
        ("padding", None, {"attention_mask": padding()}, shards, False),
        ("padding_causal", None, {"attention_mask": padding()}, shards, True),
        ("padding_causal", (9, 0), {"attention_mask": padding()}, shards, True),
        ("padding_causal_bottom_right", None, lengths, {}, True),
        ("arbitrary", (20, 4), pairs, {"attention_mask": 2}, True),
        ("padding_causal", (11, 0), packed, {}, True),
        ("padding", None, packed, {}, False),
    ):
        ring._cp_options.enable_load_balance = is_balanced
        m = DotProductAttention(
            2 * HEADS, 64, num_gqa_groups=HEADS, attn_mask_type=kind, window_size=window, recipe=LOW, softmax_scale=0.2
        )
        lead = (TOKENS,) if "qkv_format" in options else (TOKENS, 2)
        compare(m, random_heads(*lead), f"{kind}, {window}, {list(options)}", BOUND, options, shards_of)


@check
def packed_tokens_are_turned_by_their_places(folder: Path) -> None:
    ring._cp_options.enable_load_balance = True
    options = {"attn_mask_type": "padding_causal", "qkv_format": "thd", "attention_dropout": 0.0, "bias": False}
    m = MultiheadAttention(WIDTH, HEADS, recipe=ONLY_HEADS, params_dtype=DTYPE, **options)
    keywords = {"cu_seqlens_q": torch.tensor([0, 13, TOKENS - 7]), "rotary_pos_emb": torch.rand(TOKENS, 64)}
    compare(m, [torch.randn(TOKENS, WIDTH, dtype=DTYPE)], "packed", BOUND, keywords)


@check
def what_codes_do_not_serve_goes_round_in_high_precision(folder: Path) -> None:
    query, key, value = random_heads(TOKENS, 1)
    options = {"attn_mask_type": "no_mask", "num_gqa_groups": HEADS}
    m = DotProductAttention(2 * HEADS, 64, recipe=LOW, **options)
    strict = DotProductAttention(2 * HEADS, 64, recipe=replace(LOW, strict=True), **options)
    with parallel([query, key, value], [0] * 3), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        heads = query, key[1:], value[1:]
        with suppress(Exception):  # of torch's ring
            m(*heads)
        assert any("context_parallel has no products of codes with a cache" in str(one.message) for one in caught)
        try:
            strict(*heads)
        except RecipeError as error:
            assert "context_parallel" in str(error), error
        else:
            raise AssertionError("attention in high precision was not refused")


@check
def ranks_agree_on_what_pays(folder: Path) -> None:
    """Also where one of them is of a kind that has no measurements: else one waits for the others for ever."""
    recipe, counts = replace(LOW, dpa_min_tokens="measured"), []
    is_first = dist.get_rank() == 0
    for tokens in (NEVER, 2):
        least = LeastTokens(tokens, tokens, NEVER, NEVER)
        least_of_rank = least if is_first else LeastTokens(0, 0, 0, 0)
        answers = {"is_measured": lambda *_: is_first, "least_tokens": lambda *_: least_of_rank}  # noqa: B023
        with (
            mock.patch.multiple(AttentionProblem, **answers),
            mock.patch.multiple(picks, HALF=(DTYPE,), MEASURED_HEADS=0, RING_TOKENS=0),
        ):
            m = DotProductAttention(2 * HEADS, 64, num_gqa_groups=HEADS, recipe=recipe)
            heads = random_heads(TOKENS, 1)
            with parallel(heads, [0] * 3), torch.no_grad():
                m(*heads)
                counts.append(len(m._low_precision._stages))
                [pick] = {pick for *_, pick in m._picks.values()}
                assert pick == least._replace(training=NEVER), pick
                with torch.enable_grad():
                    m(*(x.clone().requires_grad_() for x in heads)).sum().backward()
    assert counts == [0, 1], counts
    assert len(m._low_precision._stages) == 1  # with gradients torch's ring is the faster one


def same_bits(m: nn.Module, compiled: Callable[..., Tensor], heads: list[Tensor], what: str, **options: Any) -> None:
    sides = []
    for run in (m, compiled):
        leaves = [x.clone().requires_grad_() for x in heads]
        y = run(*leaves, **options)
        y.square().sum().backward()
        sides.append((y, *(x.grad for x in leaves)))
    for result, right in zip(*sides, strict=True):
        near(result, right, what, 0.0)


@check
def compiled_code_sends_codes_round(folder: Path) -> None:
    """In one graph for all contexts of a kind, with the bits of eager code; also where another graph is older."""
    ring._cp_options.enable_load_balance = True
    centered = replace(LOW, dpa_center_keys=True)
    for kind, recipe, options in (("causal", centered, {}), ("padding_causal", LOW, {"attention_mask": padding()})):
        torch._dynamo.reset()
        m = DotProductAttention(2 * HEADS, 64, num_gqa_groups=HEADS, attn_mask_type=kind, recipe=recipe)
        counter, heads = CompileCounterWithBackend("aot_eager"), random_heads(TOKENS, 2)
        compiled = torch.compile(m, backend=counter, fullgraph=True)
        if kind == "causal":
            near(compiled(*heads), m(*heads), "one process", 0.0)
        before = counter.frame_count
        for _ in range(2):
            with parallel([*heads, *options.values()], [0, 0, 0, *(1 for _ in options)]):
                same_bits(m, compiled, heads, kind, **options)
        assert counter.frame_count == before + 1, f"{kind}: {counter.frame_count} graphs"


@check
def compiled_code_holds_torchs_ring_where_measurements_take_it(folder: Path) -> None:
    """Also after it has asked for the ranks, which are in cells of the function that torch calls then."""
    ring._cp_options.enable_load_balance = True
    heads = [torch.randn(TOKENS, 2, HEADS, 64, dtype=DTYPE) for _ in range(3)]
    m = DotProductAttention(HEADS, 64, attn_mask_type="causal", recipe=replace(LOW, dpa_min_tokens="measured"))
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(m, backend=counter, fullgraph=True)
    answers = {"is_measured": lambda *_: True, "least_tokens": lambda *_: LeastTokens(*[NEVER] * 4)}
    with mock.patch.multiple(AttentionProblem, **answers):
        for _ in range(2):
            with parallel(heads, [0] * 3, of_own_tokens):
                same_bits(m, compiled, heads, "the ring")
                assert not m._low_precision._stages
    assert counter.frame_count == 1, f"{counter.frame_count} graphs"


if __name__ == "__main__":
    checks.main()

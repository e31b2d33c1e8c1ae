"""Attention under torch's context parallelism against one process. CPUs get torch's ring over their own kernel."""

import itertools
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import checks
import torch
import torch.distributed as dist
import torch.nn.functional as F
from checks import check
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from duotone import autocast, recipes
from duotone.attention import DotProductAttention, MultiheadAttention, TransformerLayer
from duotone.errors import RecipeError

aten = torch.ops.aten
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


@contextmanager
def parallel(tensors: list[Tensor], dims: list[int]) -> Iterator[None]:
    """The tensors are shards of tokens meanwhile, as torch balances them, and attention goes round."""
    mesh = init_device_mesh(checks.DEVICE, (dist.get_world_size(),))
    shim = mock.patch.object(F, "scaled_dot_product_attention", scaled_dot_product_attention)
    with shim if checks.DEVICE == "cpu" else warnings.catch_warnings():
        with context_parallel(mesh, buffers=tensors, buffer_seq_dims=dims):
            yield


def near(got: Tensor, want: Tensor, what: str, bound: float) -> None:
    assert got.shape == want.shape, f"{what}: {got.shape}, {want.shape}"
    error = (got - want).float().norm() / want.float().norm()
    assert error <= bound, f"{what}: {error}"


def compare(m: nn.Module, inputs: list[Tensor], what: str, angles: Tensor | None = None, bound: float = BOUND) -> None:
    """Outputs and gradients of all tokens of (tokens, batch, ...), and of parameters, against those of one process."""
    options = {} if angles is None else {"rotary_pos_emb": angles}
    leaves = [x.clone().requires_grad_() for x in inputs]
    want = m(*leaves, **options)
    dy = torch.randn_like(want)
    want.backward(dy)
    of_parameters = [parameter.grad for parameter in m.parameters()]
    m.zero_grad()
    shards = [*(x.clone() for x in inputs), dy.clone(), want.detach().clone(), *(leaf.grad.clone() for leaf in leaves)]
    turned = [] if angles is None else [angles.clone()]
    with parallel([*shards, *turned], [0] * (len(shards) + len(turned))):
        mine = [x.clone().requires_grad_() for x in shards[: len(inputs)]]
        y = m(*mine, **({} if angles is None else {"rotary_pos_emb": turned[0]}))
        y.backward(shards[len(inputs)])
        for at, (got, right) in enumerate(zip([y, *(x.grad for x in mine)], shards[len(inputs) + 1 :], strict=True)):
            near(got, right, f"{what} {at}", bound)
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
        for layer, at in ((m, angles), (TransformerLayer(WIDTH, 256, HEADS, hidden_dropout=0.0, **options), None)):
            compare(layer, [torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)], f"{type(layer).__name__}, {recipe}", at, bound)


LOW = recipes.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)
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
    compare(m, [torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)], "fp8_mha", torch.rand(TOKENS, 64), FP8)
    x = torch.randn(TOKENS, 2, WIDTH, dtype=DTYPE)
    with parallel([x], [0]), torch.no_grad():
        outputs = []
        for each in (recipe, LOW):  # heads are encoded once, under the scale of all ranks, by both
            with autocast(recipe=each):
                outputs.append(m(x))
        near(*outputs, "encoded once", 0.0)


@check
def what_codes_do_not_serve_goes_round_in_high_precision(folder: Path) -> None:
    heads = [torch.randn(TOKENS, 1, HEADS, 64, dtype=DTYPE) for _ in range(3)]
    options = {"attn_mask_type": "padding"}
    masks = {"attention_mask": torch.zeros(1, TOKENS // dist.get_world_size(), dtype=torch.bool, device=checks.DEVICE)}
    m = DotProductAttention(HEADS, 64, recipe=LOW, **options)
    with parallel(heads, [0] * 3), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(AssertionError):  # torch's ring takes no mask
            m(*heads, **masks)
        assert any("context_parallel has no products of codes with a mask" in str(one.message) for one in caught)
        strict = recipes.Float8CurrentScaling(fp8_dpa=True, strict=True)
        try:
            DotProductAttention(HEADS, 64, recipe=strict, **options)(*heads, **masks)
        except RecipeError as error:
            assert "context_parallel" in str(error), error
        else:
            raise AssertionError("attention in high precision was not refused")


@check
def compiled_attention_does_not_send_codes_round(folder: Path) -> None:
    """Also where its graph is older than the context."""
    ring._cp_options.enable_load_balance = True
    recipe = recipes.Float8CurrentScaling(fp8_dpa=True, dpa_min_tokens=0)
    for is_older in (False, True):
        torch._dynamo.reset()
        heads = [torch.randn(TOKENS, 1, HEADS, 64, dtype=DTYPE) for _ in range(3)]
        m, plain = DotProductAttention(HEADS, 64, recipe=recipe), DotProductAttention(HEADS, 64)
        compiled = torch.compile(m, backend="aot_eager")
        if is_older:
            compiled(*heads)
        with parallel(heads, [0] * 3):
            near(compiled(*heads), plain(*heads), f"{is_older}", BOUND)


if __name__ == "__main__":
    checks.main()

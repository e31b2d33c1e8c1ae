"""The subject `attention`: causal attention of heads, forward alone, then forward and backward."""

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import duotone
from bench.timing.case import Candidate, Case, Settings, Shape, Subject, Work, require_multiple, written
from bench.timing.duel import clock_for
from duotone.dispatch.attention import KERNEL
from duotone.errors import UserError
from duotone.recipes import Recipe

CUDNN, FLASH, PLAIN = "cuDNN bf16", "FlashAttention-2 bf16", "torch bf16"
BACKENDS = {CUDNN: SDPBackend.CUDNN_ATTENTION, FLASH: SDPBackend.FLASH_ATTENTION}
TILES = ((64, 64, 4), (128, 64, 4), (128, 128, 8), (64, 128, 4), (128, 64, 8))
"""Queries, keys and warps of the kernel on codes that exist already, beside what the library takes."""

Heads = tuple[Tensor, Tensor, Tensor]


def flops(shape: Shape, products: int) -> float:
    """Of causal attention, half of the products of all pairs. Two products are those of forward, five of backward."""
    batch, tokens, heads, _, width = shape
    return products * batch * heads * tokens * tokens * width


def work(call: Callable[..., Tensor], heads: Heads, shape: Shape, trains: bool) -> Work:
    """`call` of query, key and value; with `trains` also their gradients."""
    if not trains:
        leaves = [x.detach() for x in heads]

        def forward() -> Tensor:
            with torch.no_grad():
                return call(*leaves)

        return Work(forward, amount=flops(shape, 2))
    gradient = torch.randn_like(call(*heads))

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(*heads), heads, gradient)

    return Work(both, amount=flops(shape, 7))


def of_torch(heads: Heads, shape: Shape, trains: bool, backend: SDPBackend | None) -> Work:
    """torch's attention over views of (batch, tokens, heads, width)."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        query, key, value = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shape[2] != shape[3])
        return out.transpose(1, 2).flatten(2)

    if backend is None:
        return work(call, heads, shape, trains)

    def pinned(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return call(q, k, v)

    return work(pinned, heads, shape, trains)


def of_recipe(recipe: Recipe, heads: Heads, shape: Shape, trains: bool) -> Work:
    """UserError where a GPU would run products by blocks of keys, which takes minutes."""
    _, _, count, groups, width = shape
    core = duotone.DotProductAttention(
        count, width, num_gqa_groups=groups, qkv_format="bshd", name="core", recipe=recipe
    )
    device = heads[0].device.type
    rows = core.plan_rows(recipe, device)
    slow = [row for row in rows if row.kernel == "blocks of keys"]
    if device == "cuda" and slow:
        raise UserError(f"{slow[0].gemm} runs by blocks of keys: {slow[0].reason}")
    torch.autograd.grad(core(*heads).sum(), heads)  # delayed scales start in a step that trains
    return work(core, heads, shape, trains)


def of_kernel(heads: Heads, shape: Shape, tiles: tuple[int, int, int]) -> Work:
    """The kernel alone, on codes that are there."""
    from duotone.kernels import attention

    codes = [x.detach().to(torch.float8_e4m3fn) for x in heads]
    one = torch.ones(1, device=heads[0].device)
    operands, scales = (codes[0], codes[1], codes[2].permute(2, 3, 0, 1).contiguous()), (one, one, one)
    scale = shape[-1] ** -0.5

    def call() -> object:
        return attention.attend(operands, scales, None, (scale, True, True, torch.bfloat16), tiles=tiles)

    return Work(call, amount=flops(shape, 2))


def variants(recipe: Recipe, trains: bool) -> dict[str, Recipe]:
    """What the plan picks under `fp8_dpa`, FP8 whatever its speed, and with the products of backward by cuDNN."""
    low = replace(recipe, fp8_dpa=True, dpa_min_tokens=0)
    recipes = {f"{recipe.name}, as picked": replace(recipe, fp8_dpa=True), f"{recipe.name} in FP8": low}
    if trains and recipe.kind != "fp8-delayed":
        recipes[f"{recipe.name} in FP8, backward by cuDNN"] = replace(low, backward_override="dequantized")
    return recipes


def candidates(settings: Settings, shape: Shape, trains: bool) -> list[Candidate]:
    batch, tokens, count, groups, width = shape
    require_multiple("HEADS", count, groups)
    query, key, value = (
        torch.randn(batch, tokens, each, width, device=settings.device, dtype=torch.bfloat16, requires_grad=True)
        for each in (count, groups, groups)
    )
    heads = query, key, value
    backends = BACKENDS.items() if settings.device == "cuda" else [(PLAIN, None)]
    plain = [
        Candidate(name, lambda backend=backend: of_torch(heads, shape, trains, backend)) for name, backend in backends
    ]
    of_duotone = [
        Candidate(name, lambda recipe=recipe: of_recipe(recipe, heads, shape, trains))
        for each in settings.recipes
        for name, recipe in variants(each, trains).items()
    ]
    kernels = [
        Candidate(f"{KERNEL} kernel, {written(tiles)}", lambda tiles=tiles: of_kernel(heads, shape, tiles))
        for tiles in TILES
        if settings.device == "cuda" and not trains
    ]
    return [*plain, *of_duotone, *kernels]


def cases(settings: Settings, shape: Shape) -> list[Case]:
    base = CUDNN if settings.device == "cuda" else PLAIN
    return [
        Case(
            f"attention {'forward and backward' if trains else 'forward'}",
            written(shape),
            base,
            clock_for(settings.device),
            lambda trains=trains: candidates(settings, shape, trains),
            unit="TFLOP/s",
            scale=1e-12,
        )
        for trains in (False, True)
    ]


ATTENTION = Subject(
    "attention",
    "Causal attention in bf16 and in the formats of recipes with fp8_dpa, casts included; recipes that need emulation "
    "are rows with the reason.",
    ("BATCH", "TOKENS", "HEADS", "GROUPS", "WIDTH"),
    {
        "cuda": ((2, 4096, 32, 8, 128), (1, 8192, 32, 8, 128), (1, 16384, 32, 8, 128), (1, 32768, 16, 4, 128)),
        "cpu": ((1, 256, 2, 1, 64),),
    },
    cases,
)

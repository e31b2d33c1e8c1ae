"""Attention in low precision against float64 code that quantizes and dequantizes the same operands."""

import math
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from duotone import formats, recipes
from duotone.attention import DotProductAttention
from duotone.recipes import Recipe, Rule, RuleRecipe


def dpa(**by_type: str) -> RuleRecipe:
    """Formats of attention's tensors: `do="fp8_e5m2_tensor"`, or `do="identity/fp8_e5m2_tensor"` for two directions."""
    rules = []
    for kind, names in by_type.items():
        row, _, col = names.partition("/")
        rules.append(Rule(module_type="dpa", tensor_type=kind, rowwise=row, columnwise=col or row))
    return RuleRecipe(rules=(*rules, Rule(module_type="", module="*.dpa_output", format="fp8_e4m3_tensor")))


E4M3, E5M2 = "fp8_e4m3_tensor", "fp8_e5m2_tensor"
RECIPES: dict[str, Recipe] = {
    "all": dpa(qkv=E4M3, s=E4M3, do=E5M2, dp=E5M2),
    "forward": dpa(qkv=E4M3, s=f"{E4M3}/identity"),
    "directions": dpa(qkv=f"{E4M3}/{E5M2}", s=f"{E5M2}/{E4M3}", do=f"identity/{E5M2}", dp=f"{E4M3}/identity"),
    "blocks": dpa(qkv="mxfp8_e4m3", s="mxfp8_e4m3", do="mxfp8_e5m2", dp="mxfp8_e4m3"),
    "rows": dpa(qkv="fp8_e4m3_row", s="fp8_e4m3_row", do="fp8_e4m3_row", dp="fp8_e4m3_row"),
    "squares": dpa(qkv="fp8_e4m3_128x128", s=E4M3, do="fp8_e4m3_128x128", dp="fp8_e4m3_128x128"),
}


@dataclass
class Case:
    """Shapes of a call, and what it masks; `seen` is written out by the test."""

    mask: str = "causal"
    queries: int = 200
    keys: int = 200
    heads: int = 4
    groups: int = 2
    width: int = 64
    window: tuple[int, int] | None = None
    dtype: torch.dtype = torch.float32

    def seen(self) -> Tensor:
        i, j = torch.arange(self.queries)[:, None], torch.arange(self.keys)
        if self.mask == "packed":
            return (i // 70 == j // 70) & (j <= i)
        if self.mask == "padding":
            return torch.stack([(i < 150) & (j < 150), (i < 60) & (j < 60)])[:, None]
        if self.mask == "arbitrary":
            return (i * 7 + j * 3) % 5 != 0
        seen = torch.ones(self.queries, self.keys, dtype=torch.bool)
        if self.mask == "causal":
            seen = j <= i
        return seen if self.window is None else seen & (i - j <= self.window[0])


CASES = {
    "causal": Case(),
    "all keys": Case("no_mask", queries=130, keys=300, groups=4),
    "one group": Case(groups=1, width=128),
    "window": Case(window=(40, 0)),
    "padding": Case("padding"),
    "packed": Case("packed"),
    "arbitrary": Case("arbitrary", groups=4),
    "width 96": Case(width=96, dtype=torch.bfloat16),
    "width 256": Case(width=256, queries=140, keys=140),
}


def heads_of(case: Case, seed: int = 0) -> list[Tensor]:
    """Query, key, value (batch, heads, tokens, width), and a gradient of the output."""
    generator = torch.Generator().manual_seed(seed)
    batch = 1 if case.mask == "packed" else 2
    shapes = [
        (case.heads, case.queries),
        (case.groups, case.keys),
        (case.groups, case.keys),
        (case.heads, case.queries),
    ]
    return [torch.randn(batch, *s, case.width, generator=generator).to(case.dtype) for s in shapes]


def run(core: DotProductAttention, case: Case, x: list[Tensor]) -> list[Tensor]:
    """Output and gradients, (batch, heads, tokens, width)."""
    options = {}
    if case.mask == "packed":
        options = {"qkv_format": "thd", "cu_seqlens_q": torch.tensor([0, 70, 140, 200])}
    if case.mask == "padding":
        options = {"attention_mask": torch.arange(200)[None] >= torch.tensor([[150], [60]])}
    if case.mask == "arbitrary":
        options = {"attention_mask": ~case.seen()}
    leaves = [(t[0] if case.mask == "packed" else t).transpose(-2, -3).contiguous().requires_grad_() for t in x[:3]]
    mask = options.pop("attention_mask", None)
    y = core(*leaves, mask, **options)
    y.backward(x[3].transpose(1, 2).reshape(y.shape))
    out = y.detach().unflatten(-1, (case.heads, -1))
    results = [out, *(t.grad for t in leaves)]
    return [(t[None] if case.mask == "packed" else t).transpose(1, 2) for t in results]


def core_for(case: Case, recipe: Recipe, **options) -> DotProductAttention:
    kind = "padding_causal" if case.mask == "packed" else case.mask
    shape = (case.heads, case.width)
    options = {"num_gqa_groups": case.groups, "window_size": case.window, "attn_mask_type": kind, **options}
    return DotProductAttention(*shape, qkv_format="bshd", name="a", recipe=recipe, **options)


def rounded(x: Tensor, name: str, each: int | None = None, scale: float | None = None, dtype=torch.float32) -> Tensor:
    """Quantized and dequantized along the last dimension: whole, or each matrix of the last two dimensions."""
    if name == "identity":
        return x.to(dtype).double()
    fmt = formats.get(name)
    factor = None if scale is None else torch.tensor([scale])
    if each is None:
        flat = x.to(dtype).reshape(-1, x.shape[-1])
        return (
            fmt.decode(fmt.encode(flat, scale=factor, propagate=True), torch.float32)[:, : x.shape[-1]]
            .view(x.shape)
            .double()
        )
    tiles = x.clone()
    for lead in range(x[..., 0, 0].numel()):
        matrix, out = x.reshape(-1, *x.shape[-2:])[lead], tiles.view(-1, *x.shape[-2:])[lead]
        for i in range(0, matrix.shape[0], each):
            for j in range(0, matrix.shape[1], each):
                tile = matrix[i : i + each, j : j + each]
                out[i : i + each, j : j + each] = rounded(tile, name, scale=scale)
    return tiles


def heads_rounded(x: Tensor, name: str) -> Tensor:
    """Heads in a format: each head by itself, unless one scale covers the tensor."""
    if name == "identity" or formats.get(name).block == formats.get(E4M3).block:
        return rounded(x, name, dtype=x.dtype)
    each = [rounded(head, name, dtype=x.dtype) for head in x.flatten(0, 1)]
    return torch.stack(each).view(x.shape)


def oracle(case: Case, recipe: Recipe, x: list[Tensor]) -> list[Tensor]:
    """Output and gradients in float64, from operands that are quantized at the same points."""
    kinds = {kind: recipe(duotone.QuantizerRole("dpa", kind, "a")) for kind in ("qkv", "s", "do", "dp")}
    names = {(kind, side): getattr(q, side).name for kind, q in kinds.items() for side in ("rowwise", "columnwise")}
    row, col = {}, {}
    for key, t, kind in zip(("q", "k", "v", "g"), x, ("qkv", "qkv", "qkv", "do"), strict=True):
        row[key] = heads_rounded(t, names[kind, "rowwise"])
        transposed = t.mT.contiguous()
        col[key] = heads_rounded(transposed, names[kind, "columnwise"]).mT
    repeat = case.heads // case.groups
    many = {k: t.repeat_interleave(repeat, 1) if k in "kv" else t for k, t in row.items()}
    many_col = {k: t.repeat_interleave(repeat, 1) if k in "kv" else t for k, t in col.items()}
    scale = case.width**-0.5
    scores = (many["q"] @ many["k"].mT * scale).masked_fill(~case.seen(), -math.inf)
    top, out = torch.full_like(scores[..., :1], -math.inf), torch.zeros_like(row["q"])
    parts = []
    for start in reversed(range(0, case.keys, 128)):
        block = slice(start, start + 128)
        top = torch.maximum(top, scores[..., block].amax(-1, keepdim=True))
        parts.append((block, top))
    top = top.masked_fill(top == -math.inf, 0)
    for block, running in parts:
        running = running.masked_fill(running == -math.inf, 0)
        p = probabilities((scores[..., block] - running).exp(), names["s", "rowwise"], case.dtype)
        out += (running - top).exp() * (p @ many_col["v"][..., block, :])
    total = (scores - top).exp().sum(-1, keepdim=True)
    out = torch.where(total == 0, 0, out / total).to(case.dtype)
    lse = torch.where(total == 0, 0, top + total.log())
    p = (scores - lse).exp()
    saved = rounded(out, E4M3, dtype=case.dtype)
    dp = many["g"] @ many["v"].mT
    ds = p * (dp - (many["g"] * saved).sum(-1, keepdim=True))
    tile = 128 if formats.get(names["dp", "rowwise"]).block == formats.get(E4M3).block else None
    dq, dk, dv = (torch.zeros_like(many[key]) for key in ("q", "k", "v"))
    for start in reversed(range(0, case.keys, 128)):
        block = slice(start, start + 128)
        p_col = probabilities(p[..., block].mT, names["s", "columnwise"], case.dtype)
        dv[..., block, :] = p_col @ many_col["g"]
        ds_row = scores_gradient(ds[..., block], names["dp", "rowwise"], tile, case.dtype)
        ds_col = scores_gradient(ds[..., block].mT, names["dp", "columnwise"], tile, case.dtype)
        dq += ds_row @ many_col["k"][..., block, :] * scale
        dk[..., block, :] = ds_col @ many_col["q"] * scale
    fold = [t.unflatten(1, (case.groups, repeat)).sum(2) for t in (dk, dv)]
    return [out.double(), dq, *fold]


def probabilities(p: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    if name == "identity":
        return p.to(dtype).double()
    if formats.get(name).block == formats.get(E4M3).block:
        return rounded(p, name, scale={E4M3: 256.0, E5M2: 32768.0}[name])
    return torch.stack([rounded(head, name) for head in p.flatten(0, -3)]).view(p.shape)


def scores_gradient(ds: Tensor, name: str, tile: int | None, dtype: torch.dtype) -> Tensor:
    if name == "identity":
        return ds.to(dtype).double()
    if tile is not None:
        return rounded(ds.contiguous(), name, each=tile)
    return torch.stack([rounded(head, name) for head in ds.flatten(0, -3)]).view(ds.shape)


def error(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


RUNS = [("all", case) for case in CASES] + [(recipe, "causal") for recipe in RECIPES if recipe != "all"]


@pytest.mark.parametrize(("recipe", "case"), [*RUNS, ("blocks", "padding"), ("squares", "arbitrary")])
def test_products_multiply_what_their_formats_hold(recipe, case) -> None:
    """Sums are fp32 in other orders, so a few codes fall to the other side of a boundary."""
    shape, formats = CASES[case], RECIPES[recipe]
    x = heads_of(shape)
    limit = 6e-3 if shape.dtype is torch.bfloat16 else 2e-3
    for result, expected in zip(run(core_for(shape, formats), shape, x), oracle(shape, formats, x), strict=True):
        assert error(result, expected) < limit


@pytest.mark.parametrize("recipe", [*RECIPES.values(), recipes.load("nvfp4-linear-fp8-dpa"), "fp8-current", "mxfp8"])
def test_gradients_point_where_those_of_float64_do(recipe) -> None:
    """Issue 21: a cosine of at least 0.99 at unit-normal inputs."""
    if isinstance(recipe, str):
        recipe = {"fp8-current": duotone.Float8CurrentScaling, "mxfp8": duotone.MXFP8BlockScaling}[recipe](fp8_dpa=True)
    case = Case(queries=300, keys=300)
    x = heads_of(case, 1)
    leaves = [t.double().requires_grad_() for t in x[:3]]
    y = F.scaled_dot_product_attention(*leaves, is_causal=True, enable_gqa=True)
    y.backward(x[3].double())
    plain = [y.detach(), *(t.grad for t in leaves)]
    for result, expected in zip(run(core_for(case, recipe), case, x), plain, strict=True):
        assert F.cosine_similarity(result.double().flatten(), expected.flatten(), dim=0) > 0.99

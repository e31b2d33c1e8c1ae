"""How far is attention in low precision from float64 attention on the same inputs?

python -m bench.attention_accuracy

Writes results/DATE-cpu-attention-accuracy.jsonl and prints the table of docs/attention.md. Products are emulated.
"""

import contextlib
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import duotone
from bench.timing.records import emit
from duotone import recipes
from duotone.files import publish_file
from duotone.recipes import Recipe, Rule, RuleRecipe

RESULTS = Path(__file__).parent / "results"
QUESTION = "relative error and cosine of causal attention against float64 attention of the unquantized inputs"
TOKENS, HEADS, GROUPS, WIDTH = 1024, 8, 2, 128
DATA = ("normal", "keys with a mean", "outliers in 2 channels")
FP8 = recipes.Float8CurrentScaling(fp8_dpa=True)


def rules(**by_type: str) -> Recipe:
    """One format for each tensor type, in both directions."""
    return RuleRecipe(rules=tuple(Rule(module_type="dpa", tensor_type=k, format=v) for k, v in by_type.items()))


E4M3, E5M2 = "fp8_e4m3_tensor", "fp8_e5m2_tensor"
RECIPES: dict[str, Recipe] = {
    "fp8-current, fp8_dpa": FP8,
    "+ dpa_center_keys": replace(FP8, dpa_center_keys=True),
    "+ dpa_rotate": replace(FP8, dpa_rotate=True),
    "+ both": replace(FP8, dpa_center_keys=True, dpa_rotate=True),
    "backward_override = dequantized": replace(FP8, backward_override="dequantized"),
    "dO in FP8 in dP too": rules(qkv=E4M3, s=E4M3, do=E5M2),
    "dS in FP8 too": rules(qkv=E4M3, s=E4M3, do=E5M2, dp=E5M2),
    "mxfp8, fp8_dpa": recipes.MXFP8BlockScaling(fp8_dpa=True),
    "nvfp4-linear-fp8-dpa": recipes.load("nvfp4-linear-fp8-dpa"),
}
RESULTS_OF = ("o", "dq", "dk", "dv")


def inputs(data: str) -> list[Tensor]:
    """Query, key and value (batch, heads, tokens, width) and the gradient of the output, fp32 with values of bf16."""
    generator = torch.Generator().manual_seed(0)
    heads = (HEADS, GROUPS, GROUPS, HEADS)
    q, k, v, do = (torch.randn(1, count, TOKENS, WIDTH, generator=generator) for count in heads)
    if data == "keys with a mean":
        k = k + 8 * torch.randn(1, GROUPS, 1, WIDTH, generator=generator)
    if data == "outliers in 2 channels":
        q[..., :2] *= 8
        k[..., :2] *= 8
    return [x.bfloat16().float() for x in (q, k, v, do)]


def measure(recipe: Recipe, data: str) -> dict[str, dict[str, float]]:
    """`error`: the norm of what is lost over that of the exact result. `cosine`: of the two."""
    *heads, do = inputs(data)
    core = duotone.DotProductAttention(HEADS, WIDTH, num_gqa_groups=GROUPS, name="core", recipe=recipe)
    leaves = [x.clone().requires_grad_() for x in heads]
    y = core(*(x.permute(2, 0, 1, 3) for x in leaves)).unflatten(-1, (HEADS, WIDTH)).permute(1, 2, 0, 3)
    y.backward(do)
    exact = [x.double().requires_grad_() for x in heads]
    query, key, value = exact
    z = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    z.backward(do.double())
    record: dict[str, dict[str, float]] = {"error": {}, "cosine": {}}
    pairs = [(y, z), *((a.grad, b.grad) for a, b in zip(leaves, exact, strict=True))]
    for name, (result, reference) in zip(RESULTS_OF, pairs, strict=True):
        assert result is not None and reference is not None
        result, reference = result.detach().double().flatten(), reference.detach().flatten()
        record["error"][name] = round(((result - reference).norm() / reference.norm()).item(), 5)
        record["cosine"][name] = round(F.cosine_similarity(result, reference, dim=0).item(), 5)
    return record


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Markdown, one row for each record."""
    rows = ["| data | recipe | o | dq | dk | dv | lowest cosine |", "|---|---|---|---|---|---|---|"]
    for record in records:
        numbers = [f"{record['error'][name]:.4f}" for name in RESULTS_OF]
        cells = [record["data"], f"`{record['recipe']}`", *numbers, f"{min(record['cosine'].values()):.4f}"]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-cpu-attention-accuracy.jsonl"
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        for data in DATA:
            for name, recipe in RECIPES.items():
                about = {"question": QUESTION, "shape": [TOKENS, HEADS, GROUPS, WIDTH], "data": data, "recipe": name}
                emit("cpu", {**about, **measure(recipe, data)})
    publish_file(path, lines.getvalue().encode())  # whole, or the record of an earlier run today stays
    print("\n".join(table(map(json.loads, lines.getvalue().splitlines()))))


if __name__ == "__main__":
    main()

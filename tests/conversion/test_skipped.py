"""What convert leaves in high precision: output heads of any name, and modules that hold matrices themselves."""

from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from causal import SIZES
from torch import Tensor, nn

import duotone
from duotone import recipes
from duotone.errors import RecipeError
from duotone.recipes import OUTPUT_HEAD, Rule
from later import Later

transformers = Later("transformers")

MXFP8 = recipes.load("mxfp8")
STRICT = recipes.MXFP8BlockScaling(strict=True)


def build(kind: type, config: type, **changes: object) -> nn.Module:
    return kind(config(**SIZES | changes))


def rows_of(model: nn.Module) -> dict[tuple[str, str], duotone.PlanRow]:
    return {(row.module, row.gemm): row for row in duotone.plan(model)}


class Shared(nn.Module):
    """A language model whose head is the embedding itself, as some of transformers' models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner = nn.Embedding(64, 32), nn.Linear(32, 32)

    def get_output_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.inner(self.embedding(tokens)), self.embedding.weight)


class Tied(nn.Module):
    """A head of an unusual name that shares the embedding's weight, in a model that tells nothing of itself."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.inner, self.scores = nn.Embedding(64, 32), nn.Linear(32, 32), nn.Linear(32, 64)
        self.scores.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("model", "head", "hidden"),
    [
        (
            lambda: build(transformers.BertForMaskedLM, transformers.BertConfig),
            "cls.predictions.decoder",
            "cls.predictions.transform.dense",
        ),
        (
            lambda: build(transformers.RobertaForMaskedLM, transformers.RobertaConfig),
            "lm_head.decoder",
            "lm_head.dense",
        ),
        (
            lambda: build(transformers.BertForMaskedLM, transformers.BertConfig, tie_word_embeddings=False),
            "cls.predictions.decoder",
            "bert.encoder.layer.1.output.dense",
        ),
        (Tied, "scores", "inner"),
    ],
    ids=["bert", "roberta", "untied", "tied"],
)
def test_an_output_head_of_any_name_stays_in_high_precision_unless_the_rules_say_otherwise(model, head, hidden) -> None:
    for rules, formats in ((OUTPUT_HEAD, {"identity"}), ((), {"mxfp8_e4m3"})):
        rows = duotone.plan(duotone.convert(model(), MXFP8, rules=rules))
        assert {plane for row in rows if row.module == head for plane in (row.a, row.b)} == formats
        assert {plane for row in rows if row.module == hidden for plane in (row.a, row.b)} == {"mxfp8_e4m3"}


def test_a_rule_of_the_users_own_goes_before_a_head_that_was_found() -> None:
    rules = [Rule(module="cls.*.decoder", format="fp8_e4m3_row")]
    rows = rows_of(duotone.convert(build(transformers.BertForMaskedLM, transformers.BertConfig), MXFP8, rules=rules))
    assert rows["cls.predictions.decoder", "fprop"].a == "fp8_e4m3_row"


def test_an_embedding_that_is_the_head_without_a_module_is_told_and_refused_under_strict() -> None:
    m = duotone.convert(Shared(), STRICT)  # the default rules ask for a head in high precision
    assert "uses the weight as output head without calling a module" in rows_of(m)["embedding", "-"].reason
    with pytest.raises(RecipeError, match=r"strict: embedding stays in high precision: .* without calling a module"):
        duotone.convert(Shared(), STRICT, rules=())


@pytest.mark.parametrize(
    ("model", "name", "operand"),
    [
        (lambda: nn.MultiheadAttention(32, 2), "", r"MultiheadAttention holds in_proj_weight \(96, 32\)"),
        (lambda: nn.Sequential(nn.LSTM(8, 8)), "0", r"LSTM holds weight_ih_l0 \(32, 8\) and weight_hh_l0 \(32, 8\)"),
        (
            lambda: transformers.ViTForImageClassification(
                transformers.ViTConfig(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
            ),
            "vit.embeddings",
            r"ViTEmbeddings holds cls_token \(1, 1, 32\) and position_embeddings \(1, 197, 32\)",
        ),
    ],
    ids=["attention", "lstm", "vit"],
)
def test_a_module_that_holds_matrices_itself_is_a_row_and_refused_under_strict(model, name, operand) -> None:
    m = model()
    silent = any(type(module) is nn.Linear for name, module in m.named_modules() if name != "lm_head")
    with nullcontext() if silent else pytest.warns(UserWarning, match="no linear follows recipe mxfp8; left alone: "):
        reason = rows_of(duotone.convert(m, MXFP8))[name, "-"].reason
    with pytest.raises(RecipeError, match=f"strict: {name} stays in high precision: {operand} itself") as raised:
        duotone.convert(model(), STRICT)
    assert reason in str(raised.value) and "\n" not in str(raised.value)


def test_vectors_look_ups_norms_and_parametrizations_are_no_rows_of_matrices() -> None:
    m = nn.Sequential(nn.Linear(32, 32), nn.LayerNorm((4, 32)), nn.PReLU(32), nn.Embedding(8, 32), nn.BatchNorm1d(4))
    nn.utils.parametrizations.weight_norm(m[0])
    duotone.convert(m, STRICT)
    assert {row.module for row in duotone.plan(m) if row.gemm == "-"} == {"3"}


def test_high_precision_that_the_recipe_asks_for_is_no_error_under_strict() -> None:
    rules = (Rule(module="0", format="identity"), Rule(format="mxfp8_e4m3"))
    duotone.convert(nn.Sequential(nn.LSTM(8, 8), nn.Linear(32, 32)), recipes.RuleRecipe(rules=rules, strict=True))
    duotone.convert(nn.Sequential(nn.LSTM(8, 8), nn.Linear(32, 32)), recipes.HighPrecision(strict=True))


def test_a_rule_for_a_module_that_is_left_alone_is_no_rule_that_matches_nothing() -> None:
    """pytest makes the warning an error; a rule for nothing at all still warns."""
    rules = [Rule(module="0", format="identity")]
    m = duotone.convert(nn.Sequential(nn.LSTM(8, 8), nn.Linear(32, 32)), MXFP8, rules=rules)
    assert "a rule" not in {row.module for row in duotone.plan(m)}
    with pytest.warns(UserWarning, match="'module': '7'"):
        duotone.convert(m, MXFP8, rules=[Rule(module="7", format="identity")])


def test_converting_twice_gives_the_same_rules() -> None:
    m = build(transformers.BertForMaskedLM, transformers.BertConfig)
    first = rows_of(duotone.convert(m, MXFP8))
    assert rows_of(duotone.convert(m, MXFP8)) == first
    assert torch.equal(m.cls.predictions.decoder.weight, m.bert.embeddings.word_embeddings.weight)

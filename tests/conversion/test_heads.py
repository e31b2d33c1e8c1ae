"""Output heads stay in high precision whatever they are called, and nothing else does."""

import pytest
import torch
from causal import SIZES
from torch import nn

import duotone
from duotone import recipes
from duotone.conversion.default_rules import heads
from duotone.recipes import OUTPUT_HEAD, Rule, RuleRecipe
from later import Later

transformers = Later("transformers")

MXFP8 = recipes.load("mxfp8")
NAMES = ["lm_head", "output_head", "output", "head", "embed_out", "unembed", "to_logits", "classifier", "score"]


class Block(nn.Module):
    """A layer whose parts are called as heads are; widths of 64 are those of the vocabulary of `model`."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"qkv": nn.Linear(width, 3 * width), "output": nn.Linear(width, width)})
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, inner), "output": nn.Linear(inner, width)})


def model(head: str, *, width: int = 32, inner: int = 96, outputs: int = 48, vocabulary: int = 64) -> nn.ModuleDict:
    return nn.ModuleDict(
        {
            "embedding": nn.Embedding(vocabulary, width),
            "layers": nn.ModuleList([Block(width, inner) for _ in range(2)]),
            "norm": nn.LayerNorm(width),
            head: nn.Linear(width, outputs),
        }
    )


class Wrapper(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module, self.loss = module, nn.CrossEntropyLoss()


def reasons(m: nn.Module) -> dict[str, str]:
    """Of every linear that runs in high precision."""
    return {row.module: row.reason for row in duotone.plan(m) if row.gemm == "fprop" and row.a == "identity"}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("wrap", "prefix"),
    [
        (lambda m: m, ""),
        (Wrapper, "module."),
        (lambda m: Wrapper(Wrapper(m)), "module.module."),
        (lambda m: torch.compile(m, backend="eager"), ""),
    ],
    ids=["root", "wrapper", "two wrappers", "compiled"],
)
def test_the_last_linear_of_the_root_or_of_its_only_wrapper_is_a_head_by_its_name(name, wrap, prefix) -> None:
    saved = reasons(duotone.convert(wrap(model(name)), MXFP8))
    assert list(saved) == [prefix + name]
    assert (
        saved[prefix + name] == "kept in high precision by a rule" or f"is called {name}: kept" in saved[prefix + name]
    )


def test_distributed_data_parallel_is_a_wrapper(tmp_path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        m = nn.parallel.DistributedDataParallel(model("score"))
        assert list(reasons(duotone.convert(m, MXFP8))) == ["score"]
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    "build",
    [
        lambda: model("last"),
        lambda: nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)),
        lambda: Block(32, 96),
        lambda: nn.ModuleDict({"attention": Block(32, 96).attention}),
        lambda: nn.ModuleDict({"block": nn.ModuleDict({"self_attn": Block(32, 96).attention})}),
        lambda: nn.ModuleDict({"head": nn.Linear(32, 8), "other": nn.Linear(32, 8)}),
        lambda: model("last", width=64, outputs=48, vocabulary=64),
    ],
    ids=[
        "other name",
        "plain MLP",
        "block",
        "attention alone",
        "attention in a wrapper",
        "not the last",
        "vocabulary as wide as the model",
    ],
)
def test_what_is_no_head_stays_quantized(build) -> None:
    assert reasons(duotone.convert(build(), MXFP8)) == {}


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_head_has_as_many_outputs_as_the_embedding_has_entries(device) -> None:
    with torch.device(device):
        m = Wrapper(nn.ModuleDict({"body": model("last", outputs=64), "probe": nn.Linear(32, 8)}))
    saved = reasons(duotone.convert(m, MXFP8))
    assert list(saved) == ["module.body.last"]
    assert "it has 64 outputs, as many as module.body.embedding has entries: kept" in saved["module.body.last"]


def test_several_heads_of_one_size_are_all_found_and_layers_of_that_size_are_not() -> None:
    m = model("first", outputs=64, inner=64)  # `up` has 64 outputs in each layer, and `output` takes 64
    m["heads"] = nn.ModuleList([nn.Linear(32, 80) for _ in range(3)])
    m["codes"] = nn.Embedding(80, 32)
    assert set(heads(m)) == {f"heads.{i}" for i in range(3)}
    wide = model("last", width=64, outputs=64)  # the width of the model is its vocabulary: the last linear alone
    assert set(heads(wide)) == {"last"}
    experts = nn.ModuleDict(
        {
            "embedding": nn.Embedding(64, 32),
            "layers": nn.ModuleList(nn.ModuleDict({"router": nn.Linear(32, 64)}) for _ in range(2)),
            "out": nn.Linear(32, 64),
        }
    )
    assert set(heads(experts)) == {"out"}


def test_a_rule_of_convert_or_of_the_recipe_overrides_a_head() -> None:
    rule = Rule(module="*classifier", format="fp8_e4m3_row")
    for recipe, rules in (
        (MXFP8, (rule,)),
        (RuleRecipe(rules=(rule,), base=MXFP8), OUTPUT_HEAD),
        (MXFP8, ()),
    ):
        m = duotone.convert(model("classifier"), recipe, rules=rules)
        assert reasons(m) == {} and "a rule" not in {row.module for row in duotone.plan(m)}
    reconverted = duotone.convert(m, MXFP8)
    assert list(reasons(reconverted)) == ["classifier"]


def test_a_head_alone_is_no_model_that_follows_the_recipe() -> None:
    """Nothing else is there to convert: that the only linear is kept must not be found out later."""
    m = nn.ModuleDict({"norm": nn.LayerNorm(32), "classifier": nn.Linear(32, 8)})
    with pytest.warns(
        UserWarning, match=r"no linear follows recipe mxfp8; .* classifier .* rules=\(\) converts it too"
    ):
        duotone.convert(m, MXFP8)
    duotone.convert(m, MXFP8, rules=())
    assert reasons(m) == {}


@pytest.mark.parametrize(
    ("build", "head"),
    [
        (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES)), "classifier"),
        (lambda: transformers.LlamaForSequenceClassification(transformers.LlamaConfig(**SIZES)), "score"),
    ],
    ids=["bert", "llama"],
)
def test_heads_of_classes_of_transformers(build, head) -> None:
    with torch.device("meta"):
        m = build()
    assert list(reasons(duotone.convert(m, MXFP8))) == [head]

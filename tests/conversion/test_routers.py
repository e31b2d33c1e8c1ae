"""Routers of experts stay in high precision unless a rule names them; gates of other modules follow the recipe."""

import pytest
import torch
from causal import SIZES
from safetensors.torch import load_file
from torch import nn

import duotone
from duotone.recipes import Rule, RuleRecipe
from later import Later

transformers = Later("transformers")


def mlps(count: int) -> list[nn.Module]:
    return [nn.Sequential(nn.Linear(64, 128), nn.SiLU(), nn.Linear(128, 64)) for _ in range(count)]


def linear(outputs: int = 8) -> nn.Linear:
    return nn.Linear(64, outputs, bias=False)


class TopKRouter(nn.Module):
    def __init__(self, child: str) -> None:
        super().__init__()
        self.add_module(child, linear())


class Experts(nn.Module):
    """Experts in 3-D parameters, which no rule of `convert` covers."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.zeros(8, 128, 64))


class SparseMoE(nn.ModuleDict):
    """A class of one's own that is called after its experts."""


def beside(experts: nn.Module | None = None, **parts: nn.Module) -> nn.ModuleDict:
    return nn.ModuleDict({**parts, "experts": experts or nn.ModuleList(mlps(8))})


ROUTERS = {
    "gate": (lambda: beside(gate=linear()), "gate"),
    "router": (lambda: beside(router=linear()), "router"),
    "w_gate": (lambda: beside(w_gate=linear()), "w_gate"),
    "gating network": (lambda: beside(gating=nn.Sequential(linear(), nn.ReLU(), nn.Linear(8, 8))), "gating.2"),
    "classifier of a router": (lambda: beside(router=TopKRouter("classifier")), "router.classifier"),
    "layer of a router": (lambda: beside(router=TopKRouter("layer")), "router.layer"),
    "class of a router": (lambda: beside(choice=TopKRouter("proj")), "choice.proj"),
    "experts in a dictionary": (
        lambda: beside(nn.ModuleDict({f"expert_{i}": mlp for i, mlp in enumerate(mlps(8))}), gate=linear()),
        "gate",
    ),
    "experts in parameters": (lambda: nn.ModuleDict({"gate": linear(), "mlps": Experts()}), "gate"),
    "a list with another name": (lambda: nn.ModuleDict({"gate": linear(), "mlps": nn.ModuleList(mlps(8))}), "gate"),
    "numbered experts": (lambda: nn.ModuleDict({"gate": linear(2), "expert_0": mlps(1)[0]}), "gate"),
    "gate of a shared expert": (
        lambda: nn.ModuleDict({"shared_expert": mlps(1)[0], "shared_expert_gate": linear(1)}),
        "shared_expert_gate",
    ),
    "router outside of the experts": (
        lambda: nn.ModuleDict({"router": linear(), "moe": nn.ModuleDict({"experts": nn.ModuleList(mlps(8))})}),
        "router",
    ),
    "name of the class": (lambda: SparseMoE({"gate": linear(), "mlp": mlps(1)[0]}), "gate"),
    "experts in a wrapper": (lambda: beside(nn.DataParallel(nn.ModuleList(mlps(8))), gate=linear()), "gate"),
}


def kept(m: nn.Module) -> dict[str, str]:
    """The linears in high precision, with the reason in the plan."""
    rows = duotone.plan(duotone.convert(m, "nvfp4"))
    return {row.module: row.reason for row in rows if row.gemm == "fprop" and row.runs == "high precision"}


@pytest.mark.parametrize(("build", "name"), ROUTERS.values(), ids=ROUTERS)
def test_a_router_stays_in_high_precision_and_experts_do_not(build, name: str) -> None:
    result = kept(nn.ModuleDict({"layers": nn.ModuleList([build()]), "other": nn.Linear(64, 64)}))
    assert f"layers.0.{name}" in result and set(result) <= {f"layers.0.{name}", f"layers.0.{name[:-1]}0"}
    assert all(reason.startswith("a router of experts, beside ") for reason in result.values())


DENSE = {
    "gated MLP": lambda: nn.ModuleDict({name: linear(64) for name in ("gate", "up", "down")}),
    "gated MLP as an expert": lambda: nn.ModuleDict({"experts": nn.ModuleList([DENSE["gated MLP"]()])}),
    "gate_proj beside experts": lambda: beside(gate_proj=linear(64), gate_up_proj=linear(64), up_gate_proj=linear(64)),
    "gate of attention": lambda: nn.ModuleDict({"attn": nn.ModuleDict({"gate": linear(64)}), "mlp": beside()}),
    "gate of inputs beside experts": lambda: beside(per_layer_input_gate=linear(32)),
    "router without experts": lambda: nn.ModuleDict({"modality_router": linear(4), "mlp": mlps(1)[0]}),
    "list of another length": lambda: nn.ModuleDict({"gate": linear(64), "layers": nn.ModuleList(mlps(2))}),
}


@pytest.mark.parametrize("build", DENSE.values(), ids=DENSE)
def test_no_other_gate_is_a_router(build) -> None:
    assert kept(nn.ModuleDict({"layers": nn.ModuleList([build()])})) == {}


@pytest.mark.parametrize("name", ["gate", "*.gate", "layers.0.*", "*"])
def test_a_rule_that_names_a_router_goes_first(name: str) -> None:
    rule = Rule(module=name, format="mxfp8_e4m3")
    for recipe, rules in (("nvfp4", [rule]), (RuleRecipe(rules=(rule,), base="nvfp4"), duotone.recipes.OUTPUT_HEAD)):
        m = (
            nn.ModuleDict({"layers": nn.ModuleList([beside(gate=linear())])})
            if name != "gate"
            else beside(gate=linear())
        )
        rows = duotone.plan(duotone.convert(m, recipe, rules)).filter("*gate", gemm="fprop")
        assert [(row.a, row.runs) for row in rows] == [("mxfp8_e4m3", "emulated")]
    assert kept(duotone.convert(beside(gate=linear()), "nvfp4", ())).keys() == {"gate"}  # a later call keeps it again


def test_a_strict_recipe_takes_a_model_with_a_router() -> None:
    recipe = duotone.RuleRecipe(rules=(Rule(format="mxfp8_e4m3"),), strict=True)
    m = duotone.convert(beside(gate=linear()), recipe)
    assert [row.a for row in duotone.plan(m).filter("gate", gemm="fprop")] == ["identity"]


def test_an_export_of_a_plain_model_stores_routers_in_bf16(tmp_path) -> None:
    duotone.export(nn.ModuleDict({"layer": beside(gate=linear())}), tmp_path / "x", scheme="MXFP8", dtype=torch.float32)
    saved = load_file(tmp_path / "x" / "model.safetensors")
    assert saved["layer.gate.weight"].dtype is torch.bfloat16
    assert saved["layer.experts.0.0.weight"].dtype is torch.float8_e4m3fn


MODELS = {
    "SwitchTransformersModel": (
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
        | {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2},
        "encoder.block.1.layer.1.mlp.router.classifier",
    ),
    "NllbMoeModel": (
        {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
        | {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "encoder_attention_heads": 4}
        | {"decoder_attention_heads": 4},
        "decoder.layers.0.ffn.router.classifier",
    ),
    "Qwen2MoeForCausalLM": (
        {**SIZES, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        "model.layers.0.mlp.shared_expert_gate",
    ),
    "JetMoeForCausalLM": ({**SIZES, "kv_channels": 8}, "model.layers.0.mlp.router.layer"),
}


@pytest.mark.parametrize(("name", "options", "router"), [(k, *v) for k, v in MODELS.items()], ids=MODELS)
def test_routers_of_transformers(name: str, options: dict, router: str) -> None:
    kind = getattr(transformers, name)
    experts = {"num_experts": 4, "num_local_experts": 4, "vocab_size": 64}
    m = kind(kind.config_class(**{**options, **experts}))
    result = {name for name, reason in kept(m).items() if "router" in reason}
    assert router in result and all("router" in name or "expert_gate" in name for name in result)


def test_a_dense_model_of_transformers_has_no_router() -> None:
    config = transformers.LlamaConfig(**SIZES)
    assert not any("router" in reason for reason in kept(transformers.LlamaForCausalLM(config)).values())

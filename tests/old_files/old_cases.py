"""What the old files hold, and how to build it anew: runs at the commit that wrote them and at every later one."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import duotone
from duotone import formats, observe, ops, recipes
from duotone.comm import ShardContext
from duotone.recipes import zoo
from duotone.tensor import BOTH, LOCAL, History, QuantizeContext, Quantizer

te = import_module("duotone.tensor.vocabulary")
"""Quantizers by names of Transformer Engine: a path that later commits keep for old pickles."""

COMMIT = "e6c5b1f"
FOLDER = Path(__file__).parent / COMMIT
RECIPES = ("fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4", "mxfp8-fwd-nvfp4-bwd")
WIDTH = 16
BF16 = {"params_dtype": torch.bfloat16}
MXFP8 = {**BF16, "recipe": recipes.load("mxfp8")}


def machine() -> dict[str, str]:
    """What decides the order of sums: forwards give the same bits where it is the same."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return {"torch": torch.__version__, "cpu": f"{cpu} {torch.backends.cpu.get_cpu_capability()}"}


def matrix(rows: int = 16, cols: int = WIDTH, seed: int = 7) -> Tensor:
    """bf16 (rows, cols), always the same for a seed."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def plain_model() -> nn.Sequential:
    """bf16, from fixed values: (*, 16) -> (*, 16)."""
    model = nn.Sequential(nn.Linear(WIDTH, 16), nn.GELU(), nn.Linear(16, WIDTH, bias=False)).to(torch.bfloat16)
    with torch.no_grad():
        for seed, parameter in enumerate(model.parameters()):
            parameter.copy_(matrix(parameter.numel(), 1, seed).view(parameter.shape) / 4)
    return model


def load_recipe(name: str) -> recipes.Recipe:
    """The recipe of that name, with a short history where it has one."""
    return recipes.DelayedScaling(amax_history_len=4) if name == "fp8-delayed" else recipes.load(name)


def quantized_model(recipe: str) -> nn.Module:
    """The model converted, with quantized weights and two steps of training behind it."""
    chosen = load_recipe(recipe)
    model = duotone.convert_parameters(duotone.convert(plain_model(), chosen), chosen)
    for seed in range(2):
        with duotone.autocast(recipe=chosen):
            y = model(matrix(seed=seed) * (seed + 1))
        y.square().sum().backward()
    model.zero_grad()
    return model


def empty_quantized_model(recipe: str) -> nn.Module:
    """The same modules with other values, to load a state_dict into."""
    chosen = load_recipe(recipe)
    model = duotone.convert(plain_model(), chosen)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return duotone.convert_parameters(model, chosen)


Call = Callable[[nn.Module], Any]


def call(x: Tensor, *further: Any) -> Call:
    return lambda module: module(x, *further)


def modules() -> dict[str, tuple[nn.Module, Call]]:
    """Modules of every public kind by name, and how each is called."""
    heads = matrix(8).view(8, 1, 2, 8).repeat(1, 2, 1, 1)
    tokens = matrix().view(8, 2, WIDTH)
    tapped = ops.Sequential(ops.RMSNorm(WIDTH, **BF16), ops.Linear(WIDTH, 32, bias=False, **MXFP8), ops.SwiGLU())
    extra = ops.Sequential(ops.MakeExtraOutput(), ops.ConstantScale(0.5), ops.AddExtraInput())
    quiet = {"attention_dropout": 0.0}
    results: dict[str, tuple[nn.Module, Call]] = {
        "linear": (duotone.Linear(WIDTH, WIDTH, **MXFP8), call(matrix())),
        "linear-split": (
            duotone.Linear(WIDTH, WIDTH, parameters_split=("query", "key"), **MXFP8),
            call(matrix()),
        ),
        "layer-norm-linear": (duotone.LayerNormLinear(WIDTH, WIDTH, **MXFP8), call(matrix())),
        "layer-norm-mlp": (duotone.LayerNormMLP(WIDTH, WIDTH, activation="swiglu", **MXFP8), call(matrix())),
        "grouped-linear": (duotone.GroupedLinear(2, WIDTH, WIDTH, **MXFP8), call(matrix(32), [16, 16])),
        "grouped-linear-single": (
            duotone.GroupedLinear(2, WIDTH, WIDTH, single_grouped_weight=True, **MXFP8),
            call(matrix(32), [16, 16]),
        ),
        "moe": (duotone.MoE(WIDTH, WIDTH, 2, top_k=1, **MXFP8), call(matrix())),
        "transformer-layer": (
            duotone.TransformerLayer(WIDTH, WIDTH, 2, hidden_dropout=0.0, **quiet, **MXFP8),
            call(tokens),
        ),
        "multihead-attention": (duotone.MultiheadAttention(WIDTH, 2, **quiet, **MXFP8), call(tokens)),
        "dot-product-attention": (
            duotone.DotProductAttention(2, 8, recipe=recipes.load("mxfp8")),
            call(heads, heads, heads),
        ),
        "rotary": (duotone.RotaryPositionEmbedding(8), call(8)),
        "layer-norm": (duotone.LayerNorm(WIDTH, **BF16), call(matrix())),
        "rms-norm": (duotone.RMSNorm(WIDTH, zero_centered_gamma=True, **BF16), call(matrix())),
        "sequential": (tapped, call(matrix())),
        "sequential-extra": (extra, call(matrix(), matrix(seed=8))),
        "converted": (quantized_model("mxfp8"), call(matrix())),
        "converted-subclass": (_converted_subclass(), call(matrix())),
    }
    return results


def small_ops() -> nn.ModuleDict:
    """One of each op that needs no process group, all of them from (16, 16)."""
    names = "GELU GEGLU GLU QGELU QGEGLU ReLU ReGLU SReLU SReGLU SiLU SwiGLU ClampedSwiGLU Identity L2Normalization"
    results = {name: getattr(ops, name)() for name in names.split()}
    further = {
        "Bias": ops.Bias(WIDTH),
        "ConstantScale": ops.ConstantScale(3.0),
        "Dropout": ops.Dropout(0.0),
        "Reshape": ops.Reshape((-1, 8)),
        "Quantize": ops.Quantize(recipe=recipes.load("mxfp8")),
        "BasicLinear": ops.BasicLinear(WIDTH, 8, **MXFP8),
        "LayerNorm": ops.LayerNorm(WIDTH),
        "RMSNorm": ops.RMSNorm(WIDTH),
    }
    return nn.ModuleDict(results | further).to(torch.bfloat16)


def outputs_of(modules: nn.ModuleDict) -> Tensor:
    """What all the ops give for one input, flat, one after the other."""
    return torch.cat([op(matrix(4)).float().flatten() for op in modules.values()])


class NamedLinear(nn.Linear):
    """A subclass of nn.Linear, which converts to a class that no module holds by name."""


def _converted_subclass() -> nn.Module:
    return duotone.convert(nn.Sequential(NamedLinear(WIDTH, WIDTH).to(torch.bfloat16)), recipes.load("mxfp8"))


def rule_recipe() -> recipes.RuleRecipe:
    rules = (
        recipes.Rule(module="*.1", tensor_type="weight", rowwise="mxfp8_e4m3", columnwise="identity"),
        recipes.Rule(layer="-1", format="identity"),
        recipes.Rule(tensor_type="input", format="fp8_e4m3_delayed"),
        recipes.Rule(format="nvfp4"),
    )
    history = History(margin=1, amax_history_len=4, amax_compute_algo="most_recent")
    return recipes.RuleRecipe(rules=rules, title="by rules", base=recipes.MXFP8BlockScaling(), history=history)


def built_in_recipes() -> dict[str, recipes.Recipe]:
    return {
        **{name: recipes.load(name) for name in ("bf16", *RECIPES, "nvfp4-linear-fp8-dpa")},
        "fp8-current options": recipes.Float8CurrentScaling(
            fp8_format="E4M3", power_of_two_scales=True, amax_epsilon=1e-6, evaluation=recipes.HighPrecision()
        ),
        "fp8-rowwise": recipes.Float8RowwiseScaling(strict=True),
        "fp8-delayed options": recipes.DelayedScaling(margin=1, amax_history_len=3, amax_compute_algo="most_recent"),
        "mxfp8 options": recipes.MXFP8BlockScaling(weight_2d=True, backward_override="dequantized"),
        "nvfp4 options": recipes.NVFP4BlockScaling(
            disable_rht=True, disable_2d_quantization=True, recompute_columnwise=True
        ),
        "rules": rule_recipe(),
        "custom": recipes.CustomRecipe(qfactory=zoo.mxfp8_fwd_nvfp4_bwd_factory, quantization_alignment=64),
    }


def values() -> dict[str, Any]:
    """Values that compare equal to themselves made anew."""
    mxfp8, nvfp4 = recipes.MXFP8BlockScaling(), recipes.NVFP4BlockScaling()
    schedule = recipes.Schedule((recipes.Phase(mxfp8, 0), recipes.Phase(nvfp4, 0.5, True)), title="two")
    return {
        **{f"recipe {name}": recipe for name, recipe in built_in_recipes().items()},
        "rule": rule_recipe().rules[0],
        "schedule": schedule,
        "schedule over": schedule.over(10),
        "phase": schedule.phases[1],
        "role": recipes.QuantizerRole("linear", "weight", "layers.0.fc1"),
        "site": recipes.Site(1, 4, (32, 64), False),
        "request": recipes.DelayedScalingRequest(fp8_format="E4M3", amax_history_len=2),
        "history": History(margin=2, amax_history_len=5, reduce_amax=False),
        **{f"format {name}": formats.get(name) for name in formats.names() if name in OLD_FORMATS},
        "quantizer": Quantizer(formats.get("mxfp8_e4m3"), formats.get("nvfp4_rht"), "rowwise_dequantized"),
        "quantizer identity": Quantizer(),
        "quantizer delayed": Quantizer(*[formats.get("fp8_e4m3_delayed")] * 2, history=History(margin=1)),
        **{f"handle {type(handle).__name__}": handle for handle in handles()},
        "usage": BOTH._replace(columnwise=False),
        "context": QuantizeContext(SHARD),
        "context local": LOCAL,
        "shard": SHARD,
        "plan row": duotone.PlanRow("fc1", "fprop", "mxfp8_e4m3", "identity", "torch", False, "a reason"),
    }


SHARD = ShardContext("dp", 1)
OLD_FORMATS = frozenset(
    """identity fp8_e4m3_tensor fp8_e4m3_tensor_pow2 fp8_e4m3_row fp8_e4m3_delayed fp8_e5m2_1x128 fp8_e4m3_128x128_fp32
    fp8_e4m3_1x128_e8m0 mxfp8_e4m3 mxfp8_e5m2_32x32 mxfp6_e2m3 mxfp4 nvfp4 nvfp4_16x16_rht_sr nvfp4_row
    nvfp4_16x16_4over6_448_mse""".split()
)


def handles() -> list[Any]:
    return [
        te.QuantizerHandle(Quantizer(formats.get("mxfp6_e2m3"), None)),
        te.IdentityQuantizer(columnwise=False),
        te.Float8CurrentScalingQuantizer("e5m2", force_pow_2_scales=True),
        te.Float8BlockQuantizer(block_scaling_dim=1),
        te.MXFP8Quantizer(with_2d_quantization=True),
        te.NVFP4Quantizer(with_rht=True, stochastic_rounding=True),
        te.HybridQuantizer(rowwise_quantizer=te.MXFP8Quantizer(), columnwise_quantizer=te.NVFP4Quantizer()),
    ]


def bound_handle() -> Any:
    return te.Float8Quantizer(torch.full((1,), 2.0), torch.zeros(1))


def tensors() -> dict[str, Tensor]:
    """Quantized tensors of (16, 16): two planes, one plane, views of each other, parameters."""
    pairs = {
        "mxfp8": ("mxfp8_e4m3", "mxfp8_e4m3"),
        "derived": ("fp8_e4m3_tensor", "fp8_e4m3_tensor"),
        "hybrid": ("mxfp8_e5m2", "nvfp4_16x16"),
        "rowwise alone": ("nvfp4", None),
        "columnwise alone": (None, "fp8_e4m3_1x128"),
        "identity": ("identity", "fp8_e4m3_row"),
    }
    results: dict[str, Tensor] = {
        name: Quantizer(row and formats.get(row), col and formats.get(col)).quantize(matrix())
        for name, (row, col) in pairs.items()
    }
    results["delayed"] = bound_handle().quantize(matrix())
    results["parameter"] = nn.Parameter(te.MXFP8Quantizer().quantize(matrix()))
    results["frozen parameter"] = nn.Parameter(te.MXFP8Quantizer().quantize(matrix()), requires_grad=False)
    return results


def tap() -> observe.Tap:
    """Statistics of one forward of a linear."""
    store = observe.Tap()
    model = duotone.convert(plain_model(), recipes.load("mxfp8"))
    observed = getattr(observe, "with_statistics", None) or observe.tap
    with torch.no_grad(), duotone.autocast(recipe=observed(recipes.load("mxfp8"), store)):
        model(matrix())
    return store


def optimizer(model: nn.Module) -> "duotone.optim.AdamW":
    return duotone.optim.AdamW(model.parameters(), lr=0.01)


def masters(adamw: "duotone.optim.AdamW") -> list[Tensor]:
    """The fp32 values from which the optimizer writes parameters."""
    return [state["master"].clone() for state in adamw.state.values() if "master" in state]


def step(model: nn.Module, adamw: "duotone.optim.AdamW", seed: int) -> None:
    with duotone.autocast(recipe=recipes.load("mxfp8")):
        model(matrix(seed=seed)).square().sum().backward()
    adamw.step()
    adamw.zero_grad()

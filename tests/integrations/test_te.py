"""Packages with a backend for Transformer Engine run on Duotone after `install()`, as they are, on a CPU."""

import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from packages import require
from torch import nn

import duotone


@pytest.fixture(autouse=True)
def their_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 16))


X = torch.randn(64, 32, generator=torch.Generator().manual_seed(1))
Y = X @ torch.randn(32, 16, generator=torch.Generator().manual_seed(2))


def is_delayed(trained: nn.Module, linears: int) -> bool:
    """Whether so many linears have histories of 8 steps that hold amaxes."""
    histories = [t for name, t in duotone.recipe_state(trained).items() if name.endswith("forward.amax_history")]
    return len(histories) == linears and all(len(h) == 8 and bool(h[-1].any()) for h in histories)


def test_accelerate_trains_in_fp8(te) -> None:
    """Its conversion puts te.Linear and te.LayerNorm into the model, its autocast uses the handler's recipe."""
    accelerate = require("accelerate")
    accelerate.state.AcceleratorState._reset_state(True)
    handler = accelerate.utils.TERecipeKwargs(fp8_format="HYBRID", amax_history_len=8, amax_compute_algo="max")
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[handler])
    trained = model()
    trained, optimizer = accelerator.prepare(trained, torch.optim.AdamW(trained.parameters(), lr=1e-2))
    losses = []
    for _ in range(10):
        loss = (trained(X) - Y).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    accelerate.state.AcceleratorState._reset_state(True)
    assert isinstance(trained[0], te.Linear) and isinstance(trained[2], te.LayerNorm) and is_delayed(trained, 2)
    assert losses[-1] < 0.8 * losses[0]


@pytest.mark.parametrize("replace_layers", [True, None])
def test_fabric_trains_under_its_precision_plugin(te, replace_layers: bool | None) -> None:
    """Layers are replaced while the model is built, or in the model that is there."""
    require("lightning")
    from lightning.fabric import Fabric
    from lightning.fabric.plugins import TransformerEnginePrecision

    recipe = {"fp8_format": "HYBRID", "amax_history_len": 8}
    plugin = TransformerEnginePrecision(weights_dtype=torch.bfloat16, recipe=recipe, replace_layers=replace_layers)
    fabric = Fabric(accelerator="cpu", devices=1, plugins=plugin)
    with fabric.init_module():
        trained = model()
    trained = fabric.setup_module(trained)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(trained.parameters(), lr=1e-2))
    losses = []
    for _ in range(10):
        loss = (trained(X) - Y).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    first = trained.module[0]
    assert isinstance(first, te.Linear) and first.weight.dtype == torch.bfloat16 and is_delayed(trained, 2)
    assert losses[-1] < 0.9 * losses[0]


def test_lightning_leaves_layers_that_a_script_chose(te) -> None:
    """It knows them by the name of their module, and would build them anew without their options."""
    require("lightning")
    from lightning.fabric.plugins import TransformerEnginePrecision

    built = nn.Sequential(te.LayerNormLinear(32, 64, normalization="RMSNorm"), te.Linear(64, 16, bias=False))
    converted = TransformerEnginePrecision(weights_dtype=torch.float32).convert_module(built)
    assert converted[0] is built[0] and converted[1] is built[1]


@pytest.fixture
def megatron() -> Iterator[None]:
    require("megatron-core", "megatron.core")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel(1, 1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


LLAMA = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False, "num_query_groups": 2}
CONFIGS = {
    "bf16": ({}, ()),
    "delayed": ({"fp8": "hybrid", "fp8_amax_history_len": 8}, ("duotone_forward",)),
    "recomputed": (
        {
            "fp8": "hybrid",
            "fp8_amax_history_len": 8,
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        ("duotone_forward",),
    ),
    "current, RMSNorm and SwiGLU": ({"fp8": "hybrid", "fp8_recipe": "tensorwise", **LLAMA}, ()),
    "blocks": ({"fp8": "e4m3", "fp8_recipe": "blockwise"}, ()),
    "MXFP8 weights": ({"fp8": "e4m3", "fp8_recipe": "mxfp8", "fp8_param": True}, ()),
    "NVFP4": ({"fp4": "e2m1"}, ()),
}


def losses_of(config: dict[str, object]) -> tuple[nn.Module, list[float]]:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker
    from megatron.core.transformer.transformer_config import TransformerConfig

    sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    plain = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False, "bias_dropout_fusion": False}
    no_dropout = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "bias_activation_fusion": False}
    torch.manual_seed(0)
    initialize_rng_tracker(force_reset=True)  # a recompute leaves it without states, which count as some
    spec = get_gpt_layer_with_transformer_engine_spec()
    gpt = GPTModel(TransformerConfig(**sizes, **plain, **no_dropout, **config), spec, 128, 32)
    tokens, positions = torch.randint(0, 128, (2, 32)), torch.arange(32).expand(2, 32)
    mask = torch.ones(2, 1, 32, 32, dtype=torch.bool).triu(1)
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-3)
    losses = []
    for _ in range(4):
        loss = gpt(tokens, positions, mask, labels=tokens).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return gpt, losses


def test_megatrons_gpt_trains_with_its_transformer_engine_layers(te, megatron) -> None:
    """Every recipe learns as high precision does, and computes something else."""
    _, reference = losses_of({})
    for name, (config, states) in CONFIGS.items():
        gpt, losses = losses_of(config)
        linears = [module for module in gpt.modules() if isinstance(module, te.Linear | te.LayerNormLinear)]
        assert len(linears) == 8 and losses[-1] < losses[0] - 0.4, name
        assert all(any(state in key for key in gpt.state_dict()) for state in states), name
        if "normalization" not in config and config:
            assert losses != reference and losses == pytest.approx(reference, abs=0.05), name

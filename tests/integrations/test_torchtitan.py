"""torchtitan: its debug models build themselves converted, experts too, and compile block by block."""

from types import SimpleNamespace

import pytest
import torch
from packages import require

import duotone

TORCHS = ["Mismatch dtype between input", "In CPU autocast", "The .grad attribute", "torch.distributed is disabled"]
WARNINGS = ["ignore::DeprecationWarning", "ignore::FutureWarning", *(f"ignore:{text}" for text in TORCHS)]
pytestmark = pytest.mark.filterwarnings(*WARNINGS)

require("triton")  # torchtitan imports it
torchtitan = require("torchtitan")
from torchtitan.components.checkpointer.base import ModelWrapper  # noqa: E402
from torchtitan.config import CompileConfig  # noqa: E402
from torchtitan.distributed import parallel_dims  # noqa: E402
from torchtitan.distributed.compile import apply_compile  # noqa: E402
from torchtitan.models import deepseek_v3, llama3  # noqa: E402
from torchtitan.models.common.attention import FlexAttention, ScaledDotProductAttention  # noqa: E402
from torchtitan.models.llama3 import config_registry  # noqa: E402

from duotone.integrations.torchtitan import DuotoneConverter, DuotoneTrainer  # noqa: E402


def build(family, recipe: str = "", layers: int = 2):
    """A debug model of torchtitan, as its trainer builds it. FlexAttention needs a GPU, so its other attention."""
    converters = [DuotoneConverter.Config(recipe=recipe)] if recipe else None
    config = family.model_registry("debugmodel", converters=converters).model
    config.layers = config.layers[:layers]
    for _, _, parent, attribute in list(config.traverse(FlexAttention.Config)):
        setattr(parent, attribute, ScaledDotProductAttention.Config())
    with torch.device("meta"):
        model = config.build()
    model.verify_module_protocol()
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    return model.train()


def step(model) -> dict[str, torch.Tensor]:
    """The loss and the gradients of one step."""
    tokens = torch.randint(0, 100, (2, 64), generator=torch.Generator().manual_seed(1))
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens, torch.arange(64).expand(2, -1)).float()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("family", [llama3, deepseek_v3])
def test_a_model_of_the_converter_is_the_converted_one(family) -> None:
    model, plain = build(family, "mxfp8"), build(family)
    duotone.convert(plain, "mxfp8")
    left, right = step(model), step(plain)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_the_trainer_lays_out_a_converted_model(tmp_path, monkeypatch) -> None:
    """Its trainer distributes each parameter and buffer that a module declares, and refuses others."""
    monkeypatch.setattr(parallel_dims, "device_type", "cpu")
    run = config_registry.llama3_debugmodel()
    run.model_spec = llama3.model_registry("debugmodel", converters=[DuotoneConverter.Config(recipe="nvfp4")])
    run.model_spec.model.update_from_config(config=run)
    with torch.device("meta"):
        model = run.model_spec.model.build()
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        model.parallelize(parallel_dims.ParallelDims.from_config(run.parallelism, 1))
    finally:
        torch.distributed.destroy_process_group()
    seeds = [name for name, _ in model.named_buffers() if name.endswith("duotone_seed")]
    assert len(seeds) == 6 * 5 + 1  # of each block and the head


@pytest.mark.parametrize("family", [llama3, deepseek_v3])
def test_the_bf16_recipe_gives_what_torchtitan_gives(family) -> None:
    converted, plain = step(build(family, "bf16")), step(build(family))
    for name, tensor in plain.items():
        torch.testing.assert_close(converted[name], tensor, rtol=0.02, atol=0.02 * tensor.abs().max().item(), msg=name)


def test_experts_follow_the_recipe_and_what_chooses_them_does_not() -> None:
    rows = [line.split() for line in str(duotone.plan(build(deepseek_v3, "mxfp8"))).splitlines()]
    formats = {row[0]: row[2] for row in rows if row[1] == "fprop"}
    experts = "layers.1.moe.routed_experts.inner_experts"
    assert {formats[f"{experts}.{name}"] for name in ("w1_EFD", "w2_EDF", "w3_EFD")} == {"mxfp8_e4m3"}
    assert formats["layers.1.moe.router.gate"] == formats["lm_head"] == "identity"


def test_a_second_converter_is_one_line() -> None:
    converters = [DuotoneConverter.Config(recipe=name) for name in ("mxfp8", "nvfp4")]
    with pytest.raises(duotone.UserError, match=r"^the model has a DuotoneConverter already; [^\n]*$"):
        llama3.model_registry("debugmodel", converters=converters)


def test_revert_gives_the_experts_of_torchtitan_back() -> None:
    model, plain = build(deepseek_v3, "mxfp8"), build(deepseek_v3)
    duotone.revert(model)
    left, right = step(model), step(plain)
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize(("family", "recipe"), [(llama3, "fp8-delayed"), (deepseek_v3, "mxfp8")])
def test_blocks_compile_as_torchtitan_compiles_them(family, recipe: str) -> None:
    layers = 1 if family is llama3 else 2  # the first of the other has no experts
    model, eager = build(family, recipe, layers), build(family, recipe, layers)
    apply_compile(
        model,
        compile_config=CompileConfig(enable=True, backend="eager"),
        parallel_dims=SimpleNamespace(tp_enabled=False),
    )
    for _ in range(2):
        left, right = step(model), step(eager)
        assert torch.equal(left["loss"], right["loss"])
        assert all(torch.equal(left[name], right[name]) for name in right)


def states(model):
    """What torchtitan's trainer saves of a model, without the assets that the trainer needs."""
    trainer = object.__new__(DuotoneTrainer)
    trainer.step, trainer.ntokens_seen, trainer.model_parts = 1, 128, [model]
    return {"model": ModelWrapper(model), "train_state": trainer}


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8-delayed"])
def test_checkpoints_of_the_trainer_resume_with_equal_bits(recipe: str, tmp_path) -> None:
    whole, again = (build(llama3, recipe, layers=1) for _ in range(2))
    step(whole)
    assert whole.state_dict().keys() == build(llama3, layers=1).state_dict().keys()
    torch.distributed.checkpoint.save(states(whole), checkpoint_id=tmp_path, no_dist=True)
    torch.distributed.checkpoint.load(states(again), checkpoint_id=tmp_path, no_dist=True)
    left, right = step(again), step(whole)
    assert all(torch.equal(left[name], right[name]) for name in right)
    with pytest.raises(duotone.UserError, match="seeds and scales of another model or recipe"):
        states(build(llama3, recipe, layers=2))["train_state"].load_state_dict(
            states(whole)["train_state"].state_dict()
        )


def test_unknown_recipes_are_one_line() -> None:
    with pytest.raises(duotone.UserError, match=r"^[^\n]*mxfp9[^\n]*$"):
        build(llama3, "mxfp9")

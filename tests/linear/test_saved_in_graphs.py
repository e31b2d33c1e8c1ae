"""What a graph saves for backward under `recompute_columnwise`: nothing that the partitioner can compute again."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import duotone
from duotone import recipes
from duotone.dispatch import target
from duotone.linear import plan_builder
from duotone_lab.training.model import MLP
from duotone_lab.training.presets import ModelConfig
from later import Later

pytest.importorskip("triton", reason="casts as ops of a graph need Triton: pip install triton")

functorch, compile_fx = Later("torch._functorch"), Later("torch._inductor.compile_fx")
TOKENS, WIDTH, HIDDEN = 256, 128, 384


class Partitioned(Exception):
    """The graph is cut; nothing has to run."""


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """What the graphs of an H200 save besides their inputs, filled by compiling for the CPU."""
    hopper = target.Target("cuda", target.HOPPER, target.BLOCKS_SINCE)
    monkeypatch.setattr(plan_builder, "target", lambda device: hopper)
    monkeypatch.setattr(target, "has_triton", lambda: True)
    tensors: list[Tensor] = []
    cut = compile_fx.min_cut_rematerialization_partition

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> None:
        forward, _ = cut(joint, inputs, **options)
        outputs = forward.graph.output_node().args[0][options["num_fwd_outputs"] :]
        nodes = [node for node in outputs if node.op != "placeholder"]
        tensors.extend(node.meta["val"] for node in nodes if isinstance(node.meta["val"], Tensor))
        raise Partitioned

    monkeypatch.setattr("torch._inductor.compile_fx.min_cut_rematerialization_partition", partition)
    torch._dynamo.reset()
    return tensors


class Block(nn.Module):
    """x + down(silu(gate) * up) after a norm, where one matrix makes gate and up."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.mlp = MLP(ModelConfig(layers=1, dim=WIDTH, heads=1, hidden=HIDDEN, context=TOKENS, tied=False))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


def compile_block(recipe: recipes.Recipe, *, quantized: bool = False) -> None:
    block = duotone.convert(Block().bfloat16(), recipe)
    if quantized:
        duotone.convert_parameters(block, recipe)
    compile_module(block)


def compile_module(module: nn.Module) -> None:
    x = torch.zeros(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(Exception, match="Partitioned"):
        torch.compile(module, fullgraph=True)(x)


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4"])
def test_no_plane_is_saved_whose_source_can_be_computed_again(name: str, saved: list[Tensor]) -> None:
    """The backward of SwiGLU needs gate and up in bf16, that of the norm one number a token, and no plane more.

    torchao's float8 training saves the same of such a block, from which backward casts again.
    """
    compile_block(replace(recipes.load(name), recompute_columnwise=True))
    needed = TOKENS * (2 * 2 * HIDDEN + 4)
    assert needed <= sum(tensor.nbytes for tensor in saved) <= needed + 64


@pytest.mark.parametrize(("name", "bits"), [("fp8-current", 8), ("mxfp8", 8.25)])
def test_else_one_plane_of_each_operand_is_saved(name: str, bits: float, saved: list[Tensor]) -> None:
    """Codes, not the values that an emulated product decodes them to."""
    compile_block(recipes.load(name))
    planes = (TOKENS + 2 * HIDDEN) * WIDTH + (TOKENS + WIDTH) * HIDDEN
    promised = TOKENS * (2 * 2 * HIDDEN + 4) + bits / 8 * planes
    assert promised <= sum(tensor.nbytes for tensor in saved) <= promised + 64


@pytest.mark.parametrize("name", ["fp8-current", "fp8-delayed"])
def test_quantized_weights_save_no_turned_codes(name: str, saved: list[Tensor]) -> None:
    """cuBLAS takes codes with contiguous rows. FSDP2 frees the gathered ones after forward, but not copies of them."""
    compile_block(recipes.load(name), quantized=True)
    activations = TOKENS * (2 * 2 * HIDDEN + 4) + TOKENS * (WIDTH + HIDDEN)
    assert activations <= sum(tensor.nbytes for tensor in saved) <= activations + 64


@pytest.mark.parametrize("name", ["fp8-current", "mxfp8"])
def test_a_memory_budget_lets_the_partitioner_cast_again(name: str, saved: list[Tensor]) -> None:
    """torch's own switch, under any recipe."""
    with functorch.config.patch(activation_memory_budget=0.5):
        compile_block(recipes.load(name))
    planes = (TOKENS + 2 * HIDDEN) * WIDTH + (TOKENS + WIDTH) * HIDDEN
    assert sum(tensor.nbytes for tensor in saved) <= (TOKENS * 2 * 2 * HIDDEN + planes) / 2


def mlp(name: str, recompute: bool) -> duotone.LayerNormMLP:
    recipe = replace(recipes.load(name), recompute_columnwise=recompute)
    options = {"normalization": "RMSNorm", "activation": "swiglu", "recipe": recipe}
    return duotone.LayerNormMLP(WIDTH, HIDDEN, bias=False, params_dtype=torch.bfloat16, **options)


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("fp8-current", "fp8-rowwise", "fp8-block")]
"""Their casts are saved as those of fp8-delayed and mxfp8 are; the block above has each recipe."""


@pytest.mark.parametrize("name", ["fp8-delayed", "mxfp8", "nvfp4", *OTHERS])
def test_fused_casts_save_no_plane_under_recompute_columnwise(name: str, saved: list[Tensor]) -> None:
    """The gradient of SwiGLU and the columnwise planes need gate and up, the norm one number a token."""
    compile_module(mlp(name, recompute=True))
    needed = TOKENS * (2 * 2 * HIDDEN + 4)
    assert needed <= sum(tensor.nbytes for tensor in saved) <= needed + 64


@pytest.mark.parametrize("name", ["fp8-delayed", "fp8-current"])
def test_fused_casts_save_what_those_of_a_converted_model_save(name: str, saved: list[Tensor]) -> None:
    compile_module(mlp(name, recompute=False))
    planes = (TOKENS + 2 * HIDDEN) * WIDTH + (TOKENS + WIDTH) * HIDDEN
    promised = TOKENS * (2 * 2 * HIDDEN + 4) + planes
    assert promised <= sum(tensor.nbytes for tensor in saved) <= promised + 64


def test_a_graph_holds_a_norm_and_an_mlp_as_one_op_for_each_pass(saved: list[Tensor]) -> None:
    calls: list[str] = []
    cut = compile_fx.min_cut_rematerialization_partition

    def look(joint: fx.GraphModule, inputs: Sequence[Any], **options: Any) -> None:
        calls.extend(str(node.target) for node in joint.graph.nodes if "duotone" in str(node.target))
        cut(joint, inputs, **options)

    torch._inductor.compile_fx.min_cut_rematerialization_partition = look  # the fixture takes it back
    compile_module(mlp("fp8-delayed", recompute=False))
    assert calls == ["duotone.stateful_row.default", "duotone.stateful_row_gradients.default"]

"""Code that is compiled block by block under FSDP2, for weights that are quantized parameters and for plain ones."""

import copy
import itertools
from pathlib import Path

import checks
import torch
from checks import check, same
from fsdp_models import SLOW, model, once, split, steps
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import recipes
from duotone.recipes import Rule, RuleRecipe


@check
def equal_blocks_share_a_graph_that_reads_the_plane_of_each_pass(folder: Path) -> None:
    for name, is_quantized in (("mxfp8", True), ("fp8-current", False)):
        torch._dynamo.reset()
        counters.clear()
        m = nn.Sequential(*(nn.Linear(128, 128, bias=False) for _ in range(2))).bfloat16()
        duotone.convert(m, recipes.load(name), rules=())
        if is_quantized:
            duotone.convert_parameters(m, recipes.load(name))
        one = copy.deepcopy(m)
        if not is_quantized:
            duotone.gather_quantized(m)
        for layer in m:
            layer.compile(backend="aot_eager", fullgraph=True)
            fully_shard(layer, reshard_after_forward=True)
        fully_shard(m)
        for _ in range(2):
            same(once(m), once(one), f"{name}, {is_quantized}")
        assert counters["stats"]["unique_graphs"] == 1, counters["stats"]


@check
def compiled_layers_with_fp8_attention_train_after_an_eager_forward(folder: Path) -> None:
    """Another layer's weight in pieces is not gathered while one is traced, and is not read then."""
    options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "normalization": "RMSNorm"}
    m = nn.Sequential(*(duotone.TransformerLayer(32, 32, 2, **options) for _ in range(2)))
    x = torch.randn(4, 2, 32, requires_grad=True)
    results = []
    for is_compiled in (False, True, True):
        for layer in m if is_compiled and not isinstance(m[0], FSDPModule) else ():
            fully_shard(layer)
            layer.compile(backend="aot_eager", fullgraph=True)
        with duotone.autocast(recipe=duotone.Float8CurrentScaling(fp8_dpa=True)):
            y = m(x)
        y.square().sum().backward()
        results.append((y, x.grad))
        x.grad = None
    for y, gradient in results[1:]:
        same(y, results[0][0], "output")
        same(gradient, results[0][1], "gradient")


ROWWISE = recipes.load("fp8-rowwise")


class PartRecomputed(nn.Module):
    """x + part(x), where torch's function recomputes the part if the module says so."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.part = nn.Sequential(nn.Linear(128, hidden, bias=False), nn.ReLU(), nn.Linear(hidden, 128, bias=False))
        self.recomputes = True

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.part, x, use_reentrant=False) if self.recomputes else self.part(x))


@check
def recomputes_of_compiled_code_read_planes_that_were_gathered(folder: Path) -> None:
    """Scales per row: each plane travels alone, and its cast is short to trace."""
    for is_quantized, inside in ((True, True), (True, False), (False, True)):
        torch._dynamo.reset()
        m = duotone.convert(nn.Sequential(PartRecomputed(128)).bfloat16(), ROWWISE, rules=())
        if is_quantized:
            duotone.convert_parameters(m, ROWWISE)
        one = copy.deepcopy(m)
        if not is_quantized:
            duotone.gather_quantized(m)
        (m[0] if inside else m[0].part).compile(backend="aot_eager", fullgraph=True)
        fully_shard(m[0], reshard_after_forward=True)
        fully_shard(m)
        for _ in range(2):
            same(once(m), once(one), f"{is_quantized}, {inside}")


@check
def a_checkpoint_around_code_that_was_compiled_before_is_refused(folder: Path) -> None:
    def sharded() -> nn.Sequential:
        m = duotone.convert(nn.Sequential(PartRecomputed(64)).bfloat16(), ROWWISE, rules=())
        duotone.convert_parameters(m, ROWWISE)
        m[0].part.compile(backend="aot_eager", fullgraph=True)
        return fully_shard(nn.Sequential(fully_shard(m[0], reshard_after_forward=True)))

    m = sharded()
    m[0].recomputes = False
    want = once(m)
    m[0].recomputes = True
    try:
        once(m)
    except torch._dynamo.exc.InternalTorchDynamoError as error:
        assert str(error).startswith("UserError: a checkpoint recomputes what was compiled outside of it"), error
    else:
        raise AssertionError("memory was read that FSDP2 had freed")
    torch._dynamo.reset()
    torch.manual_seed(7)
    same(once(sharded()), want, "compiled anew")


DELAYED, ROWS = "fp8_e4m3_delayed", "fp8_e4m3_row"


@check
def compiled_code_records_the_amaxes_of_gathered_weights(folder: Path) -> None:
    """A microbatch a step: another one without a gather would keep the scales of the first. Histories are compared."""
    hybrid = RuleRecipe(
        rules=(Rule(tensor_type="weight", rowwise=DELAYED, columnwise="fp8_e5m2_delayed"), Rule(format=ROWS))
    )
    turned = RuleRecipe(rules=(Rule(tensor_type="weight", rowwise=ROWS, columnwise=DELAYED), Rule(format=ROWS)))
    delayed = recipes.load("fp8-delayed")
    for recipe, reshards in ((delayed, True), (delayed, False), (hybrid, True), (turned, True)):
        torch._dynamo.reset()
        one = model(recipe, is_quantized=False)
        m = duotone.gather_quantized(copy.deepcopy(one))
        for layer in (m[0], m[2]):
            layer.compile(backend="aot_eager", fullgraph=True)
        split(m, checks.mesh(), reshard_after_forward=reshards)
        results = [
            [*steps(each, 1, SLOW), *(b for name, b in each.named_buffers() if "seed" not in name)] for each in (m, one)
        ]
        for result, want in zip(*results, strict=True):
            same(result, want, f"{recipe.name}, {reshards}")


@check
def a_forward_reads_no_plane_that_is_gathered_for_backward(folder: Path) -> None:
    """Its backward multiplies in high precision, under torch.autocast in the dtype of that."""
    ways = (True, None, True), (True, "aot_eager", False), (False, None, True), (False, "aot_eager", True)
    for name, (is_quantized, backend, is_cast) in (
        *itertools.product(("mxfp8-fwd-bf16-bwd",), ways),
        ("mxfp8", ways[2]),
    ):
        torch._dynamo.reset()
        one = model(recipes.load(name), is_quantized=False)
        one = one.float() if is_cast else one
        if is_quantized:
            duotone.convert_parameters(one, recipes.load(name))
        m = copy.deepcopy(one)
        if not is_quantized:
            duotone.gather_quantized(m)
        for layer in (m[0], m[2]) if backend else ():
            layer.compile(backend=backend, fullgraph=True)
        split(m, checks.mesh(), reshard_after_forward=True)
        with torch.autocast(checks.DEVICE, torch.bfloat16, enabled=is_cast):
            results = steps(m), steps(one)
        for result, want in zip(*results, strict=True):
            same(result, want, f"{name}, {is_quantized}, {backend}, {is_cast}")


if __name__ == "__main__":
    checks.main()

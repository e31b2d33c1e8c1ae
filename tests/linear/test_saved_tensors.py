"""What a forward saves goes through hooks for saved tensors as plain buffers, and is what the formats promise."""

import contextlib
import copy

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import duotone
from duotone import recipes
from duotone.errors import UserError
from duotone_lab.memory.storages import LiveStorages
from later import Later

dynamo_utils = Later("torch._dynamo.utils")

M, K, N = 64, 128, 256


def step(m: nn.Module, region: contextlib.AbstractContextManager) -> list[Tensor]:
    torch.manual_seed(1)
    x = torch.randn(M, K, dtype=torch.bfloat16, requires_grad=True)
    with region:
        y = m(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *m.parameters()])]


@pytest.mark.parametrize("recipe", ["bf16", "fp8-current"])
def test_what_a_stage_saved_is_freed_before_the_stages_below_run(recipe: str) -> None:
    """Unless the graph is kept, whose second backward gives the same gradients."""
    torch.manual_seed(0)
    options = {"normalization": "RMSNorm", "activation": "swiglu", "bias": False, "params_dtype": torch.bfloat16}
    module = duotone.LayerNormMLP(128, 448, recipe=recipes.load(recipe), **options)
    peaks, gradients = [], []
    for keeps in (False, True):
        x = torch.randn(256, 128, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
        with LiveStorages([]) as live:
            y = module(x)
            inputs, live.peak = torch.ones_like(y), 0
            for _ in range(1 + keeps):
                gradients.append(torch.autograd.grad(y, [x, *module.parameters()], inputs, retain_graph=keeps))
                peaks.append(live.peak)
    assert all(torch.equal(a, b) for other in gradients[1:] for a, b in zip(gradients[0], other, strict=True))
    assert peaks[0] < 0.98 * peaks[1]
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        y = module(x)
        y.sum().backward()
        y.sum().backward()


def linear(name: str) -> nn.Module:
    torch.manual_seed(0)
    return duotone.convert(nn.Sequential(nn.Linear(K, N, bias=False)).bfloat16(), recipes.load(name))


@pytest.mark.parametrize("region", ["save_on_cpu", "offload_activations"])
@pytest.mark.parametrize("name", recipes.names())
def test_tensors_that_hooks_keep_elsewhere_give_the_same_bits(name, region) -> None:
    m = linear(name)
    other = copy.deepcopy(m)
    regions = {"save_on_cpu": torch.autograd.graph.save_on_cpu, "offload_activations": duotone.offload_activations}
    for a, b in zip(step(m, contextlib.nullcontext()), step(other, regions[region]()), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("fp8-current", 8), ("fp8-delayed", 8), ("fp8-rowwise", 8), ("fp8-block", 8), ("mxfp8", 8.25), ("nvfp4", 4.5)],
)
def test_a_linear_saves_one_plane_of_each_operand_and_nothing_else(name, bits) -> None:
    """Columnwise codes and block scales by their definition, and at most one fp32 scale for each line besides."""
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    step(linear(name), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor))
    total = sum(tensor.nbytes for tensor in saved.values())
    assert bits / 8 * (M * K + K * N) <= total <= bits / 8 * (M * K + K * N) + 4 * (2 * K + 2)


def test_a_region_in_compiled_code_breaks_no_graph_under_hooks_for_saved_tensors() -> None:
    """Compiled code enters and leaves its regions by Python functions of ours, which Dynamo must not compile."""
    m = linear("mxfp8")

    def run(x: Tensor) -> Tensor:
        with duotone.autocast("mxfp8"):
            return m(x)

    torch.compiler.reset()
    dynamo_utils.counters.clear()
    compiled, x = torch.compile(run, backend="aot_eager"), torch.randn(M, K, dtype=torch.bfloat16)
    with torch.autograd.graph.save_on_cpu():
        y = compiled(x)
    assert not dynamo_utils.counters["graph_break"]
    assert torch.equal(y, run(x))


@pytest.mark.parametrize("options", [{"ahead": -1}, {"smallest": 0.5}, {"ahead": True}])
def test_options_of_offload_that_are_no_counts_are_refused(options) -> None:
    with pytest.raises(UserError, match="give an integer of at least 0"):
        duotone.offload_activations(**options)


def test_a_change_in_place_of_what_stays_is_an_error_as_without_the_region() -> None:
    """torch checks no versions of tensors that hooks packed."""
    x = torch.randn(4, requires_grad=True)
    with duotone.offload_activations():
        y = x.exp()
    y.add_(1)
    with pytest.raises(RuntimeError, match="changed in place after forward, 1 times"):
        y.sum().backward()


def test_a_forward_without_a_backward_leaves_nothing() -> None:
    """A graph that holds its own output is a cycle that the garbage collector does not see."""
    x = torch.randn(4, requires_grad=True)
    with duotone.offload_activations():
        y = x.exp()
    storage = StorageWeakRef(y.untyped_storage())
    del y
    assert storage.expired()


def test_sparse_tensors_stay() -> None:
    x = torch.randn(4, 4, requires_grad=True)
    with duotone.offload_activations(smallest=0):
        y = torch.sparse.mm(torch.eye(4).to_sparse(), x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(4, 4))


def test_offload_takes_a_module() -> None:
    with pytest.raises(UserError, match=r"takes a torch\.nn\.Module; got int"):
        duotone.offload_activations(3)

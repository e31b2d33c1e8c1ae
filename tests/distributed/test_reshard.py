"""What FSDP2 frees after a forward: with `reshard_after_forward`, the weights of all layers but the last."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import duotone
from duotone import UserError

WIDTH, LAYERS = 256, 6
ONE_LAYER = 1.2
"""Bytes for each element of a weight: one plane of 8 bits, with scales for blocks of 16 or 32."""


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A group of this process alone: FSDP2 gathers and frees as over many ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def plain() -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])


def sharded(recipe: str | None) -> nn.Sequential:
    from torch.distributed.fsdp import fully_shard

    model = plain()
    if recipe is not None:
        duotone.convert(model, recipe, rules=())
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    return fully_shard(model, reshard_after_forward=True)


class Storages(TorchDispatchMode):
    """The memory that operations in this region make, as long as something holds it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if type(each) is torch.Tensor:
                ref = StorageWeakRef(each.untyped_storage())
                self.seen[ref.cdata] = ref
        return result

    def weights(self) -> float:
        """Bytes of what is as large as half of a weight, over the number of elements of a weight."""
        alive = [torch.UntypedStorage._new_with_weak_ptr(ref.cdata) for ref in self.seen.values()]  # type: ignore
        return sum(each.nbytes() for each in alive if each is not None and 2 * each.nbytes() >= WIDTH**2) / WIDTH**2


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed", "mxfp8", "nvfp4"])
@pytest.mark.usefixtures("one_rank")
def test_no_plane_of_a_whole_weight_lives_from_forward_to_backward(recipe) -> None:
    """Except those of one layer. Else each GPU keeps 0.5 to 1.1 bytes for every element, on any number of GPUs."""
    model, x = sharded(recipe), torch.randn(8, WIDTH)
    model(x).sum().backward()
    with Storages() as storages:
        y = model(x).sum()
    alive = storages.weights()
    y.backward()
    assert alive <= ONE_LAYER


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-rowwise", "mxfp8", "nvfp4"])
@pytest.mark.usefixtures("one_rank")
def test_backward_encodes_freed_weights_with_the_bits_of_a_model_that_keeps_them(recipe: str) -> None:
    results = []
    for is_sharded in (True, False):
        torch.manual_seed(0)
        model = sharded(recipe) if is_sharded else duotone.convert(plain(), recipe, rules=())
        for step in range(3):
            x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step), requires_grad=True)
            model.zero_grad()
            model(x).square().sum().backward()
        weights = (p.grad.full_tensor() if is_sharded else p.grad for p in model.parameters())
        results.append([x.grad, *weights])
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("one_rank")
def test_weights_in_pieces_keep_a_plane_which_is_less_than_the_joined_weight() -> None:
    """Backward could encode only a copy again, of 4 bytes for each element, that lived from forward to backward."""
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(
        *[duotone.Linear(WIDTH, WIDTH, parameters_split=("a", "b"), recipe="mxfp8") for _ in range(LAYERS)]
    )
    for layer in model:
        fully_shard(layer, reshard_after_forward=True)
    x = torch.randn(8, WIDTH)
    model(x).sum().backward()
    with Storages() as storages:
        y = model(x).sum()
    alive = storages.weights()
    y.backward()
    assert alive <= ONE_LAYER * LAYERS


class SideOutput(nn.Module):
    """Its loss also comes by an attribute, which FSDP2 does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.linear(x).square().mean()
        return x.sum()


@pytest.mark.parametrize("recipe", ["fp8-current", "nvfp4", "mxfp8"])
@pytest.mark.usefixtures("one_rank")
def test_a_backward_to_a_weight_that_was_not_gathered_again_is_an_error(recipe: str) -> None:
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(duotone.convert(SideOutput(), recipe, rules=()), nn.Identity())
    fully_shard(model[0], reshard_after_forward=True)
    fully_shard(model)
    model(torch.randn(8, WIDTH, requires_grad=True))
    with pytest.raises((UserError, RuntimeError), match=r"not gathered again|out of bounds for storage of size 0"):
        model[0].aux.backward()


@pytest.mark.parametrize("write", ["copy_", "mul_", "load"])
@pytest.mark.usefixtures("one_rank")
def test_cached_planes_see_writes_to_shards(write: str) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model, x = duotone.Linear(WIDTH, WIDTH, bias=False, recipe="mxfp8"), torch.randn(8, WIDTH)
    fully_shard(model)
    model(x, is_first_microbatch=True)
    model.reshard()
    with torch.no_grad():
        if write == "load":
            model.load_state_dict({name: 3 * value for name, value in model.state_dict().items()})
        else:
            model.weight.copy_(3 * model.weight) if write == "copy_" else model.weight.mul_(3)
    fresh = duotone.Linear(WIDTH, WIDTH, bias=False, recipe="mxfp8")
    fresh.load_state_dict({"weight": model.weight.full_tensor()}, strict=False)
    assert torch.equal(model(x, is_first_microbatch=False), fresh(x))

"""FSDP1 puts plain tensors in the place of parameters while a module runs; results stay those without it."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

import duotone
from duotone.errors import UserError
from later import Later

fsdp = Later("torch.distributed.fsdp")


class Readers(nn.Module):
    """A norm that two linears read, as in models that `convert(fuse=True)` takes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.q(y) * self.k(y)


def fused() -> nn.Module:
    module = Readers()
    duotone.convert(module, "mxfp8", fuse=True)
    return module


MODULES: dict[str, Callable[[], nn.Module]] = {
    "norm": lambda: duotone.RMSNorm(64),
    "mlp": lambda: duotone.LayerNormMLP(64, 128, recipe="mxfp8"),
    "experts": lambda: duotone.MoE(64, 64, 2),
    "split": lambda: duotone.Linear(64, 64, parameters_split=("a", "b")),
    "layer": lambda: duotone.TransformerLayer(64, 64, 2, hidden_dropout=0.0, attention_dropout=0.0),
    "fused": fused,
}


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.filterwarnings("ignore::Warning")
def test_quantized_parameters_are_refused_where_it_would_take_their_memory() -> None:
    def quantized() -> nn.Module:
        return duotone.convert_parameters(duotone.convert(nn.Linear(64, 64), "mxfp8", ()), "mxfp8")

    with pytest.raises(UserError, match=r"^FSDP1 takes no quantized parameters [^\n]*fully_shard[^\n]*$"):
        fsdp.FullyShardedDataParallel(quantized(), use_orig_params=True, device_id=torch.device("cpu"))
    x, module = torch.randn(32, 64), quantized()
    want = module(x)
    assert torch.equal(fsdp.FullyShardedDataParallel(module, device_id=torch.device("cpu"))(x), want)


@pytest.mark.filterwarnings("ignore::Warning")
@pytest.mark.parametrize("use_orig_params", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_outputs_and_recomputes_are_those_of_the_module_alone(name: str, use_orig_params: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    with torch.no_grad():  # norms with other weights than 1
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    x = torch.randn(32, 1, 64, requires_grad=True)
    want = module(x)
    (dx,) = torch.autograd.grad(want.square().sum(), x)
    sharded = fsdp.FullyShardedDataParallel(
        nn.Sequential(module), use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    apply_activation_checkpointing(sharded, check_fn=lambda part: part is module)
    y = sharded(x)
    y.square().sum().backward()
    assert torch.allclose(y, want, atol=1e-6) and torch.allclose(x.grad, dx, atol=1e-5)

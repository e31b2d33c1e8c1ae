"""`is_first_microbatch` as a tensor: it decides on the device, with the bits of the same choice made by the host."""

import copy

import pytest
import torch

import duotone
from duotone import UserError, recipes

NAMES = ["fp8-delayed", "fp8-current", "fp8-block", "mxfp8", "nvfp4"]
STEPS, MICROBATCHES = 20, 3


def layer(name: str, kind: str) -> torch.nn.Module:
    torch.manual_seed(2)
    options = {"recipe": recipes.load(name), "params_dtype": torch.bfloat16}
    if kind == "grouped":
        return duotone.GroupedLinear(2, 128, 128, **options)
    return duotone.Linear(128, 128, **options)


def step(m: torch.nn.Module, x: torch.Tensor, first: bool | torch.Tensor) -> torch.Tensor:
    splits = ([40, 24],) if isinstance(m, duotone.GroupedLinear) else ()
    y = m(x, *splits, is_first_microbatch=first)
    y.square().mean().backward()
    return y.detach()


@pytest.mark.parametrize(("name", "kind"), [*((name, "linear") for name in NAMES), ("fp8-delayed", "grouped")])
def test_a_flag_has_the_bits_of_the_choice_of_the_host(name: str, kind: str) -> None:
    """Outputs, gradients, scales and histories over 20 steps of 3 microbatches, between which the weight moves."""
    m = layer(name, kind)
    twin, flag = copy.deepcopy(m), torch.ones(1, dtype=torch.int32)
    optimizers = [torch.optim.SGD(one.parameters(), lr=1.0) for one in (m, twin)]
    for _ in range(STEPS):
        for number in range(MICROBATCHES):
            x = torch.randn(64, 128).bfloat16()
            flag.fill_(number == 0)
            assert torch.equal(step(m, x, flag), step(twin, x, number == 0))
        for mine, other in zip(m.parameters(), twin.parameters(), strict=True):
            assert torch.equal(mine.grad, other.grad)
        for mine, other in zip(m.buffers(), twin.buffers(), strict=True):
            assert torch.equal(mine, other)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def test_a_flag_of_0_keeps_planes_whose_memory_stays_and_that_follow_a_write() -> None:
    m, x = layer("fp8-current", "linear"), torch.randn(64, 128).bfloat16()
    zero = torch.zeros(1, dtype=torch.int32)
    first, where = step(m, x, zero), addresses(m)  # there were no planes
    m.weight.data.mul_(2.0)  # which raises no version
    assert torch.equal(step(m, x, zero), first)
    with torch.no_grad():
        m.weight.mul_(2.0)
    follows = step(m, x, zero)
    assert addresses(m) == where
    m.invalidate_weight_cache()
    assert torch.equal(follows, step(m, x, zero)) and not torch.equal(follows, first)


def addresses(m: torch.nn.Module) -> list[int]:
    planes = m.plans.options.caches[0].planes
    return [part.data_ptr() for plane in planes if plane is not None for part in plane.parts.values()]


def test_a_flag_that_no_kernel_can_read_is_refused() -> None:
    m, x = layer("fp8-current", "linear"), torch.randn(64, 128).bfloat16()
    with pytest.raises(UserError, match="one element"):
        m(x, is_first_microbatch=torch.ones(2))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="one element, in eager code"):
        torch.compile(m, fullgraph=True, backend="eager")(x, is_first_microbatch=torch.ones(1))
    m(x, is_first_microbatch=True)
    with pytest.raises(UserError, match="is on meta"):
        m(x, is_first_microbatch=torch.ones(1, device="meta"))

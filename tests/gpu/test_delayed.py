"""On a CUDA device: first steps of delayed scaling have the bits of the CPU, later ones read once."""

import copy
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from comparing import bits
from torch import nn

import duotone
from duotone.recipes import DelayedScaling
from duotone.state import delayed_slot

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="no CUDA device; run `PYTHONPATH=src python -m pytest tests/gpu` on one",
)

RECIPE = DelayedScaling(amax_history_len=4)


def states(m: nn.Module) -> list[torch.Tensor]:
    return [bits(tensor) for tensor in duotone.recipe_state(m).values()]


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_first_steps_have_the_states_of_the_cpu(kind) -> None:
    """Inputs and gradients are the same on both; one expert's are a thousand times smaller, and one meets zeros."""
    torch.manual_seed(0)
    splits = [32, 0, 64, 32]
    if kind == "linear":
        cpu = duotone.Linear(64, 64, bias=False, params_dtype=torch.bfloat16, recipe=RECIPE, device="cpu")
    else:
        cpu = duotone.GroupedLinear(4, 64, 64, bias=False, params_dtype=torch.bfloat16, recipe=RECIPE, device="cpu")
    cuda = copy.deepcopy(cpu).cuda()
    for number in range(3):
        x, dy = torch.randn(128, 64).bfloat16(), (torch.randn(128, 64) * 2.0**-12).bfloat16()
        x[:32] /= 1000
        if number == 0:
            dy[:32] = 0
        for m, device in ((cpu, "cpu"), (cuda, "cuda")):
            inputs = () if kind == "linear" else (splits,)
            with duotone.autocast(recipe=RECIPE):
                y = m(x.to(device).requires_grad_(), *inputs)
            y.backward(dy.to(device))
        for on_cpu, on_cuda in zip(states(cpu), states(cuda), strict=True):
            assert torch.equal(on_cpu, on_cuda)


def test_steps_after_the_first_measure_no_amax_before_they_cast() -> None:
    m = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=RECIPE, device="cuda")
    counts = []
    for _ in range(3):
        with mock.patch.object(delayed_slot, "amax_of", wraps=delayed_slot.amax_of) as measured:
            with duotone.autocast(recipe=RECIPE):
                y = m(torch.randn(32, 64, device="cuda").bfloat16().requires_grad_())
            y.sum().backward()
        counts.append(measured.call_count)
    assert counts == [3, 0, 0]


def test_compiled_first_steps_have_eager_bits() -> None:
    torch.manual_seed(0)
    eager = duotone.Linear(64, 64, params_dtype=torch.bfloat16, recipe=RECIPE, device="cuda")
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True)
    for _ in range(3):
        x = torch.randn(32, 64, device="cuda").bfloat16()
        for call in (eager, run):
            with duotone.autocast(recipe=RECIPE):
                y = call(x.clone().requires_grad_())
            (y.sum() * 2.0**-12).backward()
        for result, expected in zip(states(compiled), states(eager), strict=True):
            assert torch.equal(result, expected)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_a_region_has_the_bits_of_a_step_without_it(use_reentrant: bool) -> None:
    """The first forward computes the norm before its cast, whose scale is new; the recompute's kernel computes both."""
    plain = duotone.LayerNormMLP(64, 128, activation="swiglu", params_dtype=torch.bfloat16, device="cuda")
    checkpointed = copy.deepcopy(plain)
    for _ in range(3):
        x, results = torch.randn(32, 64, device="cuda").bfloat16(), []

        def region(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
            with duotone.autocast(recipe=RECIPE):
                return m(x)

        for m in (plain, checkpointed):
            m.zero_grad()
            leaf = x.clone().requires_grad_()
            again = {"use_reentrant": use_reentrant}
            y = region(m, leaf) if m is plain else torch.utils.checkpoint.checkpoint(region, m, leaf, **again)
            y.square().sum().backward()
            results.append([y, leaf.grad, *(p.grad for p in m.parameters()), *states(m)])
        assert all(torch.equal(*both) for both in zip(*results, strict=True))

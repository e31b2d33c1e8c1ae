"""Parameters in high precision follow torch.optim.AdamW: exactly without a master, closely with one."""

import pytest
import torch
from optim_cases import RATES, same_bits
from torch import Tensor, nn

from duotone.optim import AdamW, FusedAdam

SHAPES = [(), (1,), (7,), (33, 65), (3, 5, 7), (0, 4)]


def close(result: Tensor, want: Tensor) -> None:
    """A few roundings apart: torch's kernels may make one operation of a product and a sum, and divide otherwise."""
    torch.testing.assert_close(result, want, rtol=2e-6, atol=1e-7, equal_nan=True)


def gradients(parameters: list[Tensor], step: int, scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [(torch.randn(p.shape, generator=generator) * scale).to(p.dtype) for p in parameters]


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_plain_parameters_are_those_of_torch(dtype, maximize) -> None:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    references = [nn.Parameter(p.detach().clone()) for p in parameters]
    optimizer, oracle = (
        AdamW(parameters, **RATES, maximize=maximize),
        torch.optim.AdamW(references, **RATES, maximize=maximize),
    )
    for step in range(5):
        for p, q, grad in zip(parameters, references, gradients(parameters, step), strict=True):
            p.grad = q.grad = grad
        optimizer.step(), oracle.step()
    for p, q in zip(parameters, references, strict=True):
        assert torch.equal(p, q) and p.grad is not None
        assert optimizer.state[p].keys() == oracle.state[q].keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert torch.equal(optimizer.state[p]["exp_avg_sq"], oracle.state[q]["exp_avg_sq"])


def test_fused_adam_decays_nothing_by_default() -> None:
    parameter, reference = (nn.Parameter(torch.linspace(-2, 2, 65)) for _ in range(2))
    optimizer, oracle = FusedAdam([parameter], 0.01), torch.optim.Adam([reference], 0.01)
    for step in range(5):
        parameter.grad = reference.grad = gradients([parameter], step)[0]
        optimizer.step(), oracle.step()
    assert torch.equal(parameter, reference)
    assert FusedAdam([parameter], weight_decay=0.1, moment_dtype=torch.bfloat16).defaults["weight_decay"] == 0.1


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_masters_follow_torch_in_fp32_and_parameters_are_those_rounded(dtype, maximize) -> None:
    parameters = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in SHAPES]
    references = [nn.Parameter(p.detach().float()) for p in parameters]
    optimizer = AdamW(parameters, **RATES, maximize=maximize, master_weights=True)
    oracle = torch.optim.AdamW(references, **RATES, maximize=maximize)
    for step in range(20):
        for p, q, grad in zip(parameters, references, gradients(parameters, step), strict=True):
            p.grad, q.grad = grad, grad.float()
        optimizer.step(), oracle.step()
        for p, q in zip(parameters, references, strict=True):
            state = optimizer.state[p]
            assert same_bits(p, state["master"].to(dtype))
            for name in ("exp_avg", "exp_avg_sq"):
                assert state[name].dtype is torch.float32
                close(state[name], oracle.state[q][name])
            close(state["master"], q)


@pytest.mark.parametrize(("beta1", "beta2"), [(0.0, 0.0), (0.3, 0.9), (0.9, 0.999)])
def test_other_rates_follow_torch(beta1, beta2) -> None:
    rates = {"lr": 0.3, "betas": (beta1, beta2), "eps": 1e-3, "weight_decay": 0.0}
    p = nn.Parameter(torch.randn(64, dtype=torch.bfloat16))
    q = nn.Parameter(p.detach().float())
    optimizer, oracle = AdamW([p], **rates, master_weights=True), torch.optim.AdamW([q], **rates)
    for step in range(6):
        p.grad = gradients([p], step)[0]
        q.grad = p.grad.float()
        optimizer.step(), oracle.step()
    close(optimizer.state[p]["master"], q)


def test_zeros_denormals_infinities_and_nan_go_where_torch_puts_them() -> None:
    special = [0.0, -0.0, 1e-40, -1e-40, 1e-30, 3e38, -3e38, torch.inf, -torch.inf, torch.nan, 1.0]
    first = torch.tensor(special).bfloat16()
    p = nn.Parameter(torch.ones(len(special), dtype=torch.bfloat16))
    q = nn.Parameter(torch.ones(len(special)))
    optimizer, oracle = AdamW([p], **RATES, master_weights=True), torch.optim.AdamW([q], **RATES)
    for grad in (first, torch.ones_like(first), -first.flip(0)):
        p.grad, q.grad = grad, grad.float()
        optimizer.step(), oracle.step()
        close(optimizer.state[p]["master"], q)
        for name in ("exp_avg", "exp_avg_sq"):
            close(optimizer.state[p][name], oracle.state[q][name])
    assert optimizer.state[p]["master"].isnan().any() and optimizer.state[p]["master"].isfinite().any()


def test_gradients_of_any_strides_and_dtype() -> None:
    values = torch.randn(24, 40).bfloat16()
    options = {
        "turned": values.t().contiguous().t(),
        "gaps": values.repeat_interleave(2, 1)[:, ::2],
        "expanded": values[:1].expand(24, 40),
    }
    for name, grad in options.items():
        assert not grad.is_contiguous()
        a, b = (nn.Parameter(torch.ones(24, 40, dtype=torch.bfloat16)) for _ in range(2))
        a.grad, b.grad = grad, grad.clone(memory_format=torch.contiguous_format)
        AdamW([a], **RATES, master_weights=True).step()
        AdamW([b], **RATES, master_weights=True).step()
        assert same_bits(a, b), name


def test_a_parameter_of_any_strides_keeps_them() -> None:
    p = nn.Parameter(torch.randn(24, 40, dtype=torch.bfloat16).t())
    q = nn.Parameter(p.detach().contiguous())
    p.grad = q.grad = torch.randn(40, 24, dtype=torch.bfloat16)
    AdamW([p], **RATES, master_weights=True).step()
    AdamW([q], **RATES, master_weights=True).step()
    assert torch.equal(p, q) and p.stride() == (1, 40)


def test_masters_may_begin_late_and_their_state_is_contiguous() -> None:
    p = nn.Parameter(torch.randn(24, 40, dtype=torch.bfloat16).t())
    optimizer = AdamW([p], **RATES)
    for masters in (False, True):
        optimizer.param_groups[0]["master_weights"] = masters
        p.grad = torch.randn(40, 24, dtype=torch.bfloat16)
        optimizer.step()
    state = optimizer.state[p]
    assert state["step"] == 2 and p.stride() == (1, 40)
    for name in ("exp_avg", "exp_avg_sq", "master"):
        assert state[name].dtype is torch.float32 and state[name].is_contiguous()


def test_groups_have_rates_of_their_own_and_mixed_dtypes() -> None:
    p, q, r = (nn.Parameter(torch.ones(8, dtype=d)) for d in (torch.bfloat16, torch.float32, torch.bfloat16))
    references = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = AdamW([{"params": [p, q], "lr": 0.5}, {"params": r, "weight_decay": 0.0}], **RATES, master_weights=True)
    torchs = torch.optim.AdamW(
        [{"params": references[0], "lr": 0.5}, {"params": references[1], "weight_decay": 0.0}], **RATES
    )
    for t in (p, q, r, *references):
        t.grad = torch.linspace(-1, 1, 8).to(t.dtype)
    for t in references:
        t.grad = torch.linspace(-1, 1, 8).bfloat16().float()
    optimizer.step(), torchs.step()
    close(optimizer.state[p]["master"], references[0])
    close(optimizer.state[r]["master"], references[1])
    assert "master" not in optimizer.state[q] and q.dtype is torch.float32


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    p, q = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizer = AdamW([p, q], master_weights=True)
    q.grad = torch.ones(4, dtype=torch.bfloat16)
    optimizer.step()
    assert torch.equal(p, torch.ones_like(p)) and p not in optimizer.state
    assert optimizer.state[q]["step"] == 1
    optimizer.zero_grad()
    optimizer.step()
    assert optimizer.state[q]["step"] == 1


def test_a_closure_gives_the_loss_and_the_gradients() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = AdamW([p], lr=0.1, master_weights=True)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = p.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(4)]
    assert losses[0] == 4.0 and losses == sorted(losses, reverse=True)


def test_schedulers_and_tensor_rates_work() -> None:
    p = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    q = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    scheduled = AdamW([p], lr=0.1, weight_decay=0.0, master_weights=True)
    scheduler = torch.optim.lr_scheduler.StepLR(scheduled, 1, 0.5)
    inputs = AdamW([q], lr=torch.tensor(0.05), weight_decay=0.0, master_weights=True)
    scheduled.step()
    scheduler.step()
    p.grad = q.grad = torch.ones_like(p)
    scheduled.step(), inputs.step()
    torch.testing.assert_close(scheduled.state[p]["master"], inputs.state[q]["master"])


def test_a_bf16_parameter_stalls_without_a_master() -> None:
    """Updates of less than half a step of bf16 are lost, unless a master adds them up."""
    lost, saved = (nn.Parameter(torch.ones(16, dtype=torch.bfloat16)) for _ in range(2))
    for p, master in ((lost, False), (saved, True)):
        optimizer = AdamW([p], lr=1e-3, weight_decay=0.0, master_weights=master)
        for _ in range(20):
            p.grad = torch.ones_like(p)
            optimizer.step()
    assert torch.equal(lost, torch.ones_like(lost))
    torch.testing.assert_close(saved, torch.full_like(saved, 0.98))

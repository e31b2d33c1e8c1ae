"""The warning for averages and optimizers whose small moves a quantized tensor rounds away."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import duotone

STANDS_STILL = "of this update arrives.*average in a plain tensor.*duotone.optim.AdamW"


def model(recipe: str = "mxfp8", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(64, 64, bias=False))
    return duotone.convert_parameters(duotone.convert(m, recipe, rules=()), recipe)


def lerped(average: Tensor, weight: Tensor) -> None:
    average.lerp_(weight, 0.01)


def added(average: Tensor, weight: Tensor) -> None:
    average.mul_(0.99).add_(weight, alpha=0.01)


def subtracted(average: Tensor, weight: Tensor) -> None:
    average.sub_(0.01 * (average - weight))


def by_foreach(average: Tensor, weight: Tensor) -> None:
    torch._foreach_mul_([average], 0.99)
    torch._foreach_add_([average], [weight], alpha=0.01)


def by_foreach_lerp(average: Tensor, weight: Tensor) -> None:
    torch._foreach_lerp_([average], [weight], 0.01)


AVERAGES = (lerped, added, subtracted, by_foreach, by_foreach_lerp)


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("update", AVERAGES)
def test_an_average_in_quantized_weights_warns(update: Callable[[Tensor, Tensor], None], recipe: str) -> None:
    average, weight = (model(recipe, seed)[0].weight.detach().clone() for seed in (0, 1))
    with pytest.warns(UserWarning, match=STANDS_STILL):
        for _ in range(4):
            update(average, weight)


def test_an_averaged_model_warns() -> None:
    average = AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.99))
    average.update_parameters(model())
    with pytest.warns(UserWarning, match=STANDS_STILL):
        average.update_parameters(model(seed=1))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("foreach", [False, True])
def test_an_optimizer_without_masters_warns(make, foreach) -> None:
    m = model()
    optimizer = make(m.parameters(), lr=1e-4, foreach=foreach)
    with pytest.warns(UserWarning, match=STANDS_STILL):
        for _ in range(3):
            m(torch.ones(8, 64)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("write", [
    lambda w: w.normal_(std=0.02),
    lambda w: nn.init.trunc_normal_(w, std=0.02),
    lambda w: nn.init.kaiming_uniform_(w),
    lambda w: nn.init.orthogonal_(w),
    lambda w: w.mul_(2.0),
    lambda w: w.add_(torch.randn(64, 64)),
    lambda w: w.zero_(),
    lambda w: w.copy_(torch.randn(64, 64)).clamp_(-0.5, 0.5),
], ids=["normal", "trunc_normal", "kaiming", "orthogonal", "mul", "add", "zero", "clamp"])  # fmt: skip
def test_writes_that_arrive_do_not_warn(write) -> None:
    w = model()[0].weight.detach()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(4):
            write(w)


def test_masters_do_not_warn() -> None:
    """Neither those of an optimizer here nor those of another one, which copies them."""
    m, other = model(), model()
    optimizer, master = duotone.optim.AdamW(m.parameters(), lr=1e-5), other[0].weight.dequantize().detach().clone()
    for _ in range(4):
        m(torch.ones(8, 64)).sum().backward()
        optimizer.step()
        master += 1e-5
        with torch.no_grad():
            other[0].weight.copy_(master)


def test_the_average_that_the_warning_advises_arrives() -> None:
    """0.7 % of the way is left after five time constants."""
    start, goal = (model(seed=seed)[0].weight.dequantize().detach() for seed in (0, 1))
    average = copy.deepcopy(start)
    for _ in range(500):
        average.lerp_(goal, 0.01)
    assert (average - goal).norm() < 0.01 * (start - goal).norm()

"""The warning for averages and optimizers whose small moves a quantized tensor rounds away."""

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import duotone

LOST = "of this update is lost.*average in a plain tensor.*duotone.optim.AdamW"


def model(recipe: str = "mxfp8", seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(64, 64, bias=False))
    return duotone.convert_parameters(duotone.convert(m, recipe, rules=()), recipe)


def lerped(average: Tensor, weight: Tensor, decay: float) -> None:
    average.lerp_(weight, 1 - decay)


def added(average: Tensor, weight: Tensor, decay: float) -> None:
    average.mul_(decay).add_(weight, alpha=1 - decay)


def subtracted(average: Tensor, weight: Tensor, decay: float) -> None:
    average.sub_((1 - decay) * (average - weight))


def by_foreach(average: Tensor, weight: Tensor, decay: float) -> None:
    torch._foreach_mul_([average], decay)
    torch._foreach_add_([average], [weight], alpha=1 - decay)


def by_foreach_lerp(average: Tensor, weight: Tensor, decay: float) -> None:
    torch._foreach_lerp_([average], [weight], 1 - decay)


AVERAGES = (lerped, added, subtracted, by_foreach, by_foreach_lerp)


@pytest.mark.parametrize("decay", [0.9, 0.99, 0.999])
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("update", AVERAGES)
def test_an_average_in_quantized_weights_warns(update: Callable[..., None], recipe: str, decay: float) -> None:
    """Also where each of two operations moves the average by much, and only both together by little."""
    average, weight = (model(recipe, seed)[0].weight.detach().clone() for seed in (0, 1))
    with pytest.warns(UserWarning, match=LOST):
        for _ in range(9):
            update(average, weight, decay)


@pytest.mark.filterwarnings("ignore:.*of this update is lost")
@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-delayed", "fp8-block", "mxfp8"])
@pytest.mark.parametrize("decay", [0.9, 0.99])
def test_an_average_of_what_it_holds_does_not_grow(recipe: str, decay: float) -> None:
    """Its parts round up at the largest code, and a new scale at each step would make it larger without end."""
    weight = model(recipe)[0].weight.detach()
    average = copy.deepcopy(weight)
    for _ in range(100):
        added(average, weight, decay)
    assert (average.dequantize().norm() / weight.dequantize().norm() - 1).abs() < 0.03


@pytest.mark.parametrize("loads", range(5))
def test_an_average_of_two_operations_warns_after_any_number_of_loads(loads: int) -> None:
    """Each load counts as a write. One operation of the pair loses nothing, and was the only one looked at."""
    m = model("fp8-current")
    for _ in range(loads):
        m.load_state_dict(copy.deepcopy(m.state_dict()))
    average, weight = m[0].weight.detach(), m[0].weight.dequantize() + 0.05 * torch.randn(64, 64)
    with pytest.warns(UserWarning, match=LOST):
        for _ in range(9):
            added(average, weight, 0.999)


def test_an_averaged_model_warns() -> None:
    average = AveragedModel(model(), multi_avg_fn=get_ema_multi_avg_fn(0.99))
    average.update_parameters(model())
    with pytest.warns(UserWarning, match=LOST):
        average.update_parameters(model(seed=1))


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("form", ["foreach", "fused", ""])
def test_an_optimizer_without_masters_warns(make, form) -> None:
    m = model()
    optimizer = make(m.parameters(), lr=1e-4, **({form: True} if form else {"foreach": False}))
    with pytest.warns(UserWarning, match=LOST):
        for _ in range(3):
            m(torch.ones(8, 64)).sum().backward()
            optimizer.step()


@pytest.mark.parametrize("name", ["fp8_e4m3_tensor", "mxfp8_e4m3", "nvfp4"])
def test_the_first_write_is_looked_at(name) -> None:
    """A merge into a weight that was just quantized is one write, and no second one follows."""
    fmt = duotone.formats.get(name)
    t = duotone.Quantizer(fmt, fmt).quantize(torch.randn(64, 64))
    with pytest.warns(UserWarning, match=LOST):
        t.add_(torch.randn(64, 64), alpha=1e-3)


@pytest.mark.parametrize("write", [
    lambda w: w.normal_(std=0.02),
    lambda w: nn.init.trunc_normal_(w, std=0.02),
    lambda w: nn.init.kaiming_uniform_(w),
    lambda w: nn.init.orthogonal_(w),
    lambda w: w.mul_(2.0),
    lambda w: w.add_(torch.randn(64, 64)),
    lambda w: w.zero_(),
    lambda w: w.mul_(1.0),
    lambda w: w.copy_(torch.randn(64, 64)).clamp_(-0.5, 0.5),
], ids=["normal", "trunc_normal", "kaiming", "orthogonal", "mul", "add", "zero", "nothing", "clamp"])  # fmt: skip
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

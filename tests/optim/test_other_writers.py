"""Masters beside code that writes weights itself: averages that are swapped in and out, copies, merges."""

import copy

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone.tensor.plane_tensor import plain

RECIPES = ("mxfp8", "fp8-current", "fp8-rowwise", "fp8-block", "nvfp4", "fp8-delayed")


def in_inference_mode(m: nn.Linear, values: Tensor) -> None:
    with torch.inference_mode():
        m.weight.copy_(values)


def by_rows(m: nn.Linear, values: Tensor) -> None:
    m.weight[:32], m.weight[32:] = values[:32], values[32:]


def through_another_parameter(m: nn.Linear, values: Tensor) -> None:
    """As an average does that swaps its memory in."""
    other = nn.Parameter(m.weight.detach().clone())
    m.weight.data, other.data = other.data, m.weight.data
    other.copy_(values)
    m.weight.data, other.data = other.data, m.weight.data


WRITERS = {
    "load_state_dict": lambda m, values: m.load_state_dict({**m.state_dict(), "weight": values}),
    "copy_": lambda m, values: m.weight.copy_(values),
    "foreach": lambda m, values: torch._foreach_copy_([m.weight], [values]),
    "foreach of data": lambda m, values: torch._foreach_copy_([m.weight.data], [values]),
    "detach": lambda m, values: m.weight.detach().copy_(values),
    "data.copy_": lambda m, values: m.weight.data.copy_(values),
    "data": lambda m, values: setattr(m.weight, "data", values.clone()),
    "out": lambda m, values: torch.mul(values, 1.0, out=m.weight.detach()),
    "rows": by_rows,
    "transpose": lambda m, values: m.weight.t().copy_(values.t()),
    "inference mode": in_inference_mode,
    "another parameter": through_another_parameter,
}
pytestmark = pytest.mark.filterwarnings("ignore:stochastic rounding draws from seeds that no checkpoint restored")
every_writer = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS.keys())


def linear(recipe: str | None, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> nn.Linear:
    """A linear whose weight is stored quantized; with None in bf16, beside masters."""
    torch.manual_seed(seed)
    m = nn.Linear(64, 64, bias=False).to(dtype)
    duotone.convert(m, recipe or "mxfp8", rules=())
    return m if recipe is None else duotone.convert_parameters(m, recipe)


def optimizer_of(m: nn.Linear) -> duotone.optim.AdamW:
    return duotone.optim.AdamW([m.weight], lr=1e-4, weight_decay=0.0, master_weights=True)


def step(m: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    m(torch.ones(8, 64, dtype=m.weight.dtype)).sum().backward()  # delayed scales roll
    m.weight.grad = torch.ones(64, 64, dtype=m.weight.dtype)
    optimizer.step()


@every_writer
@pytest.mark.parametrize("as_values", [False, True], ids=["clones", "values"])
@pytest.mark.parametrize("recipe", [*RECIPES, None])
def test_weights_that_are_swapped_out_and_back_keep_their_masters(recipe, as_values, write) -> None:
    """Bit for bit. The codes of a clone come back as they were; those of values too, but for what is rounded twice."""
    masters = []
    for swaps in (False, True):
        m = linear(recipe)
        optimizer = optimizer_of(m)
        for _ in range(4):
            step(m, optimizer)
            own = m.weight.detach().clone()
            own = plain(own).clone() if as_values else own
            with torch.no_grad():
                for values in (own * 0.5, own) if swaps else ():
                    write(m, values)
        step(m, optimizer)
        masters.append(optimizer.state[m.weight]["master"])
    assert torch.equal(*masters)


@every_writer
@pytest.mark.parametrize("as_values", [False, True], ids=["quantized", "values"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_new_weights_become_the_masters_whoever_writes_them(recipe, as_values, write) -> None:
    """A step of lr 0 then leaves them there."""
    m, other = linear(recipe), linear(recipe, seed=1)
    optimizer = optimizer_of(m)
    step(m, optimizer)
    with torch.no_grad():
        write(m, plain(other.weight.detach()).clone() if as_values else other.weight.detach())
    written = m.weight.dequantize(torch.float32).detach().clone()
    step_of_none(m, optimizer)
    master = optimizer.state[m.weight]["master"]
    kept = master != written  # by chance they round to what was written
    half_a_code = written.abs().max() / 6  # the widest, of E2M1
    assert kept.double().mean() < 0.2 and (master[kept] - written[kept]).abs().max() <= half_a_code
    assert torch.allclose(m.weight.dequantize(torch.float32), written, rtol=2**-7, atol=1e-6)


def test_a_write_that_leaves_no_version_counts_if_it_is_told() -> None:
    """A plain parameter gets memory back that it had, with new values: `increment_version` tells the next step."""
    for is_told in (False, True):
        m = linear(None)
        optimizer = optimizer_of(m)
        step(m, optimizer)
        before, written = m.weight.detach().clone(), torch.full_like(m.weight, 3.0).detach()
        with torch.no_grad():
            through_another_parameter(m, written)
        if is_told:
            torch.autograd.graph.increment_version(m.weight)
        step_of_none(m, optimizer)
        assert torch.equal(m.weight, written if is_told else before)


def step_of_none(m: nn.Linear, optimizer: torch.optim.Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = 0.0
    m.weight.grad = torch.ones(64, 64, dtype=m.weight.dtype)
    optimizer.step()


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8-current", "fp8-rowwise", "fp8-block", "fp8-delayed", None])
def test_a_master_follows_where_a_weight_changed_and_stays_where_not(recipe) -> None:
    """A mask, which zeroes every other row, leaves the masters of the others."""
    m = linear(recipe, torch.float32 if recipe else torch.bfloat16)
    optimizer = optimizer_of(m)
    for _ in range(3):
        step(m, optimizer)
    before = optimizer.state[m.weight]["master"].clone()
    with torch.no_grad():
        m.weight[::2].zero_() if recipe is None else m.weight.copy_(
            m.weight.dequantize() * (torch.arange(64)[:, None] % 2)
        )
    step_of_none(m, optimizer)
    after = optimizer.state[m.weight]["master"]
    assert not after[::2].any() and torch.equal(after[1::2], before[1::2])


@pytest.mark.parametrize("recipe", ["fp8-current", "fp8-rowwise", "fp8-block", "fp8-delayed"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_write_of_equal_values_keeps_the_codes(recipe, dtype) -> None:
    """Also if bf16 rounds the value that the scale follows from."""
    weight = linear(recipe, dtype).weight.detach()
    before = weight.rowwise_codes.view(torch.uint8).clone()
    weight.copy_(weight.dequantize(dtype))
    assert torch.equal(weight.rowwise_codes.view(torch.uint8), before)


def test_a_copy_of_a_model_does_not_write_the_masters_of_the_first() -> None:
    m = linear("mxfp8")
    optimizer = optimizer_of(m)
    step(m, optimizer)
    before, other = optimizer.state[m.weight]["master"].clone(), copy.deepcopy(m)
    with torch.no_grad():
        other.weight.zero_()
    step_of_none(m, optimizer)
    assert torch.equal(optimizer.state[m.weight]["master"], before)


@pytest.mark.filterwarnings("ignore:grad and param do not obey the gradient layout contract")
def test_masters_follow_a_weight_that_becomes_its_own_transpose() -> None:
    """`weight.data = weight.data.t()` has the same address and version, and other strides."""
    m = linear(None)
    optimizer = optimizer_of(m)
    step(m, optimizer)
    m.weight.data = m.weight.data.t()
    expected = m.weight.detach().clone()
    step(m, optimizer)
    assert (m.weight - expected).abs().max() <= 2 * 1e-4 + 2**-9 * expected.abs().max()  # a step of lr, and bf16


@pytest.mark.parametrize("is_quantized", [False, True], ids=["plain", "quantized"])
def test_a_new_parameter_that_gets_the_state_of_another_keeps_its_values(is_quantized: bool) -> None:
    """Code that permutes, resets or prunes neurons moves the state. The old master was written over the new weight."""
    layer = nn.Linear(32, 32).bfloat16()
    duotone.convert(layer, "mxfp8", rules=())
    if is_quantized:
        duotone.convert_parameters(layer, "mxfp8")
    optimizer = duotone.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0, master_weights=True)
    layer(torch.randn(8, 32).bfloat16()).sum().backward()
    optimizer.step()
    old = layer.weight
    values = (old.dequantize() if is_quantized else old).detach().flip(0)
    layer.weight = nn.Parameter(values.clone())
    optimizer.state[layer.weight] = optimizer.state.pop(old)
    group = optimizer.param_groups[0]
    group["params"] = [layer.weight if each is old else each for each in group["params"]]
    group["lr"] = 0.0
    layer.weight.grad = torch.ones_like(layer.weight)
    optimizer.step()
    assert torch.equal(layer.weight, values)

"""`is_first_microbatch` as a tensor: it decides on the device, with the bits of the same choice made by the host."""

import copy

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import UserError, recipes
from duotone.linear import plane_source

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
        for tensor, other in zip(m.parameters(), twin.parameters(), strict=True):
            assert torch.equal(tensor.grad, other.grad)
        for tensor, other in zip(m.buffers(), twin.buffers(), strict=True):
            assert torch.equal(tensor, other)
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


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current"])
@pytest.mark.parametrize("middle", [0, 1])
def test_backward_reads_the_weight_that_a_forward_without_gradients_encoded(name: str, middle: int) -> None:
    m, x = layer(name, "linear"), torch.randn(64, 128).bfloat16()
    flag = torch.ones(1)
    step(m, x.clone().requires_grad_(), flag)
    with torch.no_grad():
        m.weight.mul_(-2.0)
        m(x, is_first_microbatch=flag.fill_(middle))
    leaf = x.clone().requires_grad_()
    m(leaf, is_first_microbatch=flag.zero_()).float().sum().backward()
    assert_close(leaf.grad, m.weight.float().sum(0).expand(64, -1))


def test_reentrant_checkpoints_of_two_microbatches_recompute_with_the_weight_of_the_step() -> None:
    m, x, flag = layer("mxfp8", "linear"), torch.randn(64, 128).bfloat16(), torch.ones(1)
    for _ in range(2):
        leaves = [x.clone().requires_grad_() for _ in range(2)]
        outputs = []
        for number, leaf in enumerate(leaves):
            flag.fill_(number == 0)
            outputs.append(checkpoint(lambda t: m(t, is_first_microbatch=flag), leaf, use_reentrant=True))
        for y, leaf in zip(outputs, leaves, strict=True):
            y.float().sum().backward()
            assert_close(leaf.grad, m.weight.float().sum(0).expand(64, -1))
        with torch.no_grad():
            m.weight.mul_(-1.5)


@pytest.mark.parametrize("kind", ["linear", "grouped"])
@pytest.mark.parametrize("name", NAMES)
def test_microbatches_in_flight_go_backward_with_their_weight_or_raise(name: str, kind: str) -> None:
    """As in pipeline schedules: a second forward runs before the backward of the first one."""
    m, flag = layer(name, kind), torch.ones(1)
    twin = copy.deepcopy(m)
    splits = ([40, 24],) if kind == "grouped" else ()
    leaves = [torch.randn(64, 128).bfloat16().requires_grad_() for _ in range(2)]

    def forwards(module: torch.nn.Module, firsts: list[bool | torch.Tensor]) -> list[torch.Tensor]:
        return [module(x, *splits, is_first_microbatch=first) for x, first in zip(leaves, firsts, strict=True)]

    outputs = forwards(m, [flag, flag.clone().zero_()])
    for y, x, other in zip(outputs, leaves, forwards(twin, [True, False]), strict=True):
        result, want = (torch.autograd.grad(one.square().sum(), x)[0] for one in (y, other))
        assert torch.equal(result, want)
    (first, _) = forwards(m, [flag, flag])
    with torch.no_grad():
        m.get_parameter("weight" if kind == "linear" else "weight0").mul_(-2.0)
    forwards(m, [flag.zero_(), flag])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.sum().backward()


def assert_close(result: torch.Tensor, expected: torch.Tensor) -> None:
    assert (result.float() - expected).norm() < 0.2 * expected.norm()


@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_a_new_flag_tensor_in_each_call_leaves_one_stage_and_is_read(kind: str) -> None:
    m, x = layer("fp8-current", kind), torch.randn(64, 128).bfloat16()
    first = step(m, x, torch.ones(1))
    for p in [p for p in m.parameters() if p.dim() == 2]:
        p.data.mul_(torch.linspace(-3, 3, 128))  # which raises no version
    for _ in range(5):
        assert torch.equal(step(m, x, torch.zeros(1)), first)
    assert not torch.equal(step(m, x, torch.ones(1)), first)
    assert len(m.plans.variants) == 1


@pytest.mark.parametrize("change", ["recipe", "schedule", "float", "shape", "meta"])
def test_planes_that_cannot_be_written_over_are_encoded_anew(change: str) -> None:
    m, flag = layer("mxfp8-fwd-bf16-bwd" if change == "float" else "mxfp8", "linear"), torch.zeros(1)
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    step(m, x, flag)
    if change == "recipe":
        m.recipe = recipes.load("fp8-block")
    elif change == "schedule":
        m.recipe = recipes.load_schedule("mxfp8-then-bf16-fprop").over(10).at(9)
    elif change == "float":
        m.float()
        x = x.float()
    elif change == "shape":
        m.weight = torch.nn.Parameter(torch.randn(96, 128).bfloat16())
        m.bias = None
    else:
        m.to("meta")
        with torch.no_grad():
            assert m(x.to("meta"), is_first_microbatch=flag.to("meta")).is_meta
        return
    assert torch.equal(step(m, x, flag), m(x))


def test_graphs_keep_their_planes_and_refuse_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """No capture runs on a CPU: the cache only believes that one does."""
    m, x, flag = layer("mxfp8", "linear"), torch.randn(64, 128).bfloat16(), torch.zeros(1)

    def capture() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(plane_source, "is_capturing", lambda: True)
            step(m, x, flag)

    step(m, x, flag)
    capture()
    capture()
    cache = m.plans.options.caches[0]
    before = cache.planes
    m.recipe = recipes.load("fp8-block")
    with pytest.raises(UserError, match="run this call once"):
        capture()
    step(m, x, flag)
    assert cache.planes is not before and cache.captured is before
    with pytest.raises(UserError, match="an earlier graph has other planes"):
        capture()
    m.invalidate_weight_cache()
    step(m, x, flag)
    capture()


def test_a_flag_on_another_device_is_refused_in_the_first_call_too() -> None:
    for name in ("fp8-current", "bf16"):
        with pytest.raises(UserError, match="is on meta and the weight on cpu"):
            layer(name, "linear")(torch.randn(64, 128).bfloat16(), is_first_microbatch=torch.ones(1, device="meta"))

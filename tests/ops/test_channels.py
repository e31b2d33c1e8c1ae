"""Channels and op_kwargs of ops.Sequential, core 100."""

import copy
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import duotone
from duotone import UserError, ops, recipes

MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")


def rows(*shape: int) -> Tensor:
    return torch.randn(*(shape or (32, 64)))


def linear(recipe=MX, **options) -> ops.Linear:
    return ops.Linear(64, 64, recipe=recipe, name="l", **options)


def residual(middle: nn.Module, to_caller: bool = False) -> ops.Sequential:
    keep, add = ops.MakeExtraOutput(), ops.AddExtraInput()
    keep.set_extra_output_channel(0, "residual", output_to_caller=to_caller)
    add.set_extra_input_channel(0, "residual")
    return ops.Sequential(keep, middle, add)


@pytest.mark.parametrize("recipe", [recipes.load("bf16"), MX, NV], ids=lambda r: r.name)
def test_a_channel_is_the_residual_that_the_caller_would_pass(recipe) -> None:
    """The same bits, forward and backward; gradients of both ways are summed."""
    middle = linear(recipe)
    model, other = residual(middle), ops.Sequential(middle)
    x, dy = rows(), rows()
    leaves = [x.clone().requires_grad_() for _ in range(2)]
    start = duotone.rng_state(model)
    y = model(leaves[0])
    y.backward(dy)
    result = [y.detach(), leaves[0].grad, middle.weight.grad.clone()]
    middle.zero_grad()
    duotone.load_rng_state(model, start)
    expected = other(leaves[1]) + leaves[1]
    expected.backward(dy)
    for a, b in zip(result, (expected.detach(), leaves[1].grad, middle.weight.grad), strict=True):
        assert torch.equal(a, b)


def test_the_caller_gets_the_output_too_unless_told_otherwise() -> None:
    x = rows()
    y, saved = residual(linear(), to_caller=True)(x)
    assert torch.equal(saved, x) and y.shape == x.shape
    assert isinstance(residual(linear())(x), Tensor)
    keep = ops.MakeExtraOutput()
    keep.set_extra_output_channel(0, "r")
    assert len(ops.Sequential(keep, ops.Identity())(x)) == 2


def test_several_consumers_and_inputs_of_the_caller_mix() -> None:
    """One channel for two consumers, an input of the caller between them: in order, gradients summed."""
    keep, first, middle, last = ops.MakeExtraOutput(), ops.AddExtraInput(), ops.AddExtraInput(), ops.AddExtraInput()
    keep.set_extra_output_channel(0, "x", output_to_caller=False)
    first.set_extra_input_channel(0, "x")
    last.set_extra_input_channel(0, "x")
    model = ops.Sequential(keep, ops.ConstantScale(3.0), first, ops.GELU(), middle, last)
    assert model.extra_inputs == 1
    x, other, dy = rows().requires_grad_(), rows().requires_grad_(), rows()
    y = model(x, other)
    y.backward(dy)
    result = [y.detach(), x.grad, other.grad]
    x.grad = other.grad = None
    expected = F.gelu(x * 3.0 + x, approximate="tanh") + other + x
    expected.backward(dy)
    for a, b in zip(result, (expected.detach(), x.grad, other.grad), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)  # sums of gradients in another order
    with pytest.raises(UserError, match="2 further inputs were given to ops that take 1"):
        model(x, other, other)


def chain(*channels: tuple[str, str]) -> ops.Sequential:
    """Ops that give ("out", name) or take ("in", name) channels."""
    results = []
    for kind, name in channels:
        op = ops.MakeExtraOutput() if kind == "out" else ops.AddExtraInput()
        op.set_extra_output_channel(0, name) if kind == "out" else op.set_extra_input_channel(0, name)
        results.append(op)
    return ops.Sequential(*results)


@pytest.mark.parametrize(
    ("channels", "message"),
    [
        ([("in", "r")], "AddExtraInput at 0 takes the channel 'r', which no op gives; no op gives a channel"),
        ([("out", "q"), ("in", "r")], "AddExtraInput at 1 takes the channel 'r', which no op gives; channels are 'q'"),
        ([("in", "r"), ("out", "r")], "AddExtraInput at 0 takes the channel 'r', which the op at 1 gives later"),
        (
            [("out", "r"), ("out", "r"), ("in", "r")],
            "the channel 'r' is given by MakeExtraOutput at 0 and MakeExtraOutput at 1; give each a name of its own",
        ),
    ],
)
def test_channels_without_one_giver_before_them_are_refused_before_anything_runs(channels, message) -> None:
    model = ops.Sequential(linear(NV), *chain(*channels))
    message = re.sub(r"at (\d)", lambda match: f"at {int(match[1]) + 1}", message)
    seed = model[0].duotone_seed.clone()
    with pytest.raises(UserError, match=re.escape(message)):
        model(rows())
    assert torch.equal(model[0].duotone_seed, seed)


def test_binding_again_counts_from_the_next_call() -> None:
    keep, other, add = ops.MakeExtraOutput(), ops.MakeExtraOutput(), ops.AddExtraInput()
    keep.set_extra_output_channel(0, "a", output_to_caller=False)
    other.set_extra_output_channel(0, "b", output_to_caller=False)
    add.set_extra_input_channel(0, "a")
    model, x = ops.Sequential(keep, ops.ConstantScale(2.0), other, add), torch.ones(2, 4)
    assert torch.equal(model(x), torch.full((2, 4), 3.0))
    add.set_extra_input_channel(0, "b")
    assert torch.equal(model(x), torch.full((2, 4), 4.0))
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(x), torch.full((2, 4), 4.0))
    add.set_extra_input_channel(0, None)
    assert torch.equal(model(x, torch.full((2, 4), 5.0)), torch.full((2, 4), 7.0))
    keep.set_extra_output_channel(0, None)
    assert [float(t[0, 0]) for t in model(x, x)] == [3.0, 1.0]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.GELU().set_extra_input_channel(0, "r"), "GELU has 0 further inputs; got the index 0"),
        (lambda: ops.MakeExtraOutput().set_extra_output_channel(1, "r"), "has 1 further outputs; got the index 1"),
        (lambda: ops.AddExtraInput().set_extra_input_channel(0, ""), "a channel is a name, or None for the caller"),
    ],
)
def test_places_and_names_that_are_none_are_refused(call, message) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_experts_take_their_splits_from_a_channel() -> None:
    """A channel holds what ops accept, row counts too; an op with hooks takes part as well."""

    class Counts(ops.Identity):
        extra_outputs = 1

        def forward(self, x: Tensor, **flags):
            return x, [8, 24]

        pipeline = None

    counts, fc1, fc2 = Counts(), ops.GroupedLinear(2, 64, 32, name="a"), ops.GroupedLinear(2, 32, 64, name="b")
    counts.set_extra_output_channel(0, "splits", output_to_caller=False)
    for fc in (fc1, fc2):
        fc.set_extra_input_channel(0, "splits")
    model, x = ops.Sequential(counts, fc1, ops.GELU(), fc2), rows()
    expected = fc2(ops.GELU()(fc1(x, [8, 24])), [8, 24])
    assert torch.equal(model(x), expected)
    seen = []
    fc1.register_forward_hook(lambda *_: seen.append(1))
    assert torch.equal(model(x), expected) and seen == [1]


def test_op_kwargs_go_to_their_module_by_object_and_by_index() -> None:
    first, middle, plain = linear(), ops.GELU(), nn.Dropout(0.0)
    grouped = ops.GroupedLinear(2, 64, 64, recipe=MX, name="g")
    model, x, out = ops.Sequential(first, middle, plain, grouped), rows(), torch.zeros(32, 64)
    expected = model(x, [8, 24])
    for key in (grouped, 3):
        out.zero_()
        y = model(x, [8, 24], op_kwargs={key: {"out": out}, 0: {"is_first_microbatch": True}})
        assert torch.equal(y, expected) and y.data_ptr() == out.data_ptr()
    planes = first.plans.options.caches[0]
    assert planes is not None  # the first microbatch reached its op and no other one
    assert not grouped.plans.options.caches
    assert torch.equal(model(x, [8, 24], op_kwargs={first: {"is_first_microbatch": False}}), expected)


@pytest.mark.parametrize(
    ("op_kwargs", "message"),
    [
        ({7: {}}, "op_kwargs has 7; give a module of this Sequential, or an index below 2"),
        ({nn.Identity(): {}}, "op_kwargs has a Identity that is not there"),
        ({0: ["out"]}, "op_kwargs of 0 is ['out']; give a dict of keyword arguments"),
        (
            {0: {"outs": 1}},
            "op_kwargs of Linear at 0 has 'outs'; its forward takes is_first_microbatch, fp8",
        ),
        ([0], "op_kwargs is a dict of modules, or their indices, to dicts; got list"),
    ],
)
def test_op_kwargs_that_reach_nobody_are_refused_before_anything_runs(op_kwargs, message) -> None:
    model = ops.Sequential(linear(NV), ops.GELU())
    seed = model[0].duotone_seed.clone()
    with pytest.raises(UserError, match=re.escape(message)):
        model(rows(), op_kwargs=op_kwargs)
    assert torch.equal(model[0].duotone_seed, seed)


def test_channels_compile_whole() -> None:
    model, x = residual(linear()), rows()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert torch.equal(compiled(x), model(x))

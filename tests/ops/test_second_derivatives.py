"""Second derivatives: exact in high precision, by the same numbers as plain torch; elsewhere one error, never a number.

The oracle is the same function of the same parameters in plain operations of torch, in float64.
"""

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import ops, recipes
from duotone.dispatch.activations import ACTIVATIONS
from duotone.errors import UserError
from duotone.modules import LayerNormLinear, LayerNormMLP

BF16 = recipes.load("bf16")
SIZES = {"params_dtype": torch.float64}
NORMS = {
    "LayerNorm": lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, 1e-5),
    "RMSNorm": lambda x, w, b: x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w,
}


def randomised(m: nn.Module) -> nn.Module:
    """Parameters of order one, so that every one of them counts."""
    generator = torch.Generator().manual_seed(1)
    for p in m.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.5)
    return m


def mlp(kind: str, norm: str = "LayerNorm"):
    m = randomised(LayerNormMLP(8, 6, activation=kind, normalization=norm, **SIZES))

    def plain(x: Tensor) -> Tensor:
        h = NORMS[norm](x, m.layer_norm_weight, m.layer_norm_bias)
        h = ACTIVATIONS[kind].value(F.linear(h, m.fc1.weight, m.fc1.bias))
        return F.linear(h, m.fc2.weight, m.fc2.bias)

    return m, plain


def layer_norm_linear(norm: str, zero_centered: bool):
    m = randomised(LayerNormLinear(8, 6, normalization=norm, zero_centered_gamma=zero_centered, **SIZES))

    def plain(x: Tensor) -> Tensor:
        # A gamma that is zero-centred is added to 1 in fp32 at least.
        h = NORMS[norm](x, m.layer_norm_weight + 1 if zero_centered else m.layer_norm_weight, m.layer_norm_bias)
        return F.linear(h, m.weight, m.bias)

    return m, plain


def grouped(packed: bool):
    m = randomised(duotone.GroupedLinear(3, 8, 6, single_grouped_weight=packed, **SIZES))

    def plain(x: Tensor) -> Tensor:
        parts = x.reshape(-1, 8).split([3, 0, 7])
        ws, bs = (m.weights, m.biases) if not packed else (m.weight.unbind(0), m.biases)
        return torch.cat([F.linear(p, w, b) for p, w, b in zip(parts, ws, bs, strict=True)]).view(2, 5, 6)

    return lambda x: m(x, [3, 0, 7]), plain, m


def sequential():
    m = ops.Sequential(
        ops.Bias(8, dtype=torch.float64),
        ops.ConstantScale(0.7),
        ops.BasicLinear(8, 8, **SIZES),
        ops.Reshape((5, 2, 8)),
        ops.SwiGLU(),
        ops.BasicLinear(4, 3, **SIZES),
        ops.Quantize(backward=True, recipe=BF16),
        ops.L2Normalization(),
    )
    randomised(m)
    m[2].weight.requires_grad_(False)

    def plain(x: Tensor) -> Tensor:
        h = F.linear((x + m[0].bias) * 0.7, m[2].weight).reshape(5, 2, 8)
        h = F.linear(ACTIVATIONS["swiglu"].value(h), m[5].weight)
        return h * (h.square().sum(-1, keepdim=True) + 1e-6).rsqrt()

    return m, plain


def linear(**flags):
    m = randomised(duotone.Linear(8, 6, **SIZES))
    return (lambda x: m(x, **flags)), (lambda x: F.linear(x, m.weight, m.bias)), m


def frozen_linear():
    m = randomised(duotone.Linear(8, 6, **SIZES))
    m.weight.requires_grad_(False)
    return m, lambda x: F.linear(x, m.weight, m.bias)


def converted():
    plain = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))
    m = randomised(duotone.convert(copy.deepcopy(plain), recipes.load("mxfp8"), ()).double())
    for name, p in m.named_parameters():  # one set of parameters for both
        plain.get_submodule(name.rpartition(".")[0])._parameters[name.rpartition(".")[2]] = p

    def run(x: Tensor) -> Tensor:
        with duotone.autocast(enabled=False):
            return m(x)

    return run, plain, m


CASES = {
    "linear": lambda: linear(),
    "frozen linear": frozen_linear,
    "converted, autocast off": converted,
    "grouped": lambda: grouped(False),
    "grouped, packed": lambda: grouped(True),
    "layer norm": lambda: layer_norm_linear("LayerNorm", False),
    "rms norm": lambda: layer_norm_linear("RMSNorm", False),
    "sequential": sequential,
    **{f"mlp {kind}": (lambda kind=kind: mlp(kind)) for kind in ACTIVATIONS},
    "mlp, rms norm": lambda: mlp("swiglu", "RMSNorm"),
}


def case(name: str):
    m, plain, *rest = CASES[name]()
    return m, plain, [p for p in (rest[0] if rest else m).parameters() if p.requires_grad]


def x_of(seed: int = 2) -> Tensor:
    return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def penalty(f, parameters, order: int = 2) -> list[Tensor | None]:
    """Gradients of a function of gradients, for x and the parameters: `order` derivatives in all."""
    x = x_of().requires_grad_()
    value = f(x).pow(3).sum()
    for _ in range(order - 1):
        result = torch.autograd.grad(value, [x, *parameters], create_graph=True, allow_unused=True)
        value = sum(g.pow(2).sum() for g in result if g is not None)
    return list(torch.autograd.grad(value, [x, *parameters], allow_unused=True))


def assert_close(result, want, bound: float = 1e-9) -> None:
    """float64 all the way: only the order of sums differs."""
    for a, b in zip(result, want, strict=True):
        a, b = (torch.zeros((), dtype=torch.float64) if t is None else t.detach() for t in (a, b))
        torch.testing.assert_close(a.expand(b.shape), b, rtol=bound, atol=bound * (1 + b.abs().max().item()))


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("name", CASES)
def test_a_gradient_penalty_is_that_of_torch(name: str, order: int) -> None:
    m, plain, parameters = case(name)
    assert_close(penalty(m, parameters, order), penalty(plain, parameters, order))


@pytest.mark.parametrize("name", CASES)
def test_functional_hvp_and_hessian_are_those_of_torch(name: str) -> None:
    m, plain, _ = case(name)
    for of in (
        lambda f: torch.autograd.functional.hvp(lambda t: f(t).pow(3).sum(), x_of(), x_of(3))[1],
        lambda f: torch.autograd.functional.vhp(lambda t: f(t).pow(3).sum(), x_of(), x_of(3))[1],
        lambda f: torch.autograd.functional.hessian(lambda t: f(t).pow(3).sum(), x_of()),
    ):
        assert_close([of(m)], [of(plain)])


@pytest.mark.parametrize("name", CASES)
def test_torch_func_is_that_of_torch(name: str) -> None:
    m, plain, _ = case(name)
    batch = torch.stack([x_of(4), x_of(5)])
    for of in (
        lambda f: torch.func.grad(lambda t: f(t).pow(3).sum())(x_of()),
        lambda f: torch.func.vmap(f)(batch),
        lambda f: torch.func.jvp(f, (x_of(),), (x_of(3),))[1],
        lambda f: torch.func.vmap(torch.func.grad(lambda t: f(t).pow(3).sum()))(batch),
        lambda f: torch.func.hessian(lambda t: f(t).pow(3).sum())(x_of()),
    ):
        assert_close([of(m)], [of(plain)])


def test_forward_mode_is_that_of_torch() -> None:
    m, plain, _ = case("linear")
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x_of(), x_of(3))
        result, want = (torch.autograd.forward_ad.unpack_dual(f(dual)).tangent for f in (m, plain))
    assert_close([result], [want])


def test_dropout_replays_the_mask_of_its_forward() -> None:
    """The gradient of x p(x) through the same mask: every element that was dropped stays out of both derivatives."""
    m = ops.Sequential(ops.Dropout(0.5), ops.GELU())
    x = x_of().requires_grad_()
    y = m(x)
    (g,) = torch.autograd.grad(y.pow(2).sum(), x, create_graph=True)
    (gg,) = torch.autograd.grad(g.pow(2).sum(), x)
    mask = (y != 0).double() * 2
    plain = x_of().requires_grad_()
    (h,) = torch.autograd.grad(F.gelu(plain * mask, approximate="tanh").pow(2).sum(), plain, create_graph=True)
    (hh,) = torch.autograd.grad(h.pow(2).sum(), plain)
    assert_close([y, g, gg], [F.gelu(plain * mask, approximate="tanh"), h, hh])


def test_dropout_without_a_mask_is_an_error() -> None:
    """Of an input without a gradient, forward keeps none, and another mask would give other numbers."""
    m = ops.Sequential(ops.Dropout(0.5), ops.BasicLinear(8, 8, **SIZES), ops.GELU())
    (g,) = torch.autograd.grad(m(x_of()).square().sum(), m[1].weight, create_graph=True)
    with pytest.raises(UserError, match="no mask of dropout"):
        g.sum().backward()


@pytest.mark.parametrize("flags", [{"fp8_grad": True}, {"fp8_output": True}], ids=str)
@pytest.mark.filterwarnings("ignore:.*is quantized for a consumer that is not known")
def test_boundaries_in_high_precision_are_exact(flags) -> None:
    """In fp32, because boundaries take no float64: a few of its roundings in a row, of sums of 60 terms."""
    m, plain, rounding = linear(**flags)
    rounding.float()

    def run(x: Tensor) -> Tensor:
        y = m(x.float())
        return (y.dequantize() if isinstance(y, duotone.QuantizedTensor) else y).double()

    parameters = list(rounding.parameters())
    want = penalty(lambda x: plain(x.float()).double(), parameters)
    assert_close(penalty(run, parameters), want, 1e-5)


def test_the_same_tensor_as_input_and_extra_input_keeps_its_gradients_apart() -> None:
    m = ops.Sequential(ops.GELU(), ops.AddExtraInput())
    x = x_of().requires_grad_()
    (g,) = torch.autograd.grad(m(x, x).sum(), x, create_graph=True)
    (want,) = torch.autograd.grad((F.gelu(x, approximate="tanh") + x).sum(), x)
    assert_close([g], [want])


def test_create_graph_alone_changes_no_bit() -> None:
    for dtype in (torch.bfloat16, torch.float32):  # silu has other bits under create_graph in torch too
        m = LayerNormMLP(64, 96, activation="geglu", params_dtype=dtype, recipe=BF16)
        x = torch.randn(2, 5, 64, dtype=dtype, requires_grad=True)
        inputs = [x, *m.parameters()]
        first = torch.autograd.grad(m(x).float().square().sum(), inputs)
        again = torch.autograd.grad(m(x).float().square().sum(), inputs, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


QUANTIZED = {
    "linear": lambda recipe: duotone.Linear(32, 32, recipe=recipe),
    "converted": lambda recipe: duotone.convert(nn.Sequential(nn.Linear(32, 32)), recipe, ()),
    "mlp": lambda recipe: LayerNormMLP(32, 32, recipe=recipe),
    "norm before": lambda recipe: ops.Sequential(ops.RMSNorm(32), ops.BasicLinear(32, 32, recipe=recipe)),
    "activation behind": lambda recipe: ops.Sequential(ops.BasicLinear(32, 32, recipe=recipe), ops.GELU()),
}
MOVING = ("nvfp4", "fp8-delayed")
"""Recipes whose bits are others at the next call, or backward."""
REFUSES = r"no second derivative.*duotone\.revert\(model\).*duotone\.autocast\(enabled=False\)"


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_second_derivatives_of_quantized_operands_are_an_error(name: str, recipe: str) -> None:
    """With a gradient that depends on nothing, as `ones` of a sum, too; and asking for a graph alone is none."""
    m = QUANTIZED[name](recipes.load(recipe))
    for scale in (lambda y: y.sum(), lambda y: y.square().sum()):
        x = torch.randn(32, 32).requires_grad_()
        y = scale(m(x))
        (plain,) = torch.autograd.grad(y, x, retain_graph=True)
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        assert g.requires_grad and (recipe in MOVING or torch.equal(plain, g))
        for inputs in ([x], list(m.parameters())[:1]):
            with pytest.raises(UserError, match=REFUSES):
                torch.autograd.grad(g.square().sum(), inputs, allow_unused=True, retain_graph=True)
        with pytest.raises(UserError, match=REFUSES):
            g.square().sum().backward()


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_a_batch_of_gradients_of_quantized_operands_is_an_error_of_one_line(name: str, recipe: str) -> None:
    """torch has no batching rules for casts. One gradient after the other works, with the graph that was kept."""
    m, x = QUANTIZED[name](recipes.load(recipe)), torch.randn(32, 32).requires_grad_()
    y = m(x)
    options = {"is_grads_batched": True, "retain_graph": True}
    for again in (False, True):
        with pytest.raises(UserError, match=r"quantized, so it takes no batch of gradients.*; differentiate") as error:
            torch.autograd.grad(y, x, torch.ones(3, *y.shape), create_graph=again, **options)
        assert "\n" not in str(error.value)
    with duotone.autocast(enabled=False):
        y = m(x)
    (batch,) = torch.autograd.grad(y, x, torch.ones(3, *y.shape), **options)
    (single,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(batch, single.expand(3, -1, -1))


def test_a_batch_of_gradients_through_compiled_code_moves_no_delayed_state() -> None:
    """torch calls an op that has no batching rule once for each gradient."""
    torch.compiler.reset()
    m, x = duotone.convert(nn.Linear(32, 32), "fp8-delayed"), torch.randn(32, 32).requires_grad_()
    compiled = torch.compile(m, backend="aot_eager")
    compiled(x).sum().backward()
    y = compiled(x)
    before = {name: value.clone() for name, value in m.state_dict().items()}
    with pytest.raises(UserError, match=r"takes no batch of gradients.*; differentiate") as error:
        torch.autograd.grad(y, x, torch.full((3, *y.shape), 100.0), is_grads_batched=True)
    assert "\n" not in str(error.value)
    after = m.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8-current"])
def test_under_a_checkpoint_graphs_are_as_without_it(recipe: str) -> None:
    """A non-reentrant checkpoint hands saved tensors out once in a backward."""
    inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    m, x = duotone.convert(inner, recipes.load(recipe), ()), torch.randn(32, 32, requires_grad=True)
    first, second = [], []
    for run in (m, lambda t: checkpoint(m, t, use_reentrant=False)):
        (gradient,) = torch.autograd.grad(run(x).square().sum(), x, create_graph=True)
        first.append(gradient.detach())
        if recipe == "bf16":
            second.append(torch.autograd.grad(gradient.square().sum(), m[0].weight)[0])
        else:
            with pytest.raises(UserError, match="no second derivative"):
                gradient.square().sum().backward()
    assert all(torch.equal(gradients[0], gradients[1]) for gradients in (first, second) if gradients)


@pytest.mark.parametrize("name", QUANTIZED)
def test_functional_transforms_of_quantized_operands_are_an_error(name: str) -> None:
    m = QUANTIZED[name](recipes.load("nvfp4"))
    seeds, x = duotone.rng_state(m), torch.randn(32, 32)
    loss = lambda t: m(t).square().sum()  # noqa: E731
    for attempt in (
        lambda: torch.func.grad(loss)(x),
        lambda: torch.func.vmap(m)(x.view(1, 32, 32)),
        lambda: torch.func.jvp(m, (x,), (x,)),
    ):
        with pytest.raises(UserError, match=REFUSES):
            attempt()
    assert all(torch.equal(seed, seeds[key]) for key, seed in duotone.rng_state(m).items())  # nothing was drawn
    for functional in (torch.autograd.functional.hvp, torch.autograd.functional.vhp):
        with pytest.raises(UserError, match=REFUSES):
            functional(loss, x, x)
    with pytest.raises(UserError, match=REFUSES), torch.autograd.forward_ad.dual_level():
        m(torch.autograd.forward_ad.make_dual(x, x))


@pytest.mark.parametrize("kind", ["linear", "group", "attention"])
def test_functional_transforms_in_compiled_code_are_exact_or_an_error(kind: str) -> None:
    """Dynamo gives zeros for the gradients of a custom function under torch.func.grad."""
    recipe, x = recipes.load("mxfp8"), torch.randn(8, 32)
    if kind == "linear":
        m = duotone.Linear(32, 32, recipe=recipe)
    elif kind == "group":
        group = duotone.GroupedLinear(1, 32, 32, recipe=recipe)
        m = lambda t: group(t, [len(t)])  # noqa: E731
    else:
        core = duotone.DotProductAttention(1, 32, recipe=duotone.Float8CurrentScaling(fp8_dpa=True))
        m = lambda t: core(*[t.view(-1, 1, 1, 32)] * 3)  # noqa: E731

    def gradient(t: Tensor) -> Tensor:
        return torch.func.grad(lambda t: m(t).square().sum())(t)

    compiled = torch.compile(gradient, backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match=r"has no second derivative and none of torch\.func"):
        compiled(x)
    if kind == "linear":
        with duotone.autocast(enabled=False):
            assert_close([compiled(x)], [gradient(x)])


def test_gradients_that_leave_autograd_have_no_second_derivative() -> None:
    m = duotone.Linear(8, 8, fuse_wgrad_accumulation=True)
    m.weight.main_grad = torch.zeros(8, 8)
    x = torch.randn(4, 8, requires_grad=True)
    (g,) = torch.autograd.grad(m(x).square().sum(), x, create_graph=True)
    with pytest.raises(UserError, match="fuse_wgrad_accumulation"):
        g.sum().backward()


def test_a_graph_that_is_asked_for_holds_no_high_precision_input() -> None:
    """What stands for the input of a quantized linear in a graph is an empty tensor, not the input."""
    saved: list[Tensor] = []
    m = duotone.Linear(32, 32, bias=False, recipe=recipes.load("mxfp8"))
    x = torch.randn(32, 32).requires_grad_() * 1
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        m(x)
    assert all(t.dtype is not torch.float32 or not t.numel() for t in saved)


@pytest.mark.parametrize("where", [nullcontext, torch.no_grad, torch.inference_mode])
def test_a_call_gives_one_tensor_whatever_is_recorded(where) -> None:
    with where():
        for make in QUANTIZED.values():
            assert isinstance(make(recipes.load("mxfp8"))(torch.randn(32, 32)), Tensor)

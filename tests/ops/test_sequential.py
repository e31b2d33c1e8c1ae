"""ops.Sequential: a container like nn.Sequential, further inputs and outputs, hooks, what is saved, and Quantize."""

import copy
import dataclasses
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import QuantizedTensor, QuantizerRole, RecipeError, UserError, ops, recipes
from duotone.modules import LayerNormLinear, LayerNormMLP
from duotone.tensor.context import QuantizeContext
from duotone.tensor.quantizer import Quantizer

MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")
INPUT, GRAD = QuantizerRole("linear", "input"), QuantizerRole("linear", "grad_output")
STATELESS = [name for name in recipes.names() if not recipes.load(name)(INPUT).history]
DTYPE = torch.bfloat16


def linear(n: int = 64, k: int = 64, **options) -> ops.BasicLinear:
    return ops.BasicLinear(k, n, params_dtype=DTYPE, **{"recipe": MX, **options})


def rows(m: int = 32, k: int = 64) -> Tensor:
    return torch.randn(m, k).to(DTYPE)


def outcome(call, parameters, x: Tensor, *extra: Tensor) -> list[Tensor]:
    """Outputs, gradients of all inputs and of the parameters, of a loss over every output."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, *extra)]
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    y = call(*leaves)
    outputs = y if isinstance(y, tuple) else (y,)
    sum((i + 1) * out.float().square().sum() for i, out in enumerate(outputs)).backward()
    gradients = [t.grad for t in (*leaves, *parameters)]
    return [*(out.detach() for out in outputs), *(g for g in gradients if g is not None)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def saved(call) -> list[tuple]:
    seen: list[tuple] = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: (seen.append((tuple(t.shape), t.dtype)), t)[1], lambda t: t
    ):
        call()
    return seen


def one_by_one(model: nn.Sequential, x: Tensor) -> Tensor:
    for module in model:
        x = module(x)
    return x


# --- a container


def test_it_is_a_container_like_torchs() -> None:
    """core 100: index, slice, append, extend, insert, assignment, deletion, +, names; the outcome follows each."""
    parts = [linear(), ops.GELU(), ops.RMSNorm(64, dtype=DTYPE), linear(), ops.Bias(64, dtype=DTYPE), linear(32)]
    model, x = ops.Sequential(*parts[:3]), rows()

    def check(expected: list[nn.Module]) -> None:
        assert list(model) == expected and equal(
            outcome(model, model.parameters(), x), outcome(lambda t: one_by_one(model, t), model.parameters(), x)
        )

    check(parts[:3])
    assert model.append(parts[3]) is model
    check(parts[:4])
    model.extend(parts[4:])
    check(parts)
    assert model[0] is parts[0] and model[-1] is parts[-1] and len(model) == 6
    part = model[1:3]
    assert type(part) is ops.Sequential and list(part) == parts[1:3]
    del model[1]
    check([parts[0], *parts[2:]])
    model.insert(1, parts[1])
    model[1] = replaced = ops.SiLU()
    check([parts[0], replaced, *parts[2:]])
    assert list(model.state_dict()) == ["0.weight", "2.weight", "3.weight", "4.bias", "5.weight"]
    by_name = ops.Sequential(OrderedDict(up=parts[0], act=parts[1]))
    assert list(by_name.state_dict()) == ["up.weight"] and torch.equal(by_name(x), one_by_one(by_name, x))
    assert torch.equal(ops.Sequential()(x), x)


def test_a_sum_of_two_is_one_pipeline_again() -> None:
    """core 100: `+` gives a Sequential that routes further inputs."""
    left, right = ops.Sequential(linear(), ops.GELU()), ops.Sequential(ops.AddExtraInput(), linear(32))
    both = left + right
    x, other = rows(), rows()
    assert type(both) is ops.Sequential
    assert torch.equal(both(x, other), right(left(x), other))


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_are_independent_and_equal(copier) -> None:
    model, x = (
        ops.Sequential(ops.LayerNorm(64, dtype=DTYPE), linear(), ops.SwiGLU(), ops.Dropout(0.0), linear(32, 32)),
        rows(),
    )
    expected = outcome(model, model.parameters(), x)
    other = copier(model)
    assert equal(outcome(other, other.parameters(), x), expected)
    with torch.no_grad():
        other[1].weight.zero_()
    assert equal(outcome(model, model.parameters(), x), expected)
    empty = ops.Sequential(ops.LayerNorm(64, dtype=DTYPE), linear(), ops.SwiGLU(), ops.Dropout(0.0), linear(32, 32))
    empty.load_state_dict(model.state_dict())
    assert equal(outcome(empty, empty.parameters(), x), expected)


# --- further inputs and outputs


@pytest.mark.parametrize("between", [[], [nn.Tanh()]], ids=["pipeline", "a module between"])
def test_further_inputs_and_outputs_go_where_they_belong(between) -> None:
    """core 100: in order, with the gradients of autograd through plain tensors."""
    a, b = ops.BasicLinear(64, 48), ops.BasicLinear(48, 32)
    model = ops.Sequential(
        ops.MakeExtraOutput(),
        a,
        ops.AddExtraInput(),
        *between,
        ops.MakeExtraOutput(),
        ops.SiLU(),
        ops.AddExtraInput(),
        b,
    )
    x, first, second = torch.randn(8, 64), torch.randn(8, 48), torch.randn(8, 48)

    def plain(x: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, ...]:
        h = F.linear(x, a.weight) + first
        h = torch.tanh(h) if between else h
        return F.linear(F.silu(h) + second, b.weight), x, h

    result = outcome(model, model.parameters(), x, first, second)
    assert equal(result, outcome(plain, model.parameters(), x, first, second))


def test_an_output_that_no_loss_uses_gets_no_gradient_and_changes_no_other() -> None:
    a, x = ops.BasicLinear(64, 48), torch.randn(8, 64)
    model = ops.Sequential(a, ops.MakeExtraOutput(), ops.ReLU())
    for use, plain in ((0, lambda t: F.relu(F.linear(t, a.weight))), (1, lambda t: F.linear(t, a.weight))):
        result = outcome(lambda t, use=use: model(t)[use], model.parameters(), x)
        assert equal(result, outcome(plain, model.parameters(), x))


def test_gradients_of_a_further_input_alone() -> None:
    """What stands before the addition is frozen: it saves nothing and costs no backward."""
    a, b = linear(), linear(32)
    a.weight.requires_grad_(False)
    model, x = ops.Sequential(a, ops.AddExtraInput(), b), rows()
    other = rows().requires_grad_()
    model(x, other).sum().backward()
    alone = other.detach().clone().requires_grad_()
    ops.Sequential(b)(a(x).detach() + alone).sum().backward()
    assert torch.equal(other.grad, alone.grad)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_wrong_number_of_further_inputs_is_one_line_and_runs_nothing(count) -> None:
    seen = []
    probe = nn.Tanh()
    probe.register_forward_hook(lambda *_: seen.append(1))
    model = ops.Sequential(linear(recipe=NV), probe, ops.AddExtraInput(), ops.AddExtraInput())
    before = duotone.rng_state(model)
    with pytest.raises(UserError, match=rf"{count} further inputs were given to ops that take 2"):
        model(rows(), *[rows()] * count)
    assert not seen and all(torch.equal(v, before[k]) for k, v in duotone.rng_state(model).items())


@pytest.mark.parametrize(
    ("last", "extra", "message"),
    [
        (lambda: ops.AddExtraInput(), (torch.zeros(3, 64, dtype=DTYPE),), "one shape"),
        (lambda: ops.AddExtraInput(), (None,), ""),
        (lambda: ops.GroupedLinear(2, 64, 32, params_dtype=DTYPE, recipe=NV), ([1, 2],), "sum to 3"),
        (lambda: ops.Reshape((5, -1)), (), ""),
        (lambda: ops.Sequential(ops.Reshape((16, -1)), linear(32))[:], (), "takes"),
    ],
    ids=["shape", "none", "splits", "reshape", "width after reshape"],
)
def test_a_bad_input_in_the_middle_is_one_line_and_leaves_nothing_half_updated(last, extra, message) -> None:
    """Issue: clear errors in forward, nothing half-updated: neither seeds nor delayed amaxes of the ops before."""
    end = last()
    end = list(end) if isinstance(end, ops.Sequential) else [end]
    model = ops.Sequential(linear(recipe=NV), linear(recipe=recipes.load("fp8-delayed")), *end)
    with torch.no_grad():
        ops.Sequential(model[0], model[1])(rows())  # makes the states
    before = {name: b.clone() for name, b in model.named_buffers()}
    with pytest.raises(UserError) as error:
        model(rows(), *extra)
    assert message in str(error.value) and "\n" not in str(error.value)
    after = dict(model.named_buffers())
    assert set(after) == set(before) and all(torch.equal(b, before[name]) for name, b in after.items())


# --- other modules, hooks


def test_other_modules_run_alone_between_the_pipelines() -> None:
    """core 100: nn.Modules, whole Duotone modules and nested Sequentials give what they give alone."""
    model = ops.Sequential(
        linear(),
        nn.GELU(),
        LayerNormMLP(64, 32, params_dtype=DTYPE, recipe=MX),
        ops.Sequential(linear(), ops.ReLU()),
        linear(32),
    )
    x = rows()
    want = outcome(lambda t: one_by_one(model, t), model.parameters(), x)
    assert equal(outcome(model, model.parameters(), x), want)


class Doubled(duotone.Linear):
    """A user's subclass with a forward of its own."""

    def forward(self, x, **options):
        return 2 * super().forward(x, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: LayerNormLinear(64, 64, params_dtype=DTYPE, recipe=MX),
        lambda: LayerNormLinear(64, 64, params_dtype=DTYPE, recipe=MX, return_layernorm_output=True),
        lambda: Doubled(64, 64, params_dtype=DTYPE, recipe=MX),
        lambda: duotone.Linear(64, 64, params_dtype=DTYPE, recipe=MX, return_bias=True),
    ],
    ids=["LayerNormLinear", "LayerNormLinear with its norm", "own forward", "return_bias"],
)
def test_a_module_that_is_more_than_its_linear_gives_in_a_sequential_what_it_gives_alone(make) -> None:
    module, x = make(), rows()
    alone, inside = module(x), ops.Sequential(ops.Identity(), module)(x)
    alone, inside = (t if isinstance(t, tuple) else (t,) for t in (alone, inside))
    assert equal([t.detach() for t in inside], [t.detach() for t in alone])


@pytest.mark.parametrize("kind", ["forward", "forward_pre", "full_backward", "full_backward_pre"])
@pytest.mark.parametrize("at", [0, 1, 2])
def test_hooks_fire_once_and_change_no_bit(kind, at) -> None:
    model, x = ops.Sequential(linear(), ops.GELU(), linear(32)), rows()
    expected = outcome(model, model.parameters(), x)
    fired: list[str] = []
    handle = getattr(model[at], f"register_{kind}_hook")(lambda *_: fired.append(kind))
    assert equal(outcome(model, model.parameters(), x), expected) and fired == [kind]
    handle.remove()
    assert equal(outcome(model, model.parameters(), x), expected) and fired == [kind]


def test_an_op_with_hooks_still_gets_its_further_inputs() -> None:
    add, grouped = ops.AddExtraInput(), ops.GroupedLinear(2, 64, 32, recipe=MX, params_dtype=DTYPE)
    model, x, other = ops.Sequential(linear(), add, grouped), rows(), rows()
    expected = model(x, other, [20, 12])
    fired = []
    for op in (add, grouped):
        op.register_forward_hook(lambda *_: fired.append(1))
    assert torch.equal(model(x, other, [20, 12]), expected) and len(fired) == 2


@pytest.mark.parametrize("wrap", ["hook", "nested", "module"])
def test_is_first_microbatch_reaches_ops_that_run_alone(wrap) -> None:
    """core 83: the first microbatch overwrites main_grad everywhere."""
    op = linear(fuse_wgrad_accumulation=True)
    inner = op
    if wrap == "hook":
        op.register_forward_hook(lambda *_: None)
    elif wrap == "nested":
        inner = ops.Sequential(op)
    else:
        inner = LayerNormMLP(64, 64, fuse_wgrad_accumulation=True, params_dtype=DTYPE, bias=False)
    weights = [p for p in inner.parameters() if p.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.full(weight.shape, 1e6)
    ops.Sequential(ops.Identity(), inner)(rows(), is_first_microbatch=True).float().sum().backward()
    assert all(weight.main_grad.abs().max() < 1e5 for weight in weights)


def test_is_first_microbatch_encodes_each_weight_once(monkeypatch) -> None:
    calls: list[tuple] = []
    encode = Quantizer.encode
    monkeypatch.setattr(
        Quantizer, "encode", lambda s, x, *a, **k: (calls.append(tuple(x.shape)), encode(s, x, *a, **k))[1]
    )
    model, x = ops.Sequential(linear(48), ops.GELU(), linear(32, 48)), rows(16)
    expected = model(x)
    for first, times in ((True, 1), (False, 0), (False, 0), (None, 1)):
        calls.clear()
        assert torch.equal(model(x, is_first_microbatch=first), expected)
        assert calls.count((48, 64)) == calls.count((32, 48)) == times


@pytest.mark.parametrize("name", recipes.names())
def test_torch_autocast_computes_in_its_dtype_and_nothing_else_changes(name) -> None:
    """Operands are cast at the entrance; the fp32 sums and epilogues of a product stay fp32."""
    recipe = recipes.load(name)
    model = ops.Sequential(
        ops.BasicLinear(64, 64, recipe=recipe), ops.GELU(), ops.Bias(64), ops.Linear(64, 32, recipe=recipe)
    )
    low = copy.deepcopy(model).to(DTYPE)
    x = torch.randn(16, 64)
    with torch.autocast("cpu", dtype=DTYPE):
        result = outcome(model, model.parameters(), x)
    want = outcome(low, low.parameters(), x.to(DTYPE))
    assert result[0].dtype == DTYPE and all(torch.equal(a, b.to(a.dtype)) for a, b in zip(result, want, strict=True))
    assert all(p.grad.dtype == torch.float32 for p in model.parameters())


# --- what is saved, and used again


@pytest.mark.parametrize(
    "prefix",
    [
        lambda: [linear()],
        lambda: [ops.LayerNorm(64, dtype=DTYPE), linear(), ops.GELU()],
        lambda: [ops.RMSNorm(64, dtype=DTYPE), ops.ConstantScale(2.0), ops.Bias(64, dtype=DTYPE)],
        lambda: [ops.Dropout(0.5), ops.Reshape((32, 64)), ops.Identity()],
        lambda: [ops.MakeExtraOutput(), linear(128), ops.SwiGLU()],
    ],
    ids=["linear", "norm linear gelu", "rms scale bias", "dropout", "gated"],
)
def test_a_prefix_without_gradients_saves_nothing(prefix) -> None:
    """core 103, 86: only what the first trained op and those behind it need."""
    before = prefix()
    for op in before:
        op.requires_grad_(False)
    trained = [linear(), ops.SiLU(), linear(32)]
    x = rows()
    alone = saved(lambda: ops.Sequential(*trained)(x))
    assert alone and saved(lambda: ops.Sequential(*before, *trained)(x)) == alone
    with torch.no_grad():
        assert not saved(lambda: ops.Sequential(*before, *trained)(x))


def test_one_op_at_two_places_gets_both_gradients() -> None:
    op, x = ops.BasicLinear(64, 64), torch.randn(8, 64)
    result = outcome(ops.Sequential(op, ops.GELU(), op), op.parameters(), x)
    want = outcome(
        lambda t: F.linear(F.gelu(F.linear(t, op.weight), approximate="tanh"), op.weight), op.parameters(), x
    )
    assert equal(result, want)


@pytest.mark.parametrize("name", ["bf16", "mxfp8", "nvfp4"])
def test_a_graph_that_is_retained_gives_the_same_gradients_again(name) -> None:
    """Stochastic rounding of the gradient repeats too: its seed belongs to the forward."""
    recipe = recipes.load(name)
    model = ops.Sequential(
        ops.RMSNorm(64, dtype=DTYPE),
        linear(128, recipe=recipe),
        ops.SwiGLU(),
        ops.MakeExtraOutput(),
        linear(32, recipe=recipe),
    )
    x = rows().requires_grad_()
    y, other = model(x)
    loss = y.float().sum() + other.float().square().sum()
    inputs = [x, *model.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert equal(list(torch.autograd.grad(loss, inputs)), list(first))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_results_may_be_written_in_place_or_say_so_before_a_gradient_is_wrong() -> None:
    module = LayerNormLinear(64, 32, return_layernorm_output=True)
    x = torch.randn(8, 64)
    module(x)[0].sum().backward()
    right, module.weight.grad = module.weight.grad, None
    y, normalised = module(x)
    try:
        normalised.add_(1)
        y.sum().backward()
    except RuntimeError as error:
        assert "inplace" in str(error)
    else:
        assert torch.equal(module.weight.grad, right)


# --- small ops


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 1.0])
def test_dropout_draws_what_torch_draws(p, dtype) -> None:
    outcomes = []
    for module in (ops.Sequential(ops.Dropout(p)), nn.Dropout(p)):
        torch.manual_seed(5)
        result = outcome(module, (), torch.ones(40, 50, dtype=dtype))
        outcomes.append(result if p == 1 else [*result, torch.rand(3)])  # for p = 1 torch draws nothing
        assert torch.equal(module.eval()(torch.ones(3, 3)), torch.ones(3, 3))
    assert equal(*outcomes)


def test_dropout_refuses_what_is_no_probability() -> None:
    with pytest.raises(UserError, match=r"dropout has probability 1\.5; give one from 0 to 1"):
        ops.Dropout(1.5)


def test_reshape_scale_and_bias_are_torchs() -> None:
    bias = ops.Bias(16)
    nn.init.normal_(bias.bias)
    model = ops.Sequential(
        ops.Reshape((2, 8, -1)), ops.ConstantScale(0.37), ops.Reshape((-1, 16)), bias, ops.Reshape((32, 16))
    )
    x = torch.randn(32, 16)
    for inputs in (x, x.t().contiguous().t()):
        result = outcome(model, model.parameters(), inputs)
        want = outcome(lambda t: (t.reshape(2, 8, -1) * 0.37).reshape(-1, 16) + bias.bias, model.parameters(), inputs)
        assert equal(result, want)
    with pytest.raises(UserError, match=r"Bias takes \(..., 16\); got \(..., 8\)"):
        bias(torch.zeros(2, 8))


def test_wrong_inputs_are_one_line() -> None:
    model = ops.Sequential(linear(recipe=NV))
    for bad, message in (
        (torch.zeros(3, 65, dtype=DTYPE), "takes"),
        ("x", "takes a tensor"),
        (torch.zeros(3, 64), "float32"),
    ):
        with pytest.raises(UserError, match=message):
            model(bad)


@pytest.mark.parametrize(
    "bad", [torch.ones(4, 64, dtype=torch.int64), torch.ones(4, 64, dtype=torch.float64)], ids=["int64", "float64"]
)
def test_torch_autocast_casts_no_dtype_that_torch_would_not(bad) -> None:
    """torch's autocast casts neither integers nor float64; a silent cast would hide a wrong input."""
    with torch.autocast("cpu", dtype=DTYPE), pytest.raises(UserError):
        ops.BasicLinear(64, 32)(bad)


def test_a_quantized_input_runs_under_torch_autocast() -> None:
    op = ops.BasicLinear(64, 32, recipe=MX)
    tensor = MX(INPUT).quantize(torch.randn(32, 64))
    with torch.autocast("cpu", dtype=DTYPE):
        assert op(tensor).shape == (32, 32)


# --- Quantize


def test_quantize_is_the_identity_without_a_recipe() -> None:
    """core 104."""
    op, x = ops.Quantize(True, True), rows()
    y = op(x)
    assert type(y) is Tensor and torch.equal(y, x)
    assert equal(outcome(op, (), x), outcome(lambda t: t * 1, (), x))


def boundary(recipe, x: Tensor, rest, dy: Tensor) -> list[Tensor]:
    """Explicit quantize and dequantize, forward and backward."""
    values = recipe.quantizer(INPUT).quantize(x).dequantize().requires_grad_()
    y = rest(values)
    y.backward(dy)
    gradient = values.grad
    if recipe.backward_override is None:
        gradient = recipe.quantizer(GRAD).quantize(values.grad).dequantize()
    return [y.detach(), gradient]


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("name", [n for n in STATELESS if not recipes.load(n)(GRAD).is_stochastic])
def test_quantize_is_the_explicit_boundary_in_both_directions(name, override) -> None:
    """core 104, hybrid 97: a backward override skips the quantization of the gradient."""
    recipe = recipes.load(name)
    if override and recipe.backward_override is None:
        recipe = dataclasses.replace(recipe, backward_override=override)
    x, dy = rows(), rows()
    op = ops.Sequential(ops.Quantize(True, True), ops.GELU(), ops.ConstantScale(3.0))
    leaf = x.clone().requires_grad_()
    with duotone.autocast(recipe=recipe):
        y = op(leaf)
    y.backward(dy)
    gradient = leaf.grad.dequantize() if isinstance(leaf.grad, QuantizedTensor) else leaf.grad
    want = boundary(recipe, x, lambda t: F.gelu(t, approximate="tanh") * 3.0, dy)
    assert torch.equal(y, want[0]) and torch.equal(gradient, want[1])


@pytest.mark.parametrize("name", STATELESS)
def test_a_linear_takes_the_planes_of_quantize_as_they_are(name) -> None:
    """core 104: the same bits as without the boundary, and the input is encoded once."""
    recipe = recipes.load(name)
    op, x = linear(32, recipe=recipe, name="up"), rows()
    start = duotone.rng_state(op)
    expected = outcome(op, op.parameters(), x)
    duotone.load_rng_state(op, start)
    model = ops.Sequential(ops.Quantize(recipe=recipe), op)
    assert equal(outcome(model, op.parameters(), x), expected)


def test_quantize_rounds_gradients_stochastically_from_a_seed_of_its_own() -> None:
    """core 104: two backwards round in two ways, and a seed that is written back repeats the first."""
    op, x, dy = ops.Sequential(ops.Quantize(False, True, recipe=NV), ops.GELU()), rows(), rows()

    def gradient() -> Tensor:
        leaf = x.clone().requires_grad_()
        op(leaf).backward(dy)
        return leaf.grad.dequantize()

    start = duotone.rng_state(op)
    first, second = gradient(), gradient()
    assert not torch.equal(first, second)
    duotone.load_rng_state(op, start)
    assert torch.equal(gradient(), first)
    leaf = x.clone().requires_grad_()
    ops.GELU()(leaf).backward(dy)
    expected = NV.quantizer(GRAD).quantize(leaf.grad, ctx=QuantizeContext(seed=start["0.duotone_seed"]))
    assert torch.equal(first, expected.dequantize())


def test_quantize_refuses_a_delayed_scale() -> None:
    with duotone.autocast(recipe=recipes.load("fp8-delayed")), pytest.raises(RecipeError, match="no delayed scale"):
        ops.Quantize()(rows())


def test_quantize_follows_the_evaluation_recipe() -> None:
    """As every planned module does."""
    recipe = recipes.MXFP8BlockScaling(evaluation=recipes.load("bf16"))
    op, x = ops.Quantize(), rows()
    with duotone.autocast(recipe=recipe):
        assert isinstance(op(x), QuantizedTensor)
        assert type(op.eval()(x)) is Tensor


@pytest.mark.parametrize("reentrant", [False, True])
def test_quantize_recomputes_under_the_recipe_of_its_forward(reentrant) -> None:
    """core 90: the region is left when backward recomputes."""
    model, x = ops.Sequential(ops.Quantize(), ops.GELU(), linear(32)), rows()

    def run(call) -> list[Tensor]:
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        with duotone.autocast(recipe=MX):
            y = call(leaf)
        y.float().square().sum().backward()
        return [y.detach(), leaf.grad, model[2].weight.grad]

    assert equal(run(lambda t: checkpoint(model, t, use_reentrant=reentrant)), run(model))


def test_ops_of_every_kind_are_one_graph_with_the_bits_of_eager() -> None:
    parts = [ops.LayerNorm(64, dtype=DTYPE), linear(32), ops.Bias(32, dtype=DTYPE), ops.ConstantScale(0.5), ops.GELU()]
    parts += [ops.Reshape((4, 8, -1)), ops.SwiGLU(), ops.Dropout(0.0), ops.L2Normalization(), ops.Identity()]
    model, x = ops.Sequential(*parts, ops.Reshape((-1, 16))), rows()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert equal(outcome(compiled, model.parameters(), x), outcome(model, model.parameters(), x))


@pytest.mark.parametrize("recipe", [MX, NV], ids=lambda recipe: recipe.name)
def test_quantize_is_part_of_one_graph_with_the_bits_of_eager(recipe) -> None:
    """In a pipeline, between modules, with a gradient that a linear encodes again, and as the first op."""
    pipeline = ops.Sequential(ops.Quantize(True, True), linear(32), ops.Quantize(True, True), ops.GELU())
    eager = nn.Sequential(ops.GELU(), ops.Quantize(), pipeline)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, backend="aot_eager", fullgraph=True)
    with duotone.autocast(recipe=recipe):
        for x in (rows(), rows()):
            assert equal(outcome(run, compiled.parameters(), x), outcome(eager, eager.parameters(), x))
    assert duotone.rng_state(compiled) == duotone.rng_state(eager)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_probability_and_a_scale_may_change_between_calls(compiled: bool) -> None:
    m = ops.Sequential(ops.ConstantScale(2.0), ops.Dropout(0.1))
    call, x = torch.compile(m, backend="aot_eager") if compiled else m, torch.ones(1000)
    call(x)
    m[0].scale, m[1].p = 8.0, 0.75
    y = call(x)
    assert 0.6 < (y == 0).float().mean() < 0.9 and set(y.unique().tolist()) == {0.0, 32.0}
    with pytest.raises(UserError, match="dropout has probability 2"):
        m[1].p = 2
    assert m[1].p == 0.75


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (lambda: ops.RMSNorm(8), "eps", 1.0),
        (lambda: ops.LayerNorm(8), "zero_centered_gamma", True),
        (lambda: ops.SwiGLU(), "kind", "geglu"),
        (lambda: ops.SiTUGLU(), "params", {}),
        (lambda: ops.Reshape((2, 4)), "shape", (4, 2)),
        (lambda: duotone.LayerNormLinear(8, 8), "return_layernorm_output", True),
        (lambda: duotone.LayerNormMLP(8, 8), "return_layernorm_output", True),
        (lambda: duotone.MultiheadAttention(8, 1), "return_layernorm_output", True),
        (lambda: duotone.TransformerLayer(8, 8, 1), "layer_type", "decoder"),
        (lambda: duotone.GroupedLinear(1, 8, 8), "use_bias", False),
    ],
)
def test_what_is_fixed_at_construction_cannot_be_set(make, name: str, value: object) -> None:
    """A value that no call follows would be wrong in silence."""
    m = make()
    before = getattr(m, name)
    with pytest.raises(AttributeError, match=name):
        setattr(m, name, value)
    assert getattr(m, name) == before
    with pytest.raises(TypeError):
        ops.ClampedSwiGLU().params["limit"] = 1.0


def test_where_a_bias_goes_and_the_order_of_dimensions_may_change_between_calls() -> None:
    torch.manual_seed(0)
    m, x = duotone.LayerNormMLP(16, 32), torch.randn(4, 16)
    nn.init.normal_(m.fc2.bias)
    y = m(x)
    m.return_bias = True
    without, bias = m(x)
    assert torch.allclose(without + bias, y) and not torch.allclose(without, y)
    m.return_bias = False
    assert torch.equal(m(x), y)
    heads = duotone.MultiheadAttention(16, 2, attention_dropout=0.0)
    x = torch.randn(5, 3, 16)
    y = heads(x)
    heads.qkv_format = "bshd"
    assert torch.allclose(heads(x.transpose(0, 1)), y.transpose(0, 1), atol=1e-6)
    with pytest.raises(UserError, match="qkv_format"):
        heads.qkv_format = "dhsb"


@pytest.mark.parametrize("name", ["fp8-current", "mxfp8"])
@pytest.mark.parametrize(
    "tail",
    [ops.SwiGLU, lambda: ops.RMSNorm(96), lambda: ops.Sequential(ops.Identity(), ops.RMSNorm(96))],
    ids=["SwiGLU", "RMSNorm", "Identity and RMSNorm"],
)
@pytest.mark.parametrize("is_first", [True, False], ids=["before a linear", "behind a linear"])
def test_what_reads_a_quantized_tensor_and_is_no_linear_has_the_bits_of_eager(name, tail, is_first) -> None:
    """It keeps the quantized tensor, and reads it in fp32. An op that kept it as a plain one had rounded it to bf16."""
    reader = tail()
    linear = ops.Linear(96 if not isinstance(reader, ops.SwiGLU) else 48, 64) if is_first else ops.Linear(64, 96)
    parts = (ops.Quantize(), reader, linear) if is_first else (linear, ops.Quantize(), reader)
    model = ops.Sequential(*parts).bfloat16()
    x = torch.randn(32, 96 if is_first else 64).bfloat16()
    results = []
    for call in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        with duotone.autocast(name):
            y = call(leaf)
        results.append([y, *torch.autograd.grad(y.float().square().sum(), [leaf, *model.parameters()])])
    assert all(map(torch.equal, *results))

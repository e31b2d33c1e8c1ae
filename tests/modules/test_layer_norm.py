"""LayerNormLinear and LayerNormMLP: the bits of the modules they are made of, under every recipe and option."""

import copy
import io
import pickle
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import duotone
from duotone import QuantizedTensor, QuantizerRole, UserError, ops, recipes
from duotone.dispatch.activations import ACTIVATIONS
from duotone.modules import LayerNormLinear, LayerNormMLP, Linear
from duotone.modules.activation import ActivationOp
from duotone.recipes import CustomRecipe

DTYPE = torch.bfloat16
NORMS = {"LayerNorm": (nn.LayerNorm, ops.LayerNorm), "RMSNorm": (nn.RMSNorm, ops.RMSNorm)}
MX, NV = recipes.load("mxfp8"), recipes.load("nvfp4")
RECIPES = {
    **{name: recipes.load(name) for name in recipes.names()},
    "high_precision": recipes.MXFP8BlockScaling(backward_override="high_precision"),
    "dequantized": recipes.MXFP8BlockScaling(backward_override="dequantized"),
}
UNARY = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
}
GATES = {"glu": torch.sigmoid, "geglu": UNARY["gelu"], "qgeglu": UNARY["qgelu"], "reglu": F.relu}
GATES |= {"sreglu": UNARY["srelu"], "swiglu": F.silu}


def activate(name: str, x: Tensor) -> Tensor:
    if name in UNARY:
        return UNARY[name](x)
    a, b = x.chunk(2, -1)
    if name == "clamped_swiglu":
        a, b = a.clamp(max=7.0), b.clamp(-7.0, 7.0)
        return a * torch.sigmoid(1.702 * a) * (b + 1)
    if name == "situglu":
        a, b = a.float(), b.float()
        return (4.0 * torch.tanh(a / 4.0) * torch.sigmoid(a) * (25.0 * torch.tanh(b / 25.0))).to(x.dtype)
    return GATES[name](a) * b


def randomise(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5 + (parameter.dim() == 1))
    return module


def outcome(call, parameters, x: Tensor) -> list[Tensor]:
    parameters = list(parameters)
    for parameter in parameters:
        parameter.grad = None
    leaf = x.detach().clone().requires_grad_()
    y = call(leaf)
    outputs = y if isinstance(y, tuple) else (y,)
    sum(out.float().square().sum() for out in outputs).backward()
    return [*(out.detach() for out in outputs), leaf.grad, *(p.grad for p in parameters)]


def equal(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def plain(module: nn.Module, kind: str, activation: str = ""):
    """The same in torch's own operations, over the same parameters."""
    norm = NORMS[kind][0](64, eps=1e-5, dtype=module.layer_norm_weight.dtype)
    norm.weight = module.layer_norm_weight
    if kind == "LayerNorm":
        norm.bias = module.layer_norm_bias
    if not activation:
        return lambda x: F.linear(norm(x), module.weight, module.bias)
    fc1, fc2 = module.fc1, module.fc2
    return lambda x: F.linear(activate(activation, F.linear(norm(x), fc1.weight, fc1.bias)), fc2.weight, fc2.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, DTYPE], ids=str)
@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("activation", ["", *ACTIVATIONS])
def test_identity_is_bit_identical_to_torchs_own_modules(activation, kind, dtype, bias) -> None:
    """hybrid 72: every activation and norm, also over lead dimensions and nothing at all."""
    options = {"normalization": kind, "bias": bias, "params_dtype": dtype}
    module = (
        LayerNormMLP(64, 48, activation=activation, **options) if activation else LayerNormLinear(64, 48, **options)
    )
    reference = plain(randomise(module), kind, activation)
    for shape in ((33, 64), (2, 3, 64), (0, 64)):
        x = torch.randn(shape).to(dtype)
        assert equal(outcome(module, module.parameters(), x), outcome(reference, module.parameters(), x))


def modules_of(module: nn.Module, kind: str, recipe, activation: str, zero_centered: bool) -> nn.Module:
    """Separate modules with the parameters and seeds of a fused one."""
    norm = NORMS[kind][1](64, zero_centered_gamma=zero_centered, dtype=DTYPE)
    parts: list[nn.Module] = [norm]
    for linear in (module.fc1, module.fc2) if activation else (module,):
        n, k = linear.weight.shape
        parts.append(Linear(k, n, params_dtype=DTYPE, recipe=recipe, name=linear.module_name))
        parts[-1].load_state_dict({name: getattr(linear, name) for name in ("weight", "bias")})
        parts[-1].duotone_seed.copy_(linear.duotone_seed)
    norm.load_state_dict({n: getattr(module, f"layer_norm_{n}") for n in norm.state_dict()})
    if activation:
        parts.insert(2, ActivationOp(activation))
    return nn.Sequential(*parts)


@pytest.mark.parametrize(
    ("kind", "activation", "zero_centered"),
    [("LayerNorm", "", False), ("RMSNorm", "", True), ("LayerNorm", "gelu", True), ("RMSNorm", "swiglu", False)],
)
@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_gives_the_bits_of_separate_modules(name, kind, activation, zero_centered) -> None:
    """Two steps: outputs, gradients, seeds and delayed scales."""
    recipe = RECIPES[name]
    options = {"normalization": kind, "zero_centered_gamma": zero_centered, "params_dtype": DTYPE, "recipe": recipe}
    module = (
        LayerNormMLP(64, 48, activation=activation, name="m", **options)
        if activation
        else LayerNormLinear(64, 48, name="m", **options)
    )
    randomise(module)
    parts = modules_of(module, kind, recipe, activation, zero_centered)
    order = [p for part in (parts[1:] if not activation else []) for p in part.parameters()]
    order += list(parts[0].parameters()) + ([p for part in parts[1:] for p in part.parameters()] if activation else [])
    for m in (2, 3):
        x = torch.randn(m, 16, 64).to(DTYPE)
        assert equal(outcome(module, module.parameters(), x), outcome(parts, order, x))
        assert equal([b for _, b in sorted_buffers(module)], [b for _, b in sorted_buffers(parts)])


def sorted_buffers(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Buffers by linear, in order, whatever the linear is called."""
    linears = [m for m in module.modules() if isinstance(m, Linear)]
    return [(name, b) for linear in linears for name, b in sorted(linear.named_buffers())]


@pytest.mark.parametrize("return_bias", [True, False])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_what_is_asked_for_is_returned_in_order(cls, normalised, return_bias) -> None:
    """core 80: y, the bias that was not added, the normalised input; all carry gradients."""
    module = randomise(
        cls(64, 48, recipe=MX, params_dtype=DTYPE, return_bias=return_bias, return_layernorm_output=normalised)
    )
    whole = cls(64, 48, recipe=MX, params_dtype=DTYPE)
    whole.load_state_dict(module.state_dict())
    x = torch.randn(32, 64).to(DTYPE)
    layer = module(x)
    layer = list(layer) if isinstance(layer, tuple) else [layer]
    assert len(layer) == 1 + return_bias + normalised
    bias = module.bias if cls is LayerNormLinear else module.fc2.bias
    if return_bias:
        assert layer[1] is bias
        with torch.no_grad():
            bias.zero_()
            (whole.bias if cls is LayerNormLinear else whole.fc2.bias).zero_()
    assert torch.equal(layer[0], whole(x))
    if normalised:
        norm = nn.LayerNorm(64, dtype=DTYPE)
        norm.load_state_dict({"weight": module.layer_norm_weight, "bias": module.layer_norm_bias})
        assert torch.equal(layer[-1], norm(x))
        leaf = x.clone().requires_grad_()
        module(leaf)[-1].float().square().sum().backward()
        result, leaf.grad = [leaf.grad, module.layer_norm_weight.grad], None
        norm(leaf).float().square().sum().backward()
        assert equal(result, [leaf.grad, norm.weight.grad])


def roles(module) -> list[tuple]:
    return [
        (slot, None if role is None else (role.module_type, role.tensor_type, role.name))
        for slot, role in module.get_quantizer_roles().items()
    ]


def test_roles_are_those_of_the_table() -> None:
    """hybrid 75 (table 7.2): forward slots, then backward ones, each with its consumer."""
    assert roles(LayerNormLinear(64, 48, name="L")) == [
        ("input", ("linear", "input", "L")),
        ("weight", ("linear", "weight", "L")),
        ("output", None),
        ("grad_output", ("linear", "grad_output", "L")),
        ("grad_input", None),
    ]
    expected = [
        ("fc1.input", ("linear", "input", "M.fc1")),
        ("fc1.weight", ("linear", "weight", "M.fc1")),
        ("fc1.output", ("linear", "input", "M.fc2")),
        ("fc2.input", ("linear", "input", "M.fc2")),
        ("fc2.weight", ("linear", "weight", "M.fc2")),
        ("fc2.output", None),
        ("fc1.grad_output", ("linear", "grad_output", "M.fc1")),
        ("fc1.grad_input", None),
        ("fc2.grad_output", ("linear", "grad_output", "M.fc2")),
        ("fc2.grad_input", ("linear", "grad_output", "M.fc1")),
    ]
    assert roles(LayerNormMLP(64, 48, name="M")) == expected
    model = nn.ModuleDict({"M": LayerNormMLP(64, 48)})
    duotone.assign_names(model)
    assert roles(model["M"]) == expected
    bare = dict(roles(LayerNormMLP(64, 48)))
    title = bare["fc1.input"][2].removesuffix(".fc1")
    assert re.fullmatch(r"Layer_\d+", title) and bare["fc2.input"][2] == f"{title}.fc2"
    assert dict(roles(LayerNormLinear(64, 48)))["input"][2].startswith("Layer_")


def test_the_factory_is_asked_once_per_slot() -> None:
    roles: list = []

    def factory(role):
        roles.append(role)
        return MX(QuantizerRole("linear", "input") if role is None else role)

    module = LayerNormMLP(64, 64, name="M", params_dtype=DTYPE)
    x = torch.randn(32, 64).to(DTYPE)
    with duotone.autocast(recipe=CustomRecipe(qfactory=factory)):
        for _ in range(3):
            module(x).sum().backward()
            with torch.no_grad():
                module(x)
    declared_roles = module.get_quantizer_roles().values()
    assert sorted(str(role) for role in roles) == sorted(str(role) for role in declared_roles)


def test_unnamed_modules_round_with_seeds_of_their_own() -> None:
    """Else the stochastic rounding of every layer of a stack would be the same noise."""
    stack = [LayerNormMLP(64, 48, recipe=NV) for _ in range(3)]
    seeds = [int(b) for m in stack for name, b in m.named_buffers() if "seed" in name]
    assert len(set(seeds)) == len(seeds)


def test_checkpoints_of_transformer_engine_load() -> None:
    """Its names: layer_norm_weight, fc1_weight and so on, with an empty extra state."""
    module = LayerNormLinear(64, 48)
    assert set(module.state_dict()) == {"layer_norm_weight", "layer_norm_bias", "weight", "bias"}
    assert set(LayerNormLinear(64, 48, normalization="RMSNorm", bias=False).state_dict()) == {
        "layer_norm_weight",
        "weight",
    }
    mlp, other = randomise(LayerNormMLP(64, 48)), LayerNormMLP(64, 48)
    renamed = {name.replace("fc1.", "fc1_").replace("fc2.", "fc2_"): value for name, value in mlp.state_dict().items()}
    assert set(renamed) == {f"{part}_{kind}" for part in ("layer_norm", "fc1", "fc2") for kind in ("weight", "bias")}
    options = dict(renamed)
    other.load_state_dict(options)
    assert equal(list(other.parameters()), list(mlp.parameters())) and set(options) == set(renamed)
    nested = nn.ModuleDict({"block": LayerNormMLP(64, 48)})
    nested.load_state_dict({f"block.{name}": value for name, value in renamed.items()})
    assert equal(list(nested.parameters()), list(mlp.parameters()))


@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_extra_states_that_hold_nothing_are_no_obstacle(cls) -> None:
    """core 5.5, 77: Transformer Engine writes `_extra_state`, empty for stateless recipes."""
    module = cls(64, 48)
    module.load_state_dict({**module.state_dict(), "_extra_state": torch.empty(0, dtype=torch.uint8)})


def make(cls, **options) -> nn.Module:
    return cls(64, 48, params_dtype=DTYPE, name="m", **{"recipe": NV, **options})


@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_a_module_on_meta_takes_no_memory_and_becomes_real(cls) -> None:
    """core 81."""
    module = make(cls, device="meta", zero_centered_gamma=True)
    assert all(p.is_meta for p in module.parameters())
    module.reset_parameters()
    real = make(cls, zero_centered_gamma=True)
    for (name, result), want in zip(module.named_parameters(), real.parameters(), strict=True):
        assert result.device == want.device and result.dtype == want.dtype and result.shape == want.shape
        assert torch.equal(result, want) if "layer_norm" in name else abs(result.std() / want.std() - 1) < 0.2
    assert equal([b for _, b in sorted_buffers(module)], [b for _, b in sorted_buffers(real)])
    real.load_state_dict(module.state_dict())
    duotone.load_rng_state(real, duotone.rng_state(module))
    x = torch.randn(32, 64).to(DTYPE)
    assert equal(outcome(module, module.parameters(), x), outcome(real, real.parameters(), x))


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save", "state_dict"])
@pytest.mark.parametrize("name", ["nvfp4", "fp8-delayed"])
@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_a_copy_continues_as_the_original(cls, name, how) -> None:
    module, x = make(cls, recipe=recipes.load(name)), torch.randn(32, 64).to(DTYPE)
    outcome(module, module.parameters(), x)
    if how == "deepcopy":
        other = copy.deepcopy(module)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(module))
    elif how == "torch.save":
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        other = torch.load(file, weights_only=False)
    else:
        other = make(cls, recipe=recipes.load(name))
        other.load_state_dict(module.state_dict())
        duotone.load_rng_state(other, duotone.rng_state(module))
    assert all(a is not b for a, b in zip(module.parameters(), other.parameters(), strict=True))
    for _ in range(2):
        assert equal(outcome(other, other.parameters(), x), outcome(module, module.parameters(), x))


@pytest.mark.parametrize(
    ("cls", "name"),
    [
        (LayerNormLinear, "bf16"),
        (LayerNormLinear, "dequantized"),
        (LayerNormMLP, "mxfp8"),
        pytest.param(LayerNormMLP, "fp8-delayed", marks=pytest.mark.slow),  # tests/modules/test_one_graph.py has it
    ],
)
def test_it_compiles_whole_and_equals_eager(cls, name) -> None:
    """core 67."""
    eager = make(cls, recipe=RECIPES[name], return_layernorm_output=True)
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        x = torch.randn(32, 64).to(DTYPE)
        assert equal(outcome(run, compiled.parameters(), x), outcome(eager, eager.parameters(), x))
        assert equal(list(compiled.buffers()), list(eager.buffers()))


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed", "high_precision", "dequantized"])
@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_checkpointing_changes_no_bit(cls, name, reentrant) -> None:
    """core 90, hybrid 65: two steps, with the recipe of a region that backward is outside of."""
    module = make(cls, recipe=None)
    other = copy.deepcopy(module)
    for _ in range(2):
        x = torch.randn(32, 64).to(DTYPE)

        def call(m, leaf):
            with duotone.autocast(recipe=RECIPES[name]):
                return m(leaf)

        def checkpointed(leaf):
            with duotone.autocast(recipe=RECIPES[name]):
                return checkpoint(other, leaf, use_reentrant=reentrant)

        want = outcome(lambda leaf: call(module, leaf), module.parameters(), x)
        assert equal(outcome(checkpointed, other.parameters(), x), want)
        assert equal(list(other.buffers()), list(module.buffers()))


@pytest.mark.parametrize("name", [n for n in RECIPES if n not in ("bf16", "fp8-delayed")])
@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_held_weights_have_the_bits_of_plain_ones(cls, name) -> None:
    """core 78, hybrid 60, 102."""
    recipe = RECIPES[name]
    torch.manual_seed(4)
    with duotone.quantized_model_init(recipe=recipe):
        module = make(cls, recipe=recipe)
    weights = [p for p in module.parameters() if p.dim() == 2]
    torch.manual_seed(4)
    other = make(cls, recipe=recipe)
    duotone.load_rng_state(other, duotone.rng_state(module))
    if recipe(QuantizerRole("linear", "weight")).rowwise.name != "identity":
        assert all(isinstance(p, QuantizedTensor) for p in weights)
    assert not isinstance(module.layer_norm_weight, QuantizedTensor)
    x = torch.randn(32, 64).to(DTYPE)
    result, want = outcome(module, module.parameters(), x), outcome(other, other.parameters(), x)
    if "high" in name and "bwd" not in name:
        assert torch.equal(result[0], want[0])  # backward dequantizes: the original is gone
    else:
        assert equal(result, want)


def test_wrong_arguments_are_one_line() -> None:
    for make_one, message in (
        (
            lambda: LayerNormLinear(64, 48, normalization="BatchNorm"),
            "normalization 'BatchNorm' is unknown; allowed are",
        ),
        (lambda: LayerNormMLP(64, 48, normalization="GroupNorm"), "normalization 'GroupNorm' is unknown"),
        (lambda: LayerNormMLP(64, 48, activation="tanh"), "activation 'tanh' is unknown"),
        (lambda: LayerNormMLP(64, 48, activation="relu", activation_params={"limit": 1}), "relu takes nothing"),
        (lambda: LayerNormLinear(64, 48, parallel_mode="row"), "normalises whole rows"),
        (lambda: LayerNormLinear(64, 48, recipe=NV)(torch.zeros(2, 65)), "takes (..., 64)"),
        (lambda: LayerNormMLP(64, 48, recipe=NV)(torch.tensor(1.0)), "takes a tensor"),
        (lambda: LayerNormMLP(64, 48, params_dtype=DTYPE)(torch.zeros(2, 64)), "torch.float32"),
    ):
        with pytest.raises(UserError) as error:
            make_one()
        assert message in str(error.value) and "\n" not in str(error.value)


def test_l2_normalisation_is_no_choice_of_a_module_that_promises_parameters() -> None:
    """The docstring allows LayerNorm and RMSNorm."""
    try:
        module = LayerNormLinear(64, 48, normalization="L2Normalization")
    except UserError:
        return
    x = torch.randn(4, 64)
    want = F.linear(x / (x.square().sum(-1, keepdim=True) + 1e-5).sqrt(), module.weight, module.bias)
    assert torch.allclose(module(x), want, atol=1e-5) and set(module.state_dict()) == {"weight", "bias"}


@pytest.mark.parametrize("name", ["mxfp8", "high_precision", "dequantized"])
@pytest.mark.parametrize("cls", [LayerNormLinear, LayerNormMLP])
def test_frozen_parts_change_no_other_gradient(cls, name) -> None:
    """core 86, hybrid 93."""
    module, x = make(cls, recipe=RECIPES[name]), torch.randn(32, 64).to(DTYPE)
    everything = outcome(module, module.parameters(), x)
    names = [n for n, _ in module.named_parameters()]
    for frozen in (*([n] for n in names), [n for n in names if "layer_norm" in n], names):
        for input_grad in (True, False):
            for n, p in module.named_parameters():
                p.requires_grad_(n not in frozen)
                p.grad = None
            leaf = x.clone().requires_grad_(input_grad)
            y = module(leaf)
            assert torch.equal(y, everything[0])
            if y.requires_grad:
                y.float().square().sum().backward()
            for result, want, needed in zip(
                [leaf.grad, *(p.grad for p in module.parameters())],
                everything[1:],
                [input_grad, *(n not in frozen for n in names)],
                strict=True,
            ):
                assert (result is not None) == needed and (result is None or torch.equal(result, want))

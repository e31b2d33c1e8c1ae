"""The linear core under every recipe against products of its own decoded planes, and nn.Linear under Identity."""

import itertools

import pytest
import torch
from torch import Tensor, nn

import duotone
from duotone import formats, observe, recipes
from duotone.recipes import OUTPUT_HEAD
from duotone.recipes.roles import TENSOR_TYPES, QuantizerRole
from duotone.tensor import QuantizeContext

QUANTIZED = [name for name in recipes.names() if name != "bf16"]
STATELESS = [name for name in QUANTIZED if not recipes.load(name)(QuantizerRole("linear", "input")).history]
"""Recipes whose second step has the bits of the first."""


def layer(bias: bool = True, dtype: torch.dtype = torch.bfloat16, k: int = 96, n: int = 64) -> nn.Linear:
    return nn.Linear(k, n, bias=bias, dtype=dtype)


def run(module: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    module.zero_grad()
    x = x.detach().requires_grad_()
    y = module(x)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad, *[p.grad for p in module.parameters() if p.grad is not None]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(33, 96), (2, 5, 96), (0, 96), (1, 96)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_identity_is_bit_identical_to_nn_linear(dtype, shape, bias) -> None:
    module = layer(bias, dtype)
    x, dy = torch.randn(shape, dtype=dtype), torch.randn(*shape[:-1], 64, dtype=dtype)
    expected = run(module, x, dy)
    duotone.convert(module, recipes.load("bf16"))
    for result, want in zip(run(module, x, dy), expected, strict=True):
        assert torch.equal(result, want)


WAYS = {
    "eager": lambda act: act,
    "compiled": lambda act: torch.compile(act, backend="aot_eager", fullgraph=True),
    "torch.autocast": torch.autocast("cpu", torch.bfloat16),
    "enabled=False": duotone.autocast(enabled=False),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [duotone.Linear, duotone.ops.Linear, duotone.ops.BasicLinear])
@pytest.mark.parametrize("fmt", ["nvfp4", "nvfp4_rht", "fp8_e4m3_row", "fp8_e4m3_1x128_fp32", "mxfp8_e4m3", "mxfp4"])
def test_a_quantized_input_has_one_value_where_no_recipe_is_followed(fmt, make, way) -> None:
    """Forward and the weight gradient multiply `dequantize()`, although the planes of both directions differ."""
    module = make(64, 32, **({"recipe": "mxfp8"} if way == "enabled=False" else {}))
    quantizer = duotone.Quantizer(formats.get(fmt), formats.get(fmt))
    x, results = torch.randn(128, 64).requires_grad_(), []
    for act in (lambda: module(quantizer(x)), lambda: module(quantizer(x).dequantize())):
        module.zero_grad()
        x.grad = None
        y = WAYS[way](act)()
        y.float().square().sum().backward()
        results.append([y.detach(), x.grad, *[p.grad for p in module.parameters()]])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("name", QUANTIZED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_recipe_multiplies_what_its_formats_decode_to(name, dtype) -> None:
    recipe = recipes.load(name)
    if name == "fp8-delayed":  # a format alone knows no amax, and encodes under a scale of 1
        recipe = recipes.DelayedScaling(first_scale_from_amax=False)
    module = layer(dtype=dtype)
    x, dy = torch.randn(40, 96, dtype=dtype), torch.randn(40, 64, dtype=dtype)
    weight = module.weight.detach()
    duotone.convert(module, recipe)
    seed = module.duotone_seed.clone()
    y, dx, dw, db = run(module, x, dy)

    def planes(index: int, t: Tensor) -> tuple[Tensor, Tensor]:
        results = [recipe(QuantizerRole("linear", each, "")) for each in TENSOR_TYPES]
        drawn = sum(each.is_stochastic for each in results[:index])  # the seeds that earlier tensors took
        row, col = results[index].encode(t, ctx=QuantizeContext(seed=seed + drawn))
        return row.dequantize(torch.float32).double(), col.dequantize(torch.float32).double()

    (xr, xc), (wr, wc), (gr, gc) = (
        planes(0, x),
        planes(1, weight),
        planes(2, dy),
    )
    # Decoded operands carry one fp32 rounding of a scale, rotations a few more, high-precision operands one of dtype.
    epsilon = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-17
    for result, a, b, extra in ((y, xr, wr.t(), module.bias), (dx, gr, wc.t(), None), (dw, gc, xc.t(), None)):
        exact = a @ b + (0 if extra is None else extra.double())
        assert (result.double() - exact).abs().max() <= epsilon * (a.abs() @ b.abs()).max()
    assert torch.equal(db, dy.sum(0))


@pytest.mark.parametrize("name", STATELESS)
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)), ids=str)
def test_frozen_input_or_weight_changes_no_other_bit(name, needs) -> None:
    x, dy = torch.randn(32, 96).bfloat16(), torch.randn(32, 64).bfloat16()
    module = duotone.convert(layer(), recipes.load(name))
    start = duotone.rng_state(module)
    y, dx, dw, db = run(module, x, dy)
    duotone.load_rng_state(module, start)
    module.zero_grad()
    module.weight.requires_grad_(needs[1])
    leaf = x.clone().requires_grad_(needs[0])
    frozen_run = module(leaf)
    frozen_run.backward(dy)
    assert torch.equal(frozen_run, y)
    assert (leaf.grad is None) == (not needs[0]) and (module.weight.grad is None) == (not needs[1])
    assert leaf.grad is None or torch.equal(leaf.grad, dx)
    assert module.weight.grad is None or torch.equal(module.weight.grad, dw)
    assert torch.equal(module.bias.grad, db)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current"])
def test_backward_override_keeps_forward_bits_and_states_its_operands(name) -> None:
    x, dy = torch.randn(32, 96).bfloat16(), torch.randn(32, 64).bfloat16()
    module = layer()
    weight = module.weight.detach()
    plain = recipes.load(name)
    base = run(duotone.convert(module, plain), x, dy)
    for override in ("high_precision", "dequantized"):
        recipe = type(plain)(backward_override=override)
        y, dx, dw, db = run(duotone.convert(module, recipe), x, dy)
        assert torch.equal(y, base[0])
        if override == "high_precision":
            operands = (x, weight)
        else:
            quantizers = [plain(QuantizerRole("linear", kind, "")) for kind in ("input", "weight")]
            operands = [
                q.encode(t).rowwise.dequantize(torch.bfloat16) for q, t in zip(quantizers, (x, weight), strict=True)
            ]
        assert torch.equal(dx, dy @ operands[1])
        assert torch.equal(dw, dy.t() @ operands[0])
        assert torch.equal(db, dy.sum(0))


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("shape", [(32, 96), (0, 96), (2, 16, 96), (96,)], ids=str)
def test_backward_override_in_all_four_patterns_of_gradients(override, shape) -> None:
    """hybrid 93, 106: a gradient that is needed has the bits of the case that needs all; the others are None."""
    recipe = recipes.MXFP8BlockScaling(backward_override=override)
    x, dy = torch.randn(shape).bfloat16(), torch.randn(*shape[:-1], 64).bfloat16()
    module = duotone.convert(layer(), recipe)
    everything = run(module, x, dy)
    for input_grad, weight_grad in itertools.product([True, False], repeat=2):
        module.zero_grad()
        module.weight.requires_grad_(weight_grad)
        leaf = x.clone().requires_grad_(input_grad)
        y = module(leaf)
        y.backward(dy)
        assert torch.equal(y, everything[0])
        assert leaf.grad is None if not input_grad else torch.equal(leaf.grad, everything[1])
        assert module.weight.grad is None if not weight_grad else torch.equal(module.weight.grad, everything[2])
        assert torch.equal(module.bias.grad, everything[3])


@pytest.mark.parametrize("override", [None, "high_precision", "dequantized"])
@pytest.mark.parametrize("needs", list(itertools.product([True, False], repeat=2)), ids=str)
def test_forward_saves_exactly_what_the_override_says(override, needs) -> None:
    """hybrid 91, 92, 103: kinds of the saved tensors, in order; high precision keeps no quantized plane.

    An empty tensor, which stands for the inputs in a graph of second derivatives, holds no memory.
    """
    input_grad, weight_grad = needs
    module = duotone.convert(
        nn.Linear(96, 64, bias=False, dtype=torch.bfloat16), recipes.MXFP8BlockScaling(backward_override=override)
    )
    module.weight.requires_grad_(weight_grad)
    x = torch.randn(32, 96).bfloat16().requires_grad_(input_grad)
    saved_tensors: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        if t.numel():
            saved_tensors.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        module(x)
    codes, scale = torch.uint8, torch.uint8
    saved = {
        None: [[((96, 32), codes), ((96, 1), scale)], [((96, 64), codes), ((96, 2), scale)]],
        "high_precision": [[((32, 96), torch.bfloat16)], [((64, 96), torch.bfloat16)]],
        "dequantized": [[((32, 96), codes), ((32, 3), scale)], [((64, 96), codes), ((64, 3), scale)]],
    }[override]
    expected = (saved[0] if weight_grad else []) + (saved[1] if input_grad else [])
    assert [(tuple(t.shape), t.dtype) for t in saved_tensors] == expected
    if override == "high_precision":
        originals = ([x] if weight_grad else []) + ([module.weight] if input_grad else [])
        assert [t.data_ptr() for t in saved_tensors] == [t.data_ptr() for t in originals]


SAME_FORMAT = {
    name: recipes.RuleRecipe(
        rules=tuple(
            recipes.Rule(tensor_type=kind, rowwise=q.rowwise.name, columnwise=q.columnwise.name)
            for kind in ("input", "weight", "grad_output")
            for q in [recipes.load(name)(QuantizerRole("linear", kind))]
        )
    )
    for name in ("fp8-current", "fp8-rowwise", "fp8-block", "mxfp8", "nvfp4")
}


@pytest.mark.parametrize("name", SAME_FORMAT)
def test_a_hybrid_of_the_same_formats_is_its_built_in_recipe(name) -> None:
    """hybrid 53, core 19: outputs and gradients bit for bit, stochastic rounding included."""
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    module = duotone.convert(layer(k=128), recipes.load(name))
    start = duotone.rng_state(module)
    expected = run(module, x, dy)
    duotone.load_rng_state(module, start)
    with duotone.autocast(recipe=SAME_FORMAT[name]):
        assert all(torch.equal(a, b) for a, b in zip(run(module, x, dy), expected, strict=True))


def test_identity_backward_is_the_high_precision_override_and_its_dequantized_source_the_other() -> None:
    """hybrid 73, 105."""
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    module = duotone.convert(layer(k=128), recipes.load("mxfp8"))

    def results(recipe):
        with duotone.autocast(recipe=recipe):
            return run(module, x, dy)

    for override, source in (("high_precision", "original"), ("dequantized", "rowwise_dequantized")):
        expected = results(recipes.MXFP8BlockScaling(backward_override=override))
        rules = (
            recipes.Rule(tensor_type="grad_output", format="identity"),
            recipes.Rule(rowwise="mxfp8_e4m3", columnwise="identity", columnwise_source=source),
        )
        result = results(recipes.RuleRecipe(rules=rules))
        assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd keeps for backward, parameters left out."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = module(x)
    del y
    return sum(saved.values())


def test_backward_keeps_one_plane_of_each_operand_and_no_high_precision_copy() -> None:
    x = torch.randn(64, 128).bfloat16().requires_grad_()
    module = duotone.convert(nn.Linear(128, 96, bias=False, dtype=torch.bfloat16), recipes.load("mxfp8"))
    codes, scales = 64 * 128 + 128 * 96, 64 * 128 // 32 + 128 * 96 // 32
    assert saved_bytes(module, x) == codes + scales


def test_a_frozen_weight_saves_no_input_and_quantizes_no_columns_of_it() -> None:
    store = observe.Tap()
    module = duotone.convert(nn.Linear(128, 96, bias=False, dtype=torch.bfloat16), recipes.load("mxfp8"))
    module.weight.requires_grad_(False)
    with duotone.autocast(recipe=observe.with_statistics(recipes.load("mxfp8"), store)):
        module(torch.randn(64, 128).bfloat16().requires_grad_()).sum().backward()
    encoded = {(row["role"], row["plane"]) for row in store.rows()}
    assert encoded == {
        ("input", "rowwise"),
        ("weight", "rowwise"),
        ("weight", "columnwise"),
        ("grad_output", "rowwise"),
    }


def test_stochastic_rounding_repeats_from_its_seed_and_moves_on_without_it() -> None:
    x, dy = torch.randn(64, 128).bfloat16(), torch.randn(64, 64).bfloat16()
    module = duotone.convert(layer(k=128), recipes.load("nvfp4"))
    start = duotone.rng_state(module)
    first, second = run(module, x, dy), run(module, x, dy)
    assert not torch.equal(first[1], second[1])
    duotone.load_rng_state(module, start)
    assert all(torch.equal(a, b) for a, b in zip(run(module, x, dy), first, strict=True))


def test_seeds_advance_once_per_stochastic_quantize_and_never_without_one() -> None:
    x, dy = torch.randn(32, 96).bfloat16(), torch.randn(32, 64).bfloat16()
    module = duotone.convert(layer(), recipes.load("nvfp4"))
    before = module.duotone_seed.clone()
    run(module, x, dy)
    assert torch.equal(module.duotone_seed, before + 1)
    with torch.no_grad():
        module(x)
    duotone.convert(module, recipes.load("mxfp8"))
    run(module, x, dy)
    assert torch.equal(module.duotone_seed, before + 1)


def test_rules_for_the_output_head_leave_it_in_high_precision() -> None:
    model = nn.ModuleDict({"body": layer(), "lm_head": layer()})
    duotone.convert(model, recipes.load("mxfp8"))
    assert model["lm_head"].rules == OUTPUT_HEAD
    x, dy = torch.randn(8, 96).bfloat16(), torch.randn(8, 64).bfloat16()
    result = run(model["lm_head"], x, dy)
    with duotone.autocast(recipe=recipes.load("nvfp4")):
        inside = model["lm_head"](x)
    duotone.revert(model)
    assert all(torch.equal(a, b) for a, b in zip(result, run(model["lm_head"], x, dy), strict=True))
    assert torch.equal(inside, result[0])


@pytest.mark.parametrize("name", recipes.names())
def test_without_gradients_forward_has_the_same_bits_and_keeps_nothing(name) -> None:
    module = duotone.convert(layer(), recipes.load(name))
    x = torch.randn(32, 96).bfloat16().requires_grad_()
    expected = module(x)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(module(x), expected)
        with mode(), torch.autograd.graph.saved_tensors_hooks(pytest.fail, lambda t: t):
            module(x)
    module.weight.requires_grad_(False)
    assert torch.equal(module(x.detach()), expected)

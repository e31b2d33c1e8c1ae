"""duotone.Linear: nn.Linear's arguments and parameters, with a recipe."""

import copy

import pytest
import torch
from torch import nn

import duotone
from duotone import recipes
from duotone.errors import RecipeError, UserError


def test_it_has_the_parameters_of_nn_linear_and_no_more_in_its_state_dict() -> None:
    torch.manual_seed(3)
    linear = duotone.Linear(32, 16, params_dtype=torch.bfloat16, recipe=recipes.load("nvfp4"))
    torch.manual_seed(3)
    plain_linear = nn.Linear(32, 16, dtype=torch.bfloat16)
    assert list(linear.state_dict()) == list(plain_linear.state_dict())
    assert torch.equal(linear.weight, plain_linear.weight) and torch.equal(linear.bias, plain_linear.bias)
    assert duotone.Linear(32, 16, bias=False).bias is None


def test_its_recipe_gives_the_bits_of_a_converted_nn_linear() -> None:
    linear = duotone.Linear(32, 16, recipe=recipes.load("mxfp8"))
    plain_linear = nn.Linear(32, 16)
    plain_linear.load_state_dict(linear.state_dict())
    duotone.convert(plain_linear, recipes.load("mxfp8"))
    x = torch.randn(8, 32)
    assert torch.equal(linear(x), plain_linear(x))


def test_without_a_recipe_only_autocast_quantizes() -> None:
    linear = duotone.Linear(32, 16)
    x = torch.randn(8, 32)
    plain = nn.functional.linear(x, linear.weight, linear.bias)
    assert torch.equal(linear(x), plain)
    with duotone.autocast(recipe=recipes.load("nvfp4")):
        assert not torch.equal(linear(x), plain)


def test_everything_after_the_sizes_is_keyword_only() -> None:
    with pytest.raises(TypeError):
        duotone.Linear(32, 16, False)


def test_a_plan_is_built_once_per_recipe_dtype_and_gradients() -> None:
    linear = duotone.Linear(32, 16, recipe=recipes.load("mxfp8"))
    x = torch.randn(8, 32)
    first = linear.plan_for(x)
    assert linear.plan_for(x.clone()) is first
    with torch.no_grad():
        without = linear.plan_for(x)
    assert without is not first and not without.weight_grad
    assert linear.plan_for(x) is first


@pytest.mark.parametrize("shape", [(64,), (6, 64), (2, 3, 64)])
@pytest.mark.parametrize("name", ["bf16", "mxfp8"])
def test_its_output_may_be_written_in_place_as_that_of_nn_linear(name: str, shape: tuple[int, ...]) -> None:
    """The reference writes to nothing. For bf16 it is the plain model."""
    reference = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 32))
    model = duotone.convert(copy.deepcopy(reference), name, rules=())
    model[1] = nn.ReLU(inplace=True)
    if name != "bf16":
        duotone.convert(reference, name, rules=())
    x = torch.randn(shape)
    y, expected = model(x), reference(x) / 3
    y /= 3
    y.square().sum().backward()
    expected.square().sum().backward()
    assert torch.equal(y, expected)
    for parameter, same in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(parameter.grad, same.grad)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-block"])
def test_shapes_and_strides_give_the_bits_of_the_contiguous_matrix(name) -> None:
    """1-D, 3-D, transposed and sliced inputs, and batches of no rows."""
    module = duotone.Linear(64, 32, recipe=recipes.load(name), params_dtype=torch.bfloat16)
    matrix = torch.randn(24, 64).bfloat16()
    expected = module(matrix)
    wide = torch.randn(24, 128).bfloat16()
    wide[:, ::2] = matrix
    for inputs in (matrix.t().contiguous().t(), wide[:, ::2], matrix.view(2, 12, 64), matrix.view(2, 3, 4, 64)):
        result = module(inputs.detach().requires_grad_())
        assert result.shape == (*inputs.shape[:-1], 32) and torch.equal(result.reshape(24, 32), expected)
        result.sum().backward()
    assert torch.equal(module(matrix[3]), module(matrix[3:4])[0])
    for empty in ((0, 64), (2, 0, 64), (0, 3, 64)):
        x = torch.zeros(empty, dtype=torch.bfloat16, requires_grad=True)
        module.zero_grad()
        y = module(x)
        y.sum().backward()
        assert y.shape == (*empty[:-1], 32) and x.grad.shape == empty
        assert not module.weight.grad.any() and not module.bias.grad.any()


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-delayed"])
def test_nan_and_infinity_reach_no_more_than_shares_their_scale(name) -> None:
    """Rows with scales or codes of their own stay; an infinity, and NVFP4's NaN, reach all that shares the scale."""
    module = duotone.Linear(64, 32, recipe=recipes.load(name), params_dtype=torch.bfloat16)
    x = torch.randn(24, 64).bfloat16()
    clean = module(x)
    x[3, 5] = float("nan")
    y = module(x)
    finite_rows = torch.arange(24) != 3
    assert not y[3].isfinite().any()
    if name == "nvfp4":
        assert not y.isfinite().any()
    else:
        assert torch.isfinite(y[finite_rows]).all()
    if name in ("mxfp8", "fp8-current"):
        assert torch.equal(y[finite_rows], clean[finite_rows])  # the NaN is ignored by every amax
    x[3, 5] = float("inf")
    assert torch.isfinite(module(x)[finite_rows]).all() == (name in ("mxfp8", "fp8-delayed"))


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.randn(4, 64, dtype=torch.float64), "got (..., 64) in torch.float64: cast or reshape the input"),
        (torch.randn(4, 64), "got (..., 64) in torch.float32"),
        (torch.randn(4, 63).bfloat16(), "takes (..., 64) in torch.bfloat16; got (..., 63)"),
        (torch.tensor(1.0).bfloat16(), "got () in torch.bfloat16"),
        (torch.ones(4, 64, dtype=torch.int64), "torch.int64"),
    ],
    ids=["float64", "float32", "narrow", "scalar", "integers"],
)
def test_a_wrong_input_is_one_line_and_changes_nothing(x, message) -> None:
    module = duotone.Linear(64, 32, recipe=recipes.load("nvfp4"), params_dtype=torch.bfloat16, name="block.up")
    seed = module.duotone_seed.clone()
    with pytest.raises(UserError) as error:
        module(x)
    assert message in str(error.value) and "block.up" in str(error.value) and "\n" not in str(error.value)
    assert torch.equal(module.duotone_seed, seed)


def test_a_float64_module_is_refused_by_formats_and_runs_in_high_precision() -> None:
    module = duotone.Linear(64, 32, params_dtype=torch.float64, name="up")
    x = torch.randn(4, 64, dtype=torch.float64)
    assert torch.equal(module(x), nn.functional.linear(x, module.weight, module.bias))
    with duotone.autocast(recipe=recipes.load("mxfp8")), pytest.raises(RecipeError, match=r"up is in torch.float64"):
        module(x)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"parallel_mode": "diagonal", "tp_group": object()}, "parallel_mode 'diagonal' is unknown"),
        ({"parallel_mode": "row"}, "needs a tp_group"),
        ({"parallel_mode": "row", "tp_group": "ranks"}, "needs a tp_group, .* got 'ranks'"),
        ({"sequence_parallel": True}, "needs parallel_mode"),
    ],
)
def test_wrong_parallel_arguments_are_one_line(arguments, message) -> None:
    with pytest.raises(UserError, match=message):
        duotone.Linear(64, 32, **arguments)


def test_seeds_of_a_model_that_was_built_on_the_meta_device_are_made_when_it_is_materialised() -> None:
    with torch.device("meta"):
        m = nn.Sequential(nn.Linear(64, 32))
    duotone.convert(m, recipes.load("nvfp4"))
    real = duotone.convert(nn.Sequential(nn.Linear(64, 32)), recipes.load("nvfp4"))
    m.to_empty(device="cpu")
    assert torch.equal(m[0].duotone_seed, real[0].duotone_seed)


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "fp8-current", "fp8-block"])
def test_quantized_parameters_of_an_fp32_model_run_under_torch_autocast(name) -> None:
    recipe = recipes.load(name)
    module = duotone.Linear(64, 32, recipe=recipe)
    plain = duotone.Linear(64, 32, recipe=recipe)
    plain.load_state_dict(module.state_dict())
    duotone.convert_parameters(module, recipe)
    with torch.no_grad():
        plain.weight.copy_(module.weight.dequantize())
    duotone.load_rng_state(plain, duotone.rng_state(module))
    x, dy = torch.randn(16, 64), torch.randn(16, 32).bfloat16()
    for m in (module, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = m(x)
        assert y.dtype == torch.bfloat16
        y.backward(dy)
    assert module.weight.grad.dtype == torch.float32 and torch.equal(module.weight.grad, plain.weight.grad)


def test_what_is_no_tensor_is_one_line() -> None:
    with pytest.raises(UserError, match=r"takes a tensor .*; got str"):
        duotone.Linear(64, 32)("x")


@pytest.mark.parametrize("name", ["bf16", "fp8-current", "mxfp8"])
@pytest.mark.parametrize(("shape", "device"), [((5,), "cpu"), ((32, 1), "cpu"), ((32,), "meta")])
def test_a_bias_that_does_not_fit_is_one_clear_error(name, shape, device) -> None:
    """Kernels see its address alone."""
    module = duotone.Linear(64, 32, recipe=recipes.load(name))
    good = module.bias
    module.bias = nn.Parameter(torch.zeros(shape, device=device))
    with pytest.raises(UserError, match=r"its bias is \(.*its weight asks for \(32,\) on cpu"):
        module(torch.randn(16, 64))
    module.bias = good
    assert module(torch.randn(16, 64)).isfinite().all()


@pytest.mark.parametrize(
    ("recipe", "words"),
    [
        (b"mxfp8", "takes a recipe or its name; got bytes: use one of"),
        (3, "takes a recipe or its name; got int: use one of"),
        ({"recipe": "mxfp8"}, "takes a recipe or its name; got a dict: use duotone.recipes.from_dict"),
        (recipes.MXFP8BlockScaling, r"takes a recipe; got the class MXFP8BlockScaling: write MXFP8BlockScaling\(\)$"),
    ],
)
def test_what_is_no_recipe_is_refused_at_construction(recipe, words) -> None:
    makers = (
        lambda: duotone.Linear(32, 32, recipe=recipe),
        lambda: duotone.LayerNormLinear(32, 32, recipe=recipe),
        lambda: duotone.LayerNormMLP(32, 64, recipe=recipe),
        lambda: duotone.GroupedLinear(2, 32, 32, recipe=recipe),
        lambda: duotone.MultiheadAttention(32, 2, recipe=recipe),
        lambda: duotone.DotProductAttention(2, 16, recipe=recipe),
        lambda: duotone.plan(nn.Linear(32, 32), recipe),
    )
    for make in makers:
        with pytest.raises(RecipeError, match=words):
            make()


class WithoutGradient(torch.autograd.Function):
    """A function that gives its input no gradient, although it asks for one."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> None:
        return None


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_an_output_without_a_gradient_counts_as_one_of_zeros(recipe: str) -> None:
    module = duotone.Linear(64, 64, recipe=recipes.load(recipe))
    x = torch.randn(32, 64, requires_grad=True)
    WithoutGradient.apply(module(x)).sum().backward()
    for leaf in (x, *module.parameters()):
        assert torch.equal(leaf.grad, torch.zeros_like(leaf))

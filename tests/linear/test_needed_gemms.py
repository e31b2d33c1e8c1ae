"""Plans check the GEMMs that a call needs, and no others; backward multiplies what forward encoded."""

import warnings

import pytest
import torch
from torch import Tensor

import duotone
from duotone import recipes
from duotone.errors import RecipeError
from duotone.formats import get
from duotone.recipes import CustomRecipe
from duotone.tensor import Quantizer
from duotone.tensor.plane import Planes
from duotone.tensor.plane_encoder import encode_plane

MX, FP8 = get("mxfp8_e4m3"), get("fp8_e4m3_tensor")


def mixed_backward(role):
    """Forward multiplies MXFP8 with MXFP8; backward would multiply FP8 with MXFP8."""
    return Quantizer(FP8, FP8) if role is not None and role.tensor_type == "grad_output" else Quantizer(MX, MX)


def one_operand(role):
    """No columnwise format of the gradient, so that wgrad has one operand."""
    return Quantizer(MX, None if role is not None and role.tensor_type == "grad_output" else MX)


@pytest.mark.parametrize("factory", [mixed_backward, one_operand])
def test_a_forward_without_gradients_needs_no_backward(factory) -> None:
    m = duotone.Linear(32, 32, recipe=CustomRecipe(qfactory=factory))
    x = torch.randn(32, 32)
    expected = duotone.Linear(32, 32, recipe=recipes.load("mxfp8"))
    expected.load_state_dict(m.state_dict())
    with torch.no_grad():
        assert torch.equal(m(x), expected(x))
        plan = m.plan_for(x)
    assert "not needed here" in plan.wgrad.reason
    with pytest.raises(RecipeError, match="grad_output columnwise"):
        m(x)
    m.requires_grad_(False)
    assert torch.equal(m(x), expected(x))


@pytest.mark.parametrize("how", ["frozen", "eval"])
def test_convert_checks_what_the_model_may_need(how) -> None:
    def model() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))

    recipe = CustomRecipe(qfactory=mixed_backward)
    with pytest.raises(RecipeError, match="dgrad of 0 would multiply"):
        duotone.convert(model(), recipe, ())
    m = model().eval() if how == "eval" else model().requires_grad_(False)
    duotone.convert(m, recipe, ())
    x = torch.randn(32, 32)
    with torch.no_grad():
        m(x)
    assert [row.gemm for row in duotone.plan(m) if "not needed here" in row.reason] == ["dgrad", "wgrad"] * 2
    m.train().requires_grad_()
    with pytest.raises(RecipeError, match="would multiply"):
        m(x)


def test_convert_of_frozen_weights_below_trained_ones_checks_their_dgrad() -> None:
    m = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32).requires_grad_(False))
    duotone.convert(m[1:], CustomRecipe(qfactory=mixed_backward), ())
    with pytest.raises(RecipeError, match="dgrad of 0"):
        duotone.convert(m, CustomRecipe(qfactory=mixed_backward), ())


def test_a_frozen_weight_owes_dgrad_alone() -> None:
    m = duotone.Linear(32, 32, bias=False, recipe=CustomRecipe(qfactory=one_operand)).requires_grad_(False)
    x = torch.randn(32, 32, requires_grad=True)
    m(x).sum().backward()
    assert x.grad is not None
    mixed = duotone.Linear(32, 32, recipe=CustomRecipe(qfactory=mixed_backward)).requires_grad_(False)
    with pytest.raises(RecipeError, match="dgrad"):
        mixed(x)


class Counting(Quantizer):
    """Encodes another multiple of its input at each call."""

    calls = 0

    def encode(self, x, usage=None, ctx=None):
        type(self).calls += 1
        value = x * type(self).calls
        row = encode_plane(self.rowwise, value)
        return Planes(
            row if usage.rowwise else None, encode_plane(self.columnwise, value.t()) if usage.columnwise else None
        )


class Steady(Counting):
    is_repeatable = True


def counting(kind, source="original"):
    def factory(role):
        if role is not None and role.tensor_type == "input":
            return kind(MX, MX, columnwise_source=source)
        return Quantizer(MX, MX)

    return CustomRecipe(qfactory=factory)


def gradient(kind, source: str, **options) -> Tensor:
    torch.manual_seed(2)
    kind.calls = 0
    m = duotone.Linear(32, 32, recipe=counting(kind, source), name="a", **options)
    m(torch.randn(32, 32)).sum().backward()
    return m.weight.grad


@pytest.mark.parametrize("source", ["original", "rowwise_dequantized"])
def test_save_original_input_keeps_the_plane_of_a_quantizer_that_is_not_repeatable(source: str) -> None:
    """Once per linear it says so; a class that promises the same bits is taken at its word, and asked again."""
    expected = gradient(Counting, source)
    with pytest.warns(
        UserWarning, match="a: the quantizer of its input has an encode of its own.*keeps the columnwise"
    ):
        assert torch.equal(gradient(Counting, source, save_original_input=True), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not torch.equal(gradient(Steady, source, save_original_input=True), expected)


@pytest.mark.parametrize("row", ["mxfp8_e4m3", "nvfp4_sr", "fp8_e4m3_tensor"])
def test_save_original_input_with_a_plane_of_dequantized_rows_changes_no_bit(row: str) -> None:
    def factory(role):
        if role is not None and role.tensor_type == "input":
            return Quantizer(get(row), MX, columnwise_source="rowwise_dequantized")
        return Quantizer()

    gradients = []
    for saves in (False, True):
        torch.manual_seed(2)
        m = duotone.Linear(32, 32, recipe=CustomRecipe(qfactory=factory), name="a", save_original_input=saves)
        (m(torch.randn(32, 32)) * torch.randn(32, 32)).sum().backward()
        gradients.append(m.weight.grad)
    assert torch.equal(*gradients)

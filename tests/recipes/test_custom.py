"""CustomRecipe: called once per slot when a plan is built, and loud about what it returns."""

import pytest
import torch
from torch import nn

import duotone
from duotone import CustomRecipe, HybridQuantizer, IdentityQuantizer, Quantizer, formats, recipes
from duotone.compat.quantizers import MXFP8Quantizer
from duotone.errors import RecipeError
from duotone.recipes import QuantizerRole, align_size

WEIGHT = QuantizerRole("linear", "weight", "proj")


def never(role):
    raise AssertionError("the factory was called")


def test_a_factory_is_called_once_per_slot_of_a_plan_and_never_per_step() -> None:
    """hybrid 85: forward slots, then backward slots, None where the consumer is unknown; then no more."""
    calls = []

    def factory(role):
        calls.append(role and str(role))
        return MXFP8Quantizer()

    m = nn.ModuleDict({"proj": nn.Linear(32, 32)})
    duotone.convert(m, CustomRecipe(qfactory=factory))
    m["proj"](torch.randn(4, 32)).sum().backward()
    roles = [f"module_type=linear|tensor_type={t}|name=proj" for t in ("input", "weight", "grad_output")]
    plans = len(calls) // 5
    assert plans >= 1 and calls == [roles[0], roles[1], None, roles[2], None] * plans
    calls.clear()
    for _ in range(3):
        m["proj"](torch.randn(4, 32)).sum().backward()
    assert calls == []


def test_a_factory_may_return_values_or_handles() -> None:
    hybrid = HybridQuantizer(rowwise_quantizer=MXFP8Quantizer(), columnwise_quantizer=IdentityQuantizer())
    assert CustomRecipe(qfactory=lambda role: hybrid)(QuantizerRole()) == Quantizer(formats.get("mxfp8_e4m3"))
    value = Quantizer(formats.get("nvfp4"))
    assert CustomRecipe(qfactory=lambda role: value)(QuantizerRole()) is value


@pytest.mark.parametrize("tensor_type", ["grad_output", "grad_input"])
@pytest.mark.parametrize("source", ["rowwise_dequantized", "original"])
def test_a_columnwise_plane_of_a_gradient_encodes_the_original(tensor_type: str, source: str) -> None:
    value = Quantizer(columnwise_source=source)
    recipe, role = CustomRecipe(qfactory=lambda role: value), QuantizerRole("linear", tensor_type, "proj")
    if source == "original":
        assert recipe(role) is value
        return
    with pytest.raises(RecipeError, match="for inputs and weights alone") as raised:
        recipe(role)
    assert "\n" not in str(raised.value)
    assert recipe(WEIGHT) is value and recipe(None) is value
    with pytest.raises(RecipeError, match="for inputs and weights alone"):
        duotone.Linear(32, 32, recipe=recipe)(torch.randn(32, 32))


class Encoder:
    """No subclass of Quantizer, and no more than a quantizer needs."""

    rowwise = columnwise = formats.get("mxfp8_e4m3")

    def __init__(self) -> None:
        self.encoded = []

    def encode(self, x, usage, ctx):
        self.encoded.append(tuple(x.shape))
        return Quantizer(self.rowwise, self.columnwise).encode(x, usage, ctx)


def test_a_subclass_of_quantizer_is_taken_as_it_is() -> None:
    class Doubling(Quantizer):
        pass

    result = Doubling()
    assert CustomRecipe(qfactory=lambda role: result)(WEIGHT) is result


def test_an_object_with_two_formats_and_encode_trains_like_a_quantizer() -> None:
    quantizer = Encoder()

    def train(factory):
        torch.manual_seed(3)
        m = duotone.Linear(64, 32, name="a", recipe=CustomRecipe(qfactory=factory))
        x = torch.randn(32, 64, requires_grad=True)
        y = m(x)
        y.sum().backward()
        return y, x.grad, m.weight.grad

    losses, expected = train(lambda role: quantizer), train(lambda role: MXFP8Quantizer())
    assert all(a.equal(b) for a, b in zip(losses, expected, strict=True))
    assert sorted(quantizer.encoded) == [(32, 32), (32, 64), (32, 64)]
    recipe = CustomRecipe(qfactory=lambda role: quantizer)
    assert recipe(WEIGHT) == recipe(WEIGHT) and recipe(WEIGHT).inner is quantizer


def test_an_object_whose_formats_are_none_is_refused_with_its_slot() -> None:
    class Wrong(Encoder):
        rowwise = "mxfp8_e4m3"

    with pytest.raises(RecipeError, match=r"qfactory returned Wrong for module_type=linear.*a quantizer takes formats"):
        CustomRecipe(qfactory=lambda role: Wrong())(WEIGHT)


def test_a_boundary_slot_gets_none() -> None:
    """hybrid 77: the factory of a slot whose consumer is unknown sees None."""
    asked_roles = []
    recipe = CustomRecipe(qfactory=lambda role: asked_roles.append(role) or Quantizer())
    assert recipe.quantizer(None) == Quantizer() and recipe.quantizer(WEIGHT) == Quantizer()
    assert asked_roles == [None, WEIGHT]


@pytest.mark.parametrize(
    ("returned", "words"), [(None, "None"), ("mxfp8", "str"), (3, "int"), (Quantizer, "the class Quantizer")]
)
def test_a_factory_that_returns_rubbish_is_named_with_its_slot_and_nothing_changes(returned, words) -> None:
    """hybrid 83: the error names the slot and its role, and recommends the identity."""
    m = nn.ModuleDict({"proj": nn.Linear(32, 32)})
    with pytest.raises(RecipeError) as raised:
        duotone.convert(m, CustomRecipe(qfactory=lambda role: returned))
    message = f"qfactory returned {words} for module_type=linear|tensor_type=input|name=proj; return a Quantizer"
    assert message in str(raised.value) and "IdentityQuantizer()" in str(raised.value)
    assert type(m["proj"]) is nn.Linear
    with pytest.raises(RecipeError, match=f"returned {words} for a boundary slot whose consumer is unknown"):
        CustomRecipe(qfactory=lambda role: returned)(None)


def test_a_factory_that_raises_is_named_with_its_slot_and_its_error() -> None:
    error = KeyError("no such\nlayer")

    def factory(role):
        raise error

    with pytest.raises(
        RecipeError, match=r"qfactory raised KeyError for module_type=linear\|tensor_type=weight"
    ) as result:
        CustomRecipe(qfactory=factory)(WEIGHT)
    assert result.value.__cause__ is error and "\n" not in str(result.value)


@pytest.mark.parametrize("size", [0, -16, 2.0, True, "128"])
def test_an_alignment_that_is_none_is_refused(size) -> None:
    """hybrid 88"""
    with pytest.raises(RecipeError, match=r"quantization_alignment is .*; give an integer of at least 1"):
        CustomRecipe(qfactory=never, quantization_alignment=size)


def test_the_alignment_of_a_recipe_is_known_without_its_factory() -> None:
    """hybrid 88"""
    assert align_size(CustomRecipe(qfactory=never)) == 128
    assert align_size(CustomRecipe(qfactory=never, quantization_alignment=48)) == 48
    sizes = {name: align_size(recipes.load(name)) for name in ("bf16", "fp8-current", "fp8-block", "mxfp8", "nvfp4")}
    assert sizes == {"bf16": 16, "fp8-current": 16, "fp8-block": 16, "mxfp8": 32, "nvfp4": 128}
    assert align_size(recipes.DelayedScaling()) == 16
    assert align_size(recipes.load("mxfp8-fwd-nvfp4-bwd")) == 128


def test_it_shows_its_factory_by_name_and_is_not_read_back() -> None:
    document = CustomRecipe(qfactory=never, quantization_alignment=64).to_dict()
    assert document["qfactory"].endswith("test_custom.never") and document["quantization_alignment"] == 64
    with pytest.raises(RecipeError, match="a recipe of a function cannot be read back: make the CustomRecipe"):
        recipes.from_dict(document)


def test_a_quantize_that_no_module_calls_is_an_error() -> None:
    class Value(Quantizer):
        def quantize(self, x, **options):
            return super().quantize(x * 0, **options)

    class Whole(Value):
        def encode(self, x, *arguments):
            return super().encode(x * 0, *arguments)

    class Handle(MXFP8Quantizer):
        def quantize(self, tensor, **options):
            return super().quantize(tensor * 0, **options)

    mx = formats.get("mxfp8_e4m3")
    for quantizer in (Value(mx, mx), Handle()):
        with pytest.raises(
            RecipeError, match=f"returned {type(quantizer).__name__} for .* overrides quantize"
        ) as error:
            CustomRecipe(qfactory=lambda role, quantizer=quantizer: quantizer)(WEIGHT)
        assert "\n" not in str(error.value)
    assert CustomRecipe(qfactory=lambda role: Whole(mx, mx))(WEIGHT) == Whole(mx, mx)

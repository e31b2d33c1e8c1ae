"""QuantizerRole: what it says of itself, and when two are the same."""

import pytest

from duotone import recipes
from duotone.compat import RecipeState
from duotone.compat import factories as zoo
from duotone.errors import RecipeError
from duotone.recipes import CustomRecipe, QuantizerRole


@pytest.mark.parametrize(
    ("role", "text"),
    [
        (QuantizerRole("linear", "input", "a.b"), "module_type=linear|tensor_type=input|name=a.b"),
        (QuantizerRole(tensor_type="weight"), "tensor_type=weight"),
        (QuantizerRole(name="fc1"), "name=fc1"),
        (QuantizerRole(), "QuantizerRole()"),
    ],
)
def test_a_role_says_the_fields_that_are_not_empty(role, text):
    """hybrid 76"""
    assert str(role) == text


def test_roles_are_values():
    """hybrid 76"""
    role = QuantizerRole("linear", "input", "a")
    assert role == QuantizerRole("linear", "input", "a") and hash(role) == hash(QuantizerRole("linear", "input", "a"))
    others = [
        QuantizerRole("dpa", "input", "a"),
        QuantizerRole("linear", "weight", "a"),
        QuantizerRole("linear", "input"),
    ]
    assert role not in others and len({role, *others}) == 4
    with pytest.raises(AttributeError):
        role.name = "b"


WRONG = [
    QuantizerRole("linear", "wieght", "fc1"),
    QuantizerRole("grouped_linear", "qkv"),
    QuantizerRole("dpa", "qvk"),
]
WITH_ATTENTION = [
    *(recipes.load(name) for name in ("bf16", "fp8-current", "fp8-delayed", "fp8-block", "mxfp8", "nvfp4")),
    recipes.load("mxfp8-fwd-nvfp4-bwd"),
    CustomRecipe(qfactory=zoo.nvfp4_factory),
]


@pytest.mark.parametrize("recipe", WITH_ATTENTION, ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("role", WRONG, ids=str)
def test_a_tensor_that_a_known_module_does_not_have_is_refused(recipe, role):
    """A slip of the pen would get what activations get."""
    with pytest.raises(
        RecipeError, match=f"a {role.module_type} has no tensor '{role.tensor_type}'; allowed are "
    ) as one:
        recipe(role)
    assert "\n" not in str(one.value)


@pytest.mark.parametrize("recipe", WITH_ATTENTION[:-2], ids=lambda recipe: recipe.name)
def test_other_module_types_and_empty_fields_still_fall_back(recipe):
    for role in (
        QuantizerRole("conv", "kernel"),
        QuantizerRole(),
        QuantizerRole("linear"),
        QuantizerRole("", "wieght"),
    ):
        assert recipe(role) is not None
    state = RecipeState.create(recipe, mode="forward", num_quantizers=2, roles=[None, QuantizerRole("conv", "kernel")])
    assert state.make_quantizers()[1].value == recipe(QuantizerRole("conv", "weight"))

"""QuantizerRole: what it says of itself, and when two are the same."""

import pytest

from duotone.recipes import QuantizerRole


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

"""Roles: which tensor of which module asks for a format."""

from dataclasses import dataclass, replace

from duotone.errors import RecipeError


@dataclass(frozen=True)
class QuantizerRole:
    """`module_type` such as "linear", `tensor_type` "input", "weight" or "grad_output", `name` the module's full name.

    An empty field says nothing.
    """

    module_type: str = ""
    tensor_type: str = ""
    name: str = ""

    def __str__(self) -> str:
        return "|".join(f"{key}={value}" for key, value in vars(self).items() if value) or "QuantizerRole()"


@dataclass(frozen=True)
class Site:
    """The place of the module of a role, and what else rules may ask besides the role.

    `layer` is its index in the outermost numbered stack of modules that holds it, `layers` the length of that stack;
    `shape` is its weight's, (out, in). None is not known, or not in a stack. `named` says whether the role's name is
    the module's full name in its model.
    """

    layer: int | None = None
    layers: int | None = None
    shape: tuple[int, ...] | None = None
    named: bool = True


ANYWHERE = Site()
UNNAMED = Site(named=False)

TENSOR_TYPES = ("input", "weight", "grad_output")
SLOTS = {"forward": ("input", "weight", "output"), "backward": ("grad_output", "grad_input")}
"""The slots of a linear in each mode, in order."""

BOUNDARIES = ("output", "grad_input")
"""The slots whose tensors another module consumes."""

ATTENTION_TYPES = ("qkv", "s", "do", "dp", "dqkv")
GRADIENTS = ("grad_output", "grad_input", "do", "dp", "dqkv")
LINEAR = ("linear", "grouped_linear")
GEMMS = ("fprop", "dgrad", "wgrad")
TENSORS_OF_MODULES = {
    **dict.fromkeys(LINEAR, (*TENSOR_TYPES, *BOUNDARIES)),
    "dpa": (*ATTENTION_TYPES, *TENSOR_TYPES, *BOUNDARIES),
}
"""The tensor types of the module types that Duotone knows; other module types may have any."""

PLANES_OF_GEMM = {
    "fprop": (("input", "rowwise"), ("weight", "rowwise")),
    "dgrad": (("grad_output", "rowwise"), ("weight", "columnwise")),
    "wgrad": (("grad_output", "columnwise"), ("input", "columnwise")),
}
"""The two operands of each GEMM: which tensor, read in which direction."""

GEMM_OF_PLANE = {plane: gemm for gemm, planes in PLANES_OF_GEMM.items() for plane in planes}
"""The GEMM that reads each plane of a linear."""


def in_slot(role: QuantizerRole | None, slot: QuantizerRole | None) -> QuantizerRole:
    """The role of a tensor in a module's `slot`. If it names no tensor of a linear, it gets the slot's tensor type."""
    if role is None or slot is None:
        return role or QuantizerRole(tensor_type=slot.tensor_type if slot else "")
    is_of_linear = role.tensor_type in (*SLOTS["forward"], *SLOTS["backward"])
    return role if is_of_linear else replace(role, tensor_type=slot.tensor_type)


def require_known(role: QuantizerRole | None) -> None:
    """RecipeError if a module type that Duotone knows has no tensor of that type; an empty field says nothing."""
    if role is None or not role.tensor_type:
        return
    allowed = TENSORS_OF_MODULES.get(role.module_type)
    if allowed is not None and role.tensor_type not in allowed:
        kind = role.module_type
        raise RecipeError(f"{role}: a {kind} has no tensor {role.tensor_type!r}; allowed are {', '.join(allowed)}")

"""Roles of the slots of a module, and the consumers of the tensors that cross its boundaries."""

from torch import nn

from duotone.errors import UserError, one_of
from duotone.recipes.recipe import drop_dead
from duotone.recipes.roles import SLOTS, QuantizerRole, require_known

Role = QuantizerRole | None


class KnownRoles:
    """Mixed in before an nn.Module that has slots, or children with slots."""

    def get_quantizer_roles(self, mode: str | None = None) -> dict[str, Role]:
        """The role of every slot by its name, of "forward", then of "backward", or of one of them.

        Slots of children are `<child>.<slot>`. None is a consumer that is not known. UserError for another mode.
        """
        one_of("mode", mode, (None, *SLOTS))
        modes = tuple(SLOTS) if mode is None else (mode,)
        return {slot: role for one in modes for slot, role in self.roles_of(one).items()}

    def roles_of(self, mode: str) -> dict[str, Role]:
        """The role of every slot of a mode, from the children."""
        children = self.named_children()  # type: ignore[attr-defined]
        parts = [(name, child) for name, child in children if isinstance(child, KnownRoles)]
        return {f"{name}.{slot}": role for name, part in parts for slot, role in part.roles_of(mode).items()}

    def __setattr__(self, name: str, value: object) -> None:
        if name.endswith("_quantizer_role"):
            kind = type(self)
            if not hasattr(kind, name):
                allowed = [role for role in BOUNDARY_ROLES if hasattr(kind, role)]
                has = f"allowed are {', '.join(allowed)}" if allowed else "set those of its children"
                raise UserError(f"{kind.__name__} has no {name}; {has}")
            require_known(value if isinstance(value, QuantizerRole) else None)
            if value is not None and not isinstance(value, QuantizerRole):
                raise UserError(f"{name} is {value!r}; give a duotone.QuantizerRole, or None where nobody is known")
        super().__setattr__(name, value)


NOBODY: tuple[Role, Role] = (None, None)
BOUNDARY_ROLES = ("output_quantizer_role", "grad_input_quantizer_role")
OF_OUTPUT = "The role of the output at its consumer; a change takes effect at the next forward."
OF_GRADIENT = "The role of the gradient of the inputs at its consumer."


def _boundary_role(at: int, text: str) -> property:
    def role(self: "BoundaryRoles") -> Role:
        return self.consumers.shown[at] or self._roles[at]

    def change(self: "BoundaryRoles", role: Role) -> None:
        if role != (self.consumers.shown[at] or self._roles[at]):
            self._roles = (role, self._roles[1]) if at == 0 else (self._roles[0], role)
            self.consumers.forget()
            self.roles_changed()

    return property(role, change, doc=text)


class ConsumerRoles:
    """Roles of a module's consumers, by the key of the recipe. A neighbour sets them."""

    def __init__(self) -> None:
        self.by_recipe: dict[str, tuple[Role, Role]] = {}
        self.shown: tuple[Role, Role] = NOBODY
        """The roles under the recipe of the last call."""

    def forget(self) -> None:
        """Ask the neighbours again."""
        self.by_recipe, self.shown = {}, NOBODY


class BoundaryRoles:
    """Mixed in before an nn.Module that asks recipes for its boundary slots. None is an unknown consumer."""

    _roles: tuple[Role, Role] = NOBODY
    """The roles under all recipes."""

    consumers: ConsumerRoles
    output_quantizer_role = _boundary_role(0, OF_OUTPUT)
    grad_input_quantizer_role = _boundary_role(1, OF_GRADIENT)

    def roles_under(self, recipe: str) -> tuple[Role, Role]:
        """The roles of the output and of the gradient of the input under a recipe, by its key."""
        output, gradient = self.consumers.by_recipe.get(recipe, NOBODY)
        return output or self._roles[0], gradient or self._roles[1]

    def set_consumers(self, recipe: str, output: Role = None, gradient: Role = None) -> None:
        """Set the consumers of the output and of the input's gradient under the recipe of the next call, by its key."""
        roles = self.consumers.shown = output, gradient
        if self.consumers.by_recipe.get(recipe, NOBODY) != roles:
            drop_dead(self.consumers.by_recipe)
            self.consumers.by_recipe[recipe] = roles
            self.forget_recipe(recipe)

    def forget_recipe(self, recipe: str) -> None:
        """Ask a recipe again, by its key."""
        raise NotImplementedError

    def roles_changed(self) -> None:
        """Ask recipes again."""
        raise NotImplementedError


def _inner_role(at: int, text: str) -> property:
    name = BOUNDARY_ROLES[at]

    def role(self: "InnerBoundaryRoles") -> Role:
        return getattr(self.at_boundary[at], name, None)

    def change(self: "InnerBoundaryRoles", role: Role) -> None:
        module = self.at_boundary[at]
        if not hasattr(type(module), name):
            outer, inner = type(self).__name__, type(module).__name__
            raise UserError(
                f"{outer} has no slot for {name}: a {inner} stands at its boundary; put a duotone.Linear there"
            )
        setattr(module, name, role)

    return property(role, change, doc=text)


class InnerBoundaryRoles(KnownRoles):
    """A mixin for an nn.Module whose boundary slots belong to modules inside of it. It comes before nn.Module."""

    output_quantizer_role = _inner_role(0, OF_OUTPUT)
    grad_input_quantizer_role = _inner_role(1, OF_GRADIENT)

    @property
    def at_boundary(self) -> tuple[nn.Module, nn.Module]:
        """The module that makes the output, and the one that makes the gradient of the input."""
        raise NotImplementedError

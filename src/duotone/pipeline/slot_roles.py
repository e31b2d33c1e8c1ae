"""Roles of the slots of a module, and who consumes what crosses its boundaries."""

from typing import Any

from duotone.errors import UserError
from duotone.recipes.roles import SLOTS, QuantizerRole, require_known

Role = QuantizerRole | None
Roles = tuple[Role, Role]


class KnownRoles:
    """Mixed in before an nn.Module that has slots, or children with slots."""

    def get_quantizer_roles(self, mode: str | None = None) -> dict[str, Role]:
        """The role of every slot by its name, of "forward", then of "backward", or of one of them.

        Slots of children are `<child>.<slot>`. None is a consumer that is not known. UserError for another mode.
        """
        if mode not in (None, *SLOTS):
            raise UserError(f"mode {mode!r} is unknown; allowed are 'forward' and 'backward'")
        modes = tuple(SLOTS) if mode is None else (mode,)
        return {slot: role for one in modes for slot, role in self.roles_of(one).items()}

    def roles_of(self, mode: str) -> dict[str, Role]:
        """The role of every slot of a mode: those of the children."""
        children = self.named_children()  # type: ignore[attr-defined]
        parts = [(name, child) for name, child in children if isinstance(child, KnownRoles)]
        return {f"{name}.{slot}": role for name, part in parts for slot, role in part.roles_of(mode).items()}

    def __setattr__(self, name: str, value: Any) -> None:
        if name.endswith("_quantizer_role"):
            kind = type(self)
            if not hasattr(kind, name):
                allowed = [known for known in BOUNDARY_ROLES if hasattr(kind, known)]
                has = f"allowed are {', '.join(allowed)}" if allowed else "set those of its children"
                raise UserError(f"{kind.__name__} has no {name}; {has}")
            require_known(value if isinstance(value, QuantizerRole) else None)
            if value is not None and not isinstance(value, QuantizerRole):
                raise UserError(f"{name} is {value!r}; give a duotone.QuantizerRole, or None where nobody is known")
        super().__setattr__(name, value)


BOUNDARY_ROLES = ("output_quantizer_role", "grad_input_quantizer_role")


class BoundaryRoles:
    """Mixed in before an nn.Module that asks recipes for its boundary slots. Roles are None where nobody is known."""

    _roles: Roles = (None, None)

    @property
    def output_quantizer_role(self) -> Role:
        """The role of the output at its consumer; a change takes effect at the next forward."""
        return self._roles[0]

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: Role) -> None:
        self._set_roles((role, self._roles[1]))

    @property
    def grad_input_quantizer_role(self) -> Role:
        """The role of the gradient of the inputs at its consumer."""
        return self._roles[1]

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: Role) -> None:
        self._set_roles((self._roles[0], role))

    def _set_roles(self, roles: Roles) -> None:
        if roles != self._roles:
            self._roles = roles
            self.roles_changed()

    def roles_changed(self) -> None:
        """Ask recipes anew."""
        raise NotImplementedError


class InnerBoundaryRoles(KnownRoles):
    """Mixed in before an nn.Module whose boundary slots are those of modules inside of it."""

    @property
    def at_boundary(self) -> tuple[Any, Any]:
        """The module that makes the output, and the one that makes the gradient of the input."""
        raise NotImplementedError

    @property
    def output_quantizer_role(self) -> Role:
        """The role of the output of the last linear at its consumer."""
        return getattr(self.at_boundary[0], "output_quantizer_role", None)

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: Role) -> None:
        self._pass_on(self.at_boundary[0], "output_quantizer_role", role)

    @property
    def grad_input_quantizer_role(self) -> Role:
        """The role of the gradient of the first linear's input at its consumer."""
        return getattr(self.at_boundary[1], "grad_input_quantizer_role", None)

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: Role) -> None:
        self._pass_on(self.at_boundary[1], "grad_input_quantizer_role", role)

    def _pass_on(self, module: Any, name: str, role: Role) -> None:
        if not hasattr(type(module), name):
            own, other = type(self).__name__, type(module).__name__
            raise UserError(
                f"{own} has no slot for {name}: a {other} stands at its boundary; put a duotone.Linear there"
            )
        setattr(module, name, role)

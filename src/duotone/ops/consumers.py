"""Roles at the boundaries of a module: what consumes its output, and the gradient that it hands back."""

from duotone.recipes.roles import QuantizerRole

Roles = tuple[QuantizerRole | None, QuantizerRole | None]


class BoundaryRoles:
    """Mixed in before an nn.Module that asks recipes for its boundary slots. Roles are None where nobody is known."""

    _roles: Roles

    @property
    def output_quantizer_role(self) -> QuantizerRole | None:
        """The role of the output at its consumer; a change takes effect at the next forward."""
        return self._roles[0]

    @output_quantizer_role.setter
    def output_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_roles((role, self._roles[1]))

    @property
    def grad_input_quantizer_role(self) -> QuantizerRole | None:
        """The role of the gradient of the inputs at its consumer."""
        return self._roles[1]

    @grad_input_quantizer_role.setter
    def grad_input_quantizer_role(self, role: QuantizerRole | None) -> None:
        self._set_roles((self._roles[0], role))

    def _set_roles(self, roles: Roles) -> None:
        if roles != self._roles:
            self._roles = roles
            self.roles_changed()

    def roles_changed(self) -> None:
        """Ask recipes anew."""
        raise NotImplementedError

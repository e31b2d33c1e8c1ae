"""The exceptions that Duotone raises on purpose. Every message is one line: given, allowed, what to do."""


class UserError(ValueError):
    """Something the caller gave is not allowed; nothing was changed. The command line prints it and exits with 2."""


class MissingPlaneError(RuntimeError):
    """A plane that an operation needs is absent from a quantized tensor and cannot be derived without loss."""


class RecipeError(UserError):
    """A recipe, a rule or a format name that cannot be used."""

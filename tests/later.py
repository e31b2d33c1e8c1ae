"""Modules that are imported when a test first uses them, since a collection of all tests would wait for each."""

from importlib import import_module


class Later:
    """A module by its name. Each public attribute is that of the module; pytest asks for others as it collects."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> object:
        if attribute.startswith("_"):
            raise AttributeError(attribute)
        return getattr(import_module(self._name), attribute)

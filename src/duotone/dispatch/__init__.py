"""Binds formats to backends: which stages encode, which rule multiplies, and why the others were rejected."""

from duotone.dispatch.stages import compiled_casts

__all__ = ["compiled_casts"]

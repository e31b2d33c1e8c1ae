"""Modules that follow plans: what they share, and Linear and GroupedLinear."""

__all__: list[str] = []

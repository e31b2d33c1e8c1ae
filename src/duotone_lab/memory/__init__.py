"""Bytes: what a model and its step hold, predicted and measured, and what ranks send."""

__all__: list[str] = []

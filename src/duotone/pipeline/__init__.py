"""Stages and ops: what a pipeline runs, the one autograd function that runs it, and the rules that rewrite it."""

__all__: list[str] = []

"""Modules that follow plans: what they share, and Linear and GroupedLinear."""

"""What `duotone.compat.te` puts under the names of Transformer Engine."""

__all__: list[str] = []

"""Who holds which part of a tensor, and who agrees with whom: layouts of linears and activations, and DTensors."""

__all__: list[str] = []

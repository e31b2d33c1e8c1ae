"""nn.Module shells over the linear core."""

from duotone.modules.linear import Linear as Linear

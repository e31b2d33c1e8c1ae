"""Statistics of what quantization does to each tensor, gathered without changing a bit of it."""

from duotone.observe.tap import Tap as Tap
from duotone.observe.tap import tap as tap

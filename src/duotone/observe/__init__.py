"""What quantization loses and what memory it holds, observed without changing a bit."""

from duotone.observe.memory_ledger import Ledger, ledger
from duotone.observe.tapped_recipe import Tap, tap

__all__ = ["Ledger", "Tap", "ledger", "tap"]

"""What quantization loses and what memory it holds, observed without changing a bit."""

from duotone.observe.memory_ledger import Ledger, ledger
from duotone.observe.tapped_recipe import Tap, with_statistics
from duotone.renamed import keep_old_names

__all__ = ["Ledger", "Tap", "ledger", "with_statistics"]
keep_old_names({"tap": "with_statistics"}, globals())

"""What quantization loses and what memory it holds, observed without changing a bit."""

from duotone.observe.advice import Advice, AdviceRow
from duotone.observe.advising import advise
from duotone.observe.memory_ledger import Ledger, ledger
from duotone.observe.monitor import Monitor
from duotone.observe.statistics import Tap
from duotone.observe.tapped_recipe import with_statistics

__all__ = ["Advice", "AdviceRow", "Ledger", "Monitor", "Tap", "advise", "ledger", "with_statistics"]

"""What quantization loses, observed without changing a bit."""

from duotone.observe.advice import Advice, AdviceRow
from duotone.observe.advising import advise
from duotone.observe.monitor import Monitor
from duotone.observe.statistics import Tap
from duotone.observe.tapped_recipe import with_statistics

__all__ = ["Advice", "AdviceRow", "Monitor", "Tap", "advise", "with_statistics"]

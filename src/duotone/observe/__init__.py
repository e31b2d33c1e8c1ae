"""What quantization loses and what memory it holds, observed without changing a bit."""

from duotone.observe.memory_ledger import Ledger as Ledger
from duotone.observe.memory_ledger import ledger as ledger
from duotone.observe.tapped_recipe import Tap as Tap
from duotone.observe.tapped_recipe import tap as tap

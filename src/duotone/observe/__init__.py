"""What quantization loses and what memory it holds, observed without changing a bit."""

from duotone.observe.memory_ledger import Ledger as Ledger
from duotone.observe.memory_ledger import ledger as ledger
from duotone.observe.tap import Tap as Tap
from duotone.observe.tap import tap as tap

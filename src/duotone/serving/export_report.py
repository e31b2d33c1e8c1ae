"""The report of an export: where each quantized tensor came from, and what it lost."""

from collections import Counter
from dataclasses import dataclass

from duotone.text import aligned


@dataclass(frozen=True)
class ExportRow:
    """One exported weight. `source` is "planes", "encoded" or "re-encoded".

    `error` is the relative error ||decoded - values|| / ||values||: 0 from planes.
    """

    weight: str
    format: str
    source: str
    error: float


@dataclass(frozen=True, repr=False)
class ExportReport:
    """The rows of an export, its scheme and the bytes of its tensors. `str(report)` is a table."""

    scheme: str
    rows: tuple[ExportRow, ...]
    bytes: int

    def __str__(self) -> str:
        cells = [(row.weight, row.format, row.source, f"{row.error:.3e}") for row in self.rows]
        return "\n".join(aligned([("weight", "format", "source", "error"), *cells], [False, False, False, True]))

    def __repr__(self) -> str:
        counts = Counter(row.source for row in self.rows)
        sources = ", ".join(f"{count} {source}" for source, count in counts.items())
        return (
            f"ExportReport({self.scheme}, {len(self.rows)} weights{': ' * bool(sources)}{sources}, {self.bytes} bytes)"
        )

"""PairedQuantizer: two quantizers, one for each direction, for quantizers that are more than a format."""

from dataclasses import dataclass

from torch import Tensor

from duotone.tensor.context import LOCAL, QuantizeContext
from duotone.tensor.plane import BOTH, Planes, Usage
from duotone.tensor.quantizer import Quantizer

PLAIN = Quantizer()


@dataclass(frozen=True)
class PairedQuantizer(Quantizer):
    """The rowwise plane comes from `of_row`, the columnwise one from `of_col`. Either may override `encode`."""

    of_row: Quantizer = PLAIN
    of_col: Quantizer = PLAIN

    @property
    def is_requantization_safe(self) -> bool:
        return self.of_row.is_requantization_safe and self.of_col.is_requantization_safe

    def encode(self, x: Tensor, usage: Usage = BOTH, ctx: QuantizeContext = LOCAL) -> Planes:
        wants_row = usage.rowwise and self.rowwise is not None
        wants_col = usage.columnwise and self.columnwise is not None
        follows = wants_col and self.columnwise_source != "original" and self.rowwise is not None
        row = self.of_row.encode(x, Usage(True, False), ctx).rowwise if wants_row or follows else None
        source = row.dequantize(ctx.nominal or x.dtype) if follows and row is not None else x
        col = self.of_col.encode(source, Usage(False, True), ctx).columnwise if wants_col else None
        return Planes(row if wants_row else None, col)


def paired(row: Quantizer, col: Quantizer, source: str) -> Quantizer:
    """The quantizer with the rowwise planes of `row` and the columnwise planes of `col`."""
    fields = row.rowwise, col.columnwise, source, row.history or col.history
    if type(row) is type(col) is Quantizer and col.columnwise_source == "original":
        return Quantizer(*fields)
    return PairedQuantizer(*fields, row, col)

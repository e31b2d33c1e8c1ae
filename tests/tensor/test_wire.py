"""Wire form and FSDP hooks without processes: shards that are put together are the whole, byte for byte."""

import pytest
import torch
from tensor_cases import QUANTIZERS, same_parts

from duotone.errors import MissingPlaneError
from duotone.tensor import Planes
from duotone.tensor.plane import from_wire, to_wire


@pytest.mark.parametrize("name", QUANTIZERS)
def test_shards_put_together_are_the_whole(name) -> None:
    """core 22; hybrid 28: rows of the tensor are rows of one plane and columns of the other; no communication here."""
    t = QUANTIZERS[name].quantize(torch.randn(256, 128).bfloat16())
    shards = [t[:128], t[128:]]
    results = []
    for side, dim in ((0, 0), (1, 1)):
        wire_shards = [to_wire(shard.planes[side], dim) for shard in shards]
        for part in (p for parts in wire_shards for p in parts):
            assert part.is_contiguous() and part.dtype in (torch.uint8, torch.float32, torch.bfloat16)
        gathered = [torch.cat(parts) for parts in zip(*wire_shards, strict=True)]
        results.append(from_wire(shards[0].planes[side], dim, gathered, 2))
    whole = Planes(*results)
    assert same_parts(
        (whole.rowwise.parts, whole.columnwise.parts), (t.planes.rowwise.parts, t.planes.columnwise.parts)
    )
    assert [p.shape for p in whole] == [p.shape for p in t.planes]


def test_shards_that_cut_blocks_do_not_travel() -> None:
    """hybrid 29."""
    t = QUANTIZERS["mxfp8"].quantize(torch.randn(48, 64))
    with pytest.raises(MissingPlaneError, match=r"a shard of 48 along the columns .* cuts its blocks of 32"):
        to_wire(t.planes.columnwise, 1)

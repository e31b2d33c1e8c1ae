"""Blocks: which elements share a scale, with ragged edges, any strides and empty matrices."""

import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from duotone.formats.geometry import ROW, TENSOR, Block

BLOCKS = [TENSOR, ROW, Block(1, 16), Block(1, 32), Block(16, 16), Block(32, 32), Block(128, 128), Block(2, 3)]
SIZES = st.integers(0, 40)


@pytest.mark.parametrize(
    ("block", "name", "transposes", "grid"),
    [
        (TENSOR, "tensor", True, (1, 1)),
        (ROW, "row", False, (33, 1)),
        (Block(1, 32), "1x32", False, (33, 3)),
        (Block(16, 16), "16x16", True, (3, 5)),
        (Block(128, 128), "128x128", True, (1, 1)),
    ],
)
def test_name_and_grid_count_ragged_blocks(block: Block, name: str, transposes: bool, grid: tuple[int, int]) -> None:
    assert (block.name, block.transposes, block.grid(33, 65)) == (name, transposes, grid)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(st.sampled_from(BLOCKS), SIZES, SIZES, st.booleans())
def test_view_holds_every_element_in_its_block_and_zeros_elsewhere(
    block: Block, rows: int, cols: int, transposed: bool
) -> None:
    x = torch.arange(1.0, rows * cols + 1).view(rows, cols)
    if transposed:
        x = x.t().contiguous().t()
    blocks = block.view(x)
    want = reference.tiles(x.numpy(), block.rows, block.cols).transpose(0, 2, 1, 3)
    assert blocks.shape == want.shape and np.array_equal(blocks.numpy(), want)
    assert torch.equal(block.unview(blocks, rows, cols), x)


def test_view_of_whole_blocks_copies_nothing() -> None:
    x = torch.randn(32, 64)
    for block in (TENSOR, ROW, Block(1, 16), Block(16, 16)):
        assert block.view(x).data_ptr() == x.data_ptr()
        assert block.view(x.t()).data_ptr() == x.data_ptr()


def test_view_of_a_ragged_matrix_leaves_it_alone() -> None:
    x = torch.randn(3, 5)
    before = x.clone()
    Block(2, 4).view(x).fill_(7)
    assert torch.equal(x, before)

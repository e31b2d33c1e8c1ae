"""Matrices before their cast: copies of what is not contiguous."""

import pytest
import torch

from duotone.dispatch.casts import contiguous


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_is_the_matrix_whatever_its_strides(dtype) -> None:
    """By several elements at once, if columns, rows and start allow it; else, and turned, one by one."""
    x = torch.randn(6, 24).to(dtype).requires_grad_()
    matrices = [x, x[:, 8:16], x[:, 4:20], x[:, 1:9], x[:, 8:15], x[::2, :12], x.t(), x[:, ::2], x.view(16, 9)[:, :8]]
    for matrix in matrices:
        copy = contiguous(matrix)
        assert copy.is_contiguous() and copy.dtype == dtype and torch.equal(copy, matrix)

"""Bit-for-bit comparison of tensors with reference arrays."""

import numpy as np
import reference
import torch
from torch import Tensor

UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def bits_of(array: reference.Array) -> reference.Array:
    """The bits of an array, every NaN of a floating type as one."""
    if array.dtype.kind == "f":
        array = np.where(np.isnan(array), np.array(np.nan, array.dtype), array)
    return np.ascontiguousarray(array).view(UNSIGNED[array.dtype.itemsize])


def raw(tensor: Tensor) -> Tensor:
    """A copy of a tensor's bits, in its own layout."""
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.dtype.itemsize]
    return tensor.detach().view(width).clone()


def assert_same(result: Tensor, want: reference.Array, what: str = "values") -> None:
    """Equal shape and bits; any NaN equals any other."""
    array = result.detach().float().numpy() if result.is_floating_point() else result.numpy()
    want = want.astype(np.float32) if result.is_floating_point() else want
    assert array.dtype == want.dtype, f"{what}: {array.dtype} instead of {want.dtype}"
    assert array.shape == want.shape, f"{what}: shape {array.shape} instead of {want.shape}"
    wrong = np.argwhere(bits_of(array) != bits_of(want))
    if len(wrong):
        at = tuple(wrong[0])
        raise AssertionError(
            f"{what}: {len(wrong)} of {want.size} differ, first {at}: {array[at]!r}, want {want[at]!r}"
        )


def assert_parts(result: dict[str, Tensor], want: reference.Arrays, what: str = "") -> None:
    """The same names, shapes, dtypes and bits."""
    assert set(result) == set(want), f"{what}: parts {sorted(result)} instead of {sorted(want)}"
    for name, array in want.items():
        assert_same(result[name], array, f"{what} {name}")


def assert_equal_parts(result: dict[str, Tensor], want: dict[str, Tensor], what: str = "") -> None:
    assert_parts(result, {name: tensor.numpy() for name, tensor in want.items()}, what)


def tensor_of(x: reference.Array, dtype: str) -> Tensor:
    """fp32 values of a dtype's grid -> a tensor of that dtype."""
    return torch.from_numpy(x.copy()).to(getattr(torch, dtype))

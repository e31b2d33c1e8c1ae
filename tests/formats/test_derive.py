"""The other plane without loss: the exact transpose of codes and scales."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_equal_parts, assert_parts, assert_same, tensor_of
from families import FAMILIES, make
from selection import DERIVABLE, NAMES, NEAREST, SEED, seed_of

from duotone.formats import get


def transposed_parts(name: str, parts: reference.Arrays, cols: int) -> reference.Arrays:
    """Codes and scale grid turned, element by element."""
    of = reference.meaning(name)
    rows = parts["codes"].shape[0]
    codes = reference.unpack(parts["codes"])[:, :cols] if of.element == "e2m1" else parts["codes"]
    out = {"codes": reference.pack(codes.T) if of.element == "e2m1" else codes.T}
    scale = parts["scale"]
    if of.scale == "e4m3":
        scale = np.repeat(scale, 16, axis=1)[:, :cols].T[:, ::16]
        out["amax"] = parts["amax"]
    elif scale.ndim == 2:
        scale = scale.T
    assert out["codes"].shape[0] == cols and rows
    return {**out, "scale": scale}


@pytest.mark.parametrize("name", DERIVABLE)
def test_derive_is_the_exact_transpose(name: str) -> None:
    fmt = get(name)
    for shape in ((32, 48), (130, 258), (17, 34), (1, 2), (37, 16)):
        for family in ("normal", "nans", "steep"):
            x = make(family, shape, "bfloat16")
            row = fmt.encode(tensor_of(x, "bfloat16"), seed=seed_of(name))
            before = {key: part.clone() for key, part in row.items()}
            derived = fmt.derive(row)
            assert derived is not None
            assert_parts(derived, transposed_parts(name, reference.encode(name, x, "bfloat16", seed=SEED), shape[1]))
            assert_equal_parts(row, before)
            values = fmt.decode(row, torch.float32)
            assert_same(fmt.decode(derived, torch.float32)[:, : shape[0]], values.t().numpy())


@pytest.mark.parametrize("name", [name for name in NEAREST if name in DERIVABLE and "4over6" not in name])
def test_derive_equals_the_encoding_of_the_transpose(name: str) -> None:
    """Not of 4-over-6, whose errors add up in the plane's order, nor of stochastic rounding."""
    fmt = get(name)
    for shape in ((32, 48), (130, 258), (17, 34)):
        for family in FAMILIES:
            x = tensor_of(make(family, shape, "bfloat16"), "bfloat16")
            derived = fmt.derive(fmt.encode(x))
            assert derived is not None
            assert_equal_parts(derived, fmt.encode(x.t()), f"{family} {shape}")


@pytest.mark.parametrize("name", DERIVABLE)
def test_derive_of_an_odd_width_begins_with_the_transpose(name: str) -> None:
    """Two codes to a byte hide whether the width was odd: one row of padding may follow."""
    for shape in ((17, 33), (16, 1), (3, 129)):
        x = make("normal", shape, "bfloat16")
        derived = get(name).derive(get(name).encode(tensor_of(x, "bfloat16"), seed=seed_of(name)))
        assert derived is not None
        want = transposed_parts(name, reference.encode(name, x, "bfloat16", seed=SEED), shape[1])
        for key, array in want.items():
            assert_same(derived[key][: len(array)], array, f"{shape} {key}")


@pytest.mark.parametrize("name", DERIVABLE)
def test_derive_twice_is_the_beginning(name: str) -> None:
    fmt = get(name)
    row = fmt.encode(torch.from_numpy(make("normal", (34, 50))), seed=seed_of(name))
    derived = fmt.derive(row)
    assert derived is not None
    again = fmt.derive(derived)
    assert again is not None
    assert_equal_parts(again, row)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in DERIVABLE])
def test_formats_whose_blocks_do_not_turn_derive_nothing(name: str) -> None:
    parts = get(name).encode(torch.ones(32, 32), seed=seed_of(name))
    assert get(name).derive(parts) is None and not get(name).is_derivable

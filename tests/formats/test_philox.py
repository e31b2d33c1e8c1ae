"""The random stream against Random123's published answers and against Philox in Python integers."""

import numpy as np
import pytest
import reference
import torch
from comparison import assert_same
from hypothesis import given, settings
from hypothesis import strategies as st

from duotone.formats import philox

ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
WORDS = st.integers(0, 2**32 - 1)


def block(counter: tuple[int, ...], key: tuple[int, int]) -> tuple[int, ...]:
    a, b, c, d = (torch.tensor([word]) for word in counter)
    low, high = (torch.tensor(word) for word in key)
    return tuple(int(word) for word in philox.philox_4x32((a, b, c, d), (low, high)))


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_known_answers_of_random123(counter: tuple[int, ...], key: tuple[int, int], words: tuple[int, ...]) -> None:
    assert reference.philox(counter, key) == words
    assert block(counter, key) == words


@settings(derandomize=True, deadline=None, max_examples=200)
@given(st.tuples(WORDS, WORDS, WORDS, WORDS), st.tuples(WORDS, WORDS))
def test_every_counter_and_key_gives_the_words_of_integer_arithmetic(
    counter: tuple[int, ...], key: tuple[int, int]
) -> None:
    assert block(counter, key) == reference.philox(counter, key)


def test_many_counters_at_once_give_what_each_gives_alone() -> None:
    words = torch.tensor([ANSWERS[0][0], ANSWERS[1][0], ANSWERS[2][0]]).t()
    key = (torch.tensor(5), torch.tensor(0xFFFFFFFF))
    result = torch.stack(philox.philox_4x32((words[0], words[1], words[2], words[3]), key), 1)
    assert [tuple(row) for row in result.tolist()] == [reference.philox(c, (5, 0xFFFFFFFF)) for c, _, _ in ANSWERS]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**32, 2**63 - 1, -(2**63), 0x299F31D0_A4093822])
@pytest.mark.parametrize("plane", ["row", "col"])
def test_bytes_follow_the_element_order_of_the_plane(seed: int, plane: str) -> None:
    for rows, cols in ((1, 1), (1, 16), (3, 5), (7, 32), (4, 33)):
        result = philox.random_bytes(torch.tensor([seed]), rows, cols, philox.PLANES[plane])
        assert_same(result, reference.random_bytes(seed, rows, cols, plane), f"{rows} x {cols}")


def test_bytes_of_a_known_answer_come_out_low_byte_first() -> None:
    result = philox.random_bytes(torch.tensor([0]), 1, 16, 0).flatten().tolist()
    assert bytes(result) == b"".join(word.to_bytes(4, "little") for word in ANSWERS[0][2])


def test_plane_words_are_0_for_row_and_1_for_col() -> None:
    assert philox.PLANES == {"row": 0, "col": 1}


def test_stream_depends_on_position_alone() -> None:
    """Not on how many elements are drawn nor on how rows divide them."""
    seed = torch.tensor([77])
    long = philox.random_bytes(seed, 1, 480, 1).flatten()
    for rows, cols in ((30, 16), (16, 30), (5, 17), (1, 479)):
        result = philox.random_bytes(seed, rows, cols, 1).flatten()
        assert torch.equal(result, long[: rows * cols])


def test_empty_planes_draw_nothing() -> None:
    for shape in ((0, 16), (16, 0), (0, 0)):
        assert philox.random_bytes(torch.tensor([1]), *shape, 0).shape == shape


def test_bytes_are_uniform_and_planes_and_seeds_uncorrelated() -> None:
    """2^18 bytes each: a chi-square of 255 degrees has deviation 22.6; six of them are allowed."""
    draws = [
        philox.random_bytes(torch.tensor([seed]), 512, 512, plane).flatten().numpy()
        for seed, plane in ((1, 0), (1, 1), (2, 0))
    ]
    expected = draws[0].size / 256
    for draw in draws:
        chi_square = ((np.bincount(draw, minlength=256) - expected) ** 2 / expected).sum()
        assert abs(chi_square - 255) < 6 * 22.6
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert abs(np.corrcoef(draws[i], draws[j])[0, 1]) < 6 / 512

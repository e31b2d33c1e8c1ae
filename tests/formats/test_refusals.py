"""Illegal calls: one line that says what is wrong, and nothing changed."""

from collections.abc import Callable
from typing import Any

import pytest
import reference
import torch
from selection import NAMES, PER_TENSOR_OR_ROW, STOCHASTIC, TWO_LEVEL

from duotone.errors import UserError
from duotone.formats import get

Call = Callable[[Any], Any]
X = torch.ones(16, 32)
ONE = torch.ones(1)
MAKES_ITS_SCALES = [n for n in NAMES if reference.meaning(n).scale in ("e8m0", "e4m3")]
MAKES_ITS_AMAX = [n for n in NAMES if n not in PER_TENSOR_OR_ROW and n not in TWO_LEVEL]
EVERYWHERE: dict[str, Call] = {
    "1-D": lambda fmt: fmt.encode(torch.ones(32), seed=1),
    "3-D": lambda fmt: fmt.encode(torch.ones(2, 16, 32), seed=1),
    "0-D": lambda fmt: fmt.encode(torch.tensor(1.0), seed=1),
    "float64": lambda fmt: fmt.encode(X.double(), seed=1),
    "int64": lambda fmt: fmt.encode(X.long(), seed=1),
    "bool": lambda fmt: fmt.encode(X > 0, seed=1),
    "float8": lambda fmt: fmt.encode(X.to(torch.float8_e4m3fn), seed=1),
    "complex": lambda fmt: fmt.encode(X.to(torch.complex64), seed=1),
    "unknown plane": lambda fmt: fmt.encode(X, seed=1, plane="columnwise"),
}


def assert_refused(call: Call, name: str) -> str:
    before = X.clone()
    with pytest.raises(UserError) as error:
        call(get(name))
    message = str(error.value)
    assert message and "\n" not in message and torch.equal(X, before)
    return message


@pytest.mark.parametrize("what", EVERYWHERE)
@pytest.mark.parametrize("name", NAMES)
def test_an_illegal_input_is_refused_in_one_line(name: str, what: str) -> None:
    assert_refused(EVERYWHERE[what], name)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_stochastic_rounding_without_a_seed_is_refused(name: str) -> None:
    assert "seed" in assert_refused(lambda fmt: fmt.encode(X), name)


@pytest.mark.parametrize("name", MAKES_ITS_SCALES)
def test_a_scale_for_a_format_that_makes_its_own_is_refused(name: str) -> None:
    assert "scale" in assert_refused(lambda fmt: fmt.encode(X, scale=ONE, seed=1), name)


@pytest.mark.parametrize("name", MAKES_ITS_AMAX)
def test_an_amax_for_a_format_of_blocks_is_refused(name: str) -> None:
    assert "amax" in assert_refused(lambda fmt: fmt.encode(X, amax=ONE, seed=1), name)


@pytest.mark.parametrize("name", NAMES)
def test_scale_and_amax_together_are_refused(name: str) -> None:
    assert_refused(lambda fmt: fmt.encode(X, scale=ONE, amax=ONE, seed=1), name)

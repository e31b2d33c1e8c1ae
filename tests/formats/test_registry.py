"""Formats by name: the rows that ship, and what a new row needs."""

from collections.abc import Iterator

import pytest
import reference
import torch
from comparison import assert_parts, assert_same
from families import make

from duotone import formats
from duotone.errors import UserError
from duotone.formats import Epilogue, registry
from duotone.formats.elements import E2M1, E3M2, E4M3, E5M2, Element
from duotone.formats.format import Format
from duotone.formats.geometry import Block
from duotone.formats.scaled_format import ScaledFormat
from duotone.formats.scales import E8M0Scale, Fp32Scale, TwoLevelScale


@pytest.fixture
def rows() -> Iterator[None]:
    """Rows that a test adds are gone after it."""
    before = dict(registry._FORMATS)
    yield
    registry._FORMATS.clear()
    registry._FORMATS.update(before)


def test_names_in_graphs_tell_formats_of_one_name_apart() -> None:
    """torch keeps graphs on disk, and a user may change a format between two runs."""
    node_names = []
    for element in (E4M3, E5M2, E4M3):
        fmt = ScaledFormat("registry_in_graphs", element, Block(1, 32), E8M0Scale())
        node_names.append(registry._marked(fmt).node_name)
    assert node_names[0] == node_names[2] != node_names[1]

    class OfUser(ScaledFormat):
        """Of a user, who may change its code."""

    assert registry._marked(OfUser("registry_own", E4M3, Block(1, 32), E8M0Scale())).node_name == ""


def test_every_name_of_the_specification_is_registered() -> None:
    assert set(reference.names()) | {"identity"} <= set(formats.names())
    assert len(formats.names()) == len(set(formats.names()))


@pytest.mark.parametrize("name", formats.names())
def test_a_name_gives_the_format_of_that_name_every_time(name: str) -> None:
    fmt = formats.get(name)
    assert fmt.name == name and formats.get(name) is fmt
    assert hash(fmt) == hash(formats.get(name))


@pytest.mark.parametrize("name", reference.names())
def test_fields_of_a_row_are_those_that_its_name_says(name: str) -> None:
    fmt, of = formats.get(name), reference.meaning(name)
    assert isinstance(fmt, ScaledFormat)
    assert fmt.element.name == of.element and fmt.precision == reference.BITS[of.element]
    assert (fmt.block.rows, fmt.block.cols) == (of.rows, of.cols)
    assert (fmt.hadamard, fmt.is_stochastic) == (of.hadamard, of.stochastic)
    assert fmt.transform == ("hadamard16:d7e8" if of.hadamard else "")
    assert fmt.is_derivable == reference.is_transposable(name)
    exact_inside = of.scale in ("pow2", "e8m0")
    epilogue = {(0, 0): Epilogue.TENSOR, (1, 0): Epilogue.ROW}.get((of.rows, of.cols), Epilogue.BLOCK)
    if of.scale == "e4m3":
        epilogue = Epilogue.ROW if of.per_row else Epilogue.TENSOR
    assert fmt.epilogue is (Epilogue.NONE if exact_inside else epilogue)


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [("mxfp8", "mxfp8_e"), ("nvfp4_16x6", "nvfp4_16x16"), ("fp8_e4m3_tensr", "fp8_e4m3_tensor")],
)
def test_an_unknown_name_is_one_line_with_the_nearest_names(wrong: str, hint: str) -> None:
    with pytest.raises(UserError) as error:
        formats.get(wrong)
    message = str(error.value)
    assert repr(wrong) in message and hint in message and "duotone formats" in message and "\n" not in message


@pytest.mark.parametrize("wrong", ["", "zzzz", "NVFP4 "])
def test_an_unknown_name_without_neighbours_is_one_line(wrong: str) -> None:
    with pytest.raises(UserError, match="unknown") as error:
        formats.get(wrong)
    assert "\n" not in str(error.value)


def test_a_name_is_never_given_twice() -> None:
    """Not that of a floor either, once `get` has given it."""
    before, floored = formats.names(), formats.get("fp8_e4m3_1x128_eps0.25").name
    for name in ("mxfp4", floored):
        with pytest.raises(UserError, match="registered already") as error:
            formats.register(ScaledFormat(name, E4M3, Block(1, 8), E8M0Scale()))
        assert "\n" not in str(error.value)
    assert formats.names() == before and isinstance(formats.get("mxfp4"), ScaledFormat)
    assert formats.get("mxfp4").describe()["element"] == "e2m1"


def test_names_are_a_copy() -> None:
    formats.names().clear()
    assert "nvfp4" in formats.names()


Meaning = reference.Meaning
NEW_ROWS: list[tuple[Format, reference.Meaning]] = [
    (ScaledFormat("a_1x64", E4M3, Block(1, 64), E8M0Scale()), Meaning("e4m3", 1, 64, "e8m0")),
    (ScaledFormat("a_8x8", E3M2, Block(8, 8), E8M0Scale()), Meaning("e3m2", 8, 8, "e8m0")),
    (ScaledFormat("a_2x24", E2M1, Block(2, 24), Fp32Scale()), Meaning("e2m1", 2, 24, "fp32")),
    (
        ScaledFormat("a_rotated", E2M1, Block(1, 32), E8M0Scale(), True, True),
        Meaning("e2m1", 1, 32, "e8m0", hadamard=True, stochastic=True),
    ),
    (
        ScaledFormat("a_row_square", E2M1, Block(1, 16), TwoLevelScale(256.0, True), False, True),
        Meaning("e2m1", 1, 16, "e4m3", stochastic=True, per_row=True, block_max=256.0),
    ),
]


@pytest.mark.parametrize(("row", "of"), NEW_ROWS, ids=lambda value: getattr(value, "name", ""))
@pytest.mark.usefixtures("rows")
def test_a_new_row_works_with_no_other_edit(row: Format, of: reference.Meaning) -> None:
    formats.register(row)
    assert row.name in formats.names()
    fmt = formats.get(row.name)
    for family in ("normal", "nans", "spread", "boundary"):
        x = make(family, (19, 70), "float32", of.element)
        parts = fmt.encode(torch.from_numpy(x), seed=11)
        want = reference.encode(of, x, seed=11)
        assert_parts(parts, want, family)
        assert_same(fmt.decode(parts, torch.float32), reference.decode_fp32(of, want), family)
        assert {name: spec.shape for name, spec in fmt.parts(19, 70).items()} == {
            name: tuple(part.shape) for name, part in parts.items()
        }


@pytest.mark.usefixtures("rows")
def test_a_new_element_works_with_no_other_edit() -> None:
    """E1M2: 0 to 1.75 in quarters."""
    element = Element("e1m2", 1, 2, 1, 1.75, 7)
    fmt = formats.register(ScaledFormat("a_e1m2", element, Block(1, 16), E8M0Scale()))
    x = torch.arange(-7, 8).float()[None] / 4
    parts = fmt.encode(x)
    assert parts["scale"].tolist() == [[127]]
    assert torch.equal(fmt.decode(parts, torch.float32)[:, :15], x)


@pytest.mark.parametrize("row", [row for row, _ in NEW_ROWS], ids=lambda row: row.name)
def test_rows_of_one_test_are_gone_in_the_next(row: Format) -> None:
    assert row.name not in formats.names()

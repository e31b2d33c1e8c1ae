import click
import pytest

from duotone_lab.cli.command_options import ListCommand, ListOption, spread


@pytest.fixture
def parse():
    """`parse(*arguments)` gives what a command with two lists and a number reads."""
    options = [ListOption(["--recipes"]), ListOption(["--data"]), click.Option(["--steps"], type=int)]

    def call(*arguments):
        command = ListCommand("compare", params=options, callback=lambda **values: values)
        return command.main(list(arguments), standalone_mode=False)

    return call


@pytest.mark.parametrize(
    "arguments",
    [
        ["--recipes", "a", "b", "c"],
        ["--recipes", "a,b,c"],
        ["--recipes", "a", "--recipes", "b", "--recipes", "c"],
        ["--recipes", "a,b", "c"],
        ["--recipes=a", "b", "c"],
        ["--recipes=a,b", "--recipes", "c"],
        ["--recipes", "a, b", ",c"],
    ],
)
def test_a_list_may_be_written_in_every_usual_way(parse, arguments):
    for before, after in (([], ["--steps", "3"]), (["--steps", "3"], [])):
        assert parse(*before, *arguments, *after) == {"recipes": ("a", "b", "c"), "data": (), "steps": 3}


def test_lists_end_at_the_next_option(parse):
    result = parse("--data", "x", "y", "--recipes", "a", "b", "--data", "z")
    assert result == {"recipes": ("a", "b"), "data": ("x", "y", "z"), "steps": None}


def test_an_existing_path_with_a_comma_stays_whole(parse, tmp_path):
    path = tmp_path / "a,b.txt"
    path.touch()
    assert parse("--data", str(path), "c,d")["data"] == (str(path), "c", "d")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--recipes"], "requires an argument"),
        (["--recipes", "--steps", "3"], "unexpected extra argument"),
        (["--recipes", ","], "give at least one value"),
        (["--steps", "3", "a"], "unexpected extra argument"),
        (["a", "--recipes", "b"], "unexpected extra argument"),
    ],
)
def test_values_are_never_lost_or_taken_from_elsewhere(parse, arguments, message):
    with pytest.raises(click.UsageError, match=message):
        parse(*arguments)


def test_other_options_keep_their_one_value():
    assert spread(["--out", "x", "y"], {"--recipes"}) == ["--out", "x", "y"]
    assert spread(["--recipes", "a", "-"], {"--recipes"}) == ["--recipes", "a", "--recipes", "-"]

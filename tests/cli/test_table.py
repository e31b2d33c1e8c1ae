import sys

from duotone_lab.cli.table import print_table


def test_elsewhere_than_on_a_terminal_it_is_aligned_plain_text(capsys):
    print_table(("name", "loss"), [["a", "2.5"], ["long", "10.25"]], title="Runs")
    assert capsys.readouterr().out == "Runs\nname   loss\na       2.5\nlong  10.25\n"


def test_on_a_terminal_it_is_drawn_and_text_is_not_markup(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_table(("name", "loss"), [["[red]", "2.5"]])
    out = capsys.readouterr().out
    assert "[red]" in out and "2.5" in out and "─" in out

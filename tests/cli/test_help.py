"""The help of every command, compared with help.txt. `python tests/cli/test_help.py` writes that file anew."""

from pathlib import Path

from click.testing import CliRunner

from duotone_lab.cli.main import cli

RECORD = Path(__file__).parent / "help.txt"
COMMANDS = (
    *("", "compare", "train", "export", "report", "advise", "search", "plan", "formats", "recipes", "bench", "migrate"),
    *(f"bench {subject}" for subject in ("linear", "mlp", "grouped", "attention", "cast", "host", "train")),
)


def help_of(command: str) -> str:
    """The command as it is typed, and its help at 100 columns."""
    line = [*command.split(), "--help"]
    result = CliRunner().invoke(cli, line, prog_name="duotone", terminal_width=100, max_content_width=100)
    assert result.exit_code == 0, result.output
    return f"$ duotone {' '.join(line)}\n{result.output}"


def whole() -> str:
    return "\n".join(map(help_of, COMMANDS))


def test_the_help_is_the_recorded_one():
    assert whole() == RECORD.read_text(), "if the change is meant: python tests/cli/test_help.py"


def test_every_command_is_in_the_record():
    assert {name.split()[0] for name in COMMANDS if name} == set(cli.commands)


if __name__ == "__main__":
    RECORD.write_text(whole())

import subprocess
import sys

import pytest

import duotone as library
from duotone_lab.cli import main


def test_the_version_and_the_help(duotone):
    assert duotone("--version") == (0, f"duotone {library.__version__}\n", "")
    code, out, err = duotone()
    assert (code, err) == (0, "")
    assert all(name in out for name in ("compare", "train", "plan", "formats", "recipes"))
    assert duotone("--help")[1] == out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["comparee"], "No such command"),
        (["compare", "--stepz", "3"], "No such option"),
        (["compare", "--steps", "none"], "'none' is not a valid integer"),
        (["compare", "--steps", "0"], "0 is not in the range"),
        (["compare", "--seed", "-1"], "-1 is not in the range"),
        (["compare", "more"], "unexpected extra argument"),
        (["train", "--recipe"], "requires an argument"),
    ],
)
def test_wrong_usage_is_one_line_that_names_the_help(refused, arguments, message):
    line = refused(*arguments)
    assert message in line and line.endswith(" --help.\n")


def test_a_message_of_several_lines_becomes_one(refused, monkeypatch):
    def fail(*_, **__):
        raise library.UserError("first\nsecond")

    monkeypatch.setattr(main.cli, "main", fail)
    assert refused() == "duotone: first second\n"


def test_ctrl_c_outside_a_run_ends_with_130(duotone, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(main.cli, "main", interrupt)
    assert duotone() == (130, "", "")


@pytest.mark.rest
def test_the_installed_command_needs_no_display_code_to_help():
    code = """
import sys
from duotone_lab.cli.main import run
assert run(["compare", "--help"]) == 0
absent = {"rich", "jinja2", "safetensors", "numpy.random", "duotone_lab.report", "torch._inductor"}
print(sorted(absent & set(sys.modules)))
"""
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.splitlines()[-1] == "[]"


@pytest.mark.rest
def test_without_its_packages_the_command_says_what_to_install():
    code = "import sys; sys.modules['click'] = None; sys.argv = ['duotone', 'formats']; " + (
        "from duotone.__main__ import main; main()"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr == (
        "duotone: the command line needs click: pip install click jinja2 mpmath numpy rich safetensors\n"
    )


LONG = "a" * 256


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--out", LONG],
        ["train", "--out", f"absent/{LONG}", "--preset", "tiny", "--steps", "1"],
        ["train", "--resume", "--out", LONG],
        ["compare", "--out", LONG],
        ["bench", "cast", "--out", LONG, "--shape", "8x8", "--recipe", "mxfp8"],
        ["bench", "cast", "--out", f"{LONG}/file", "--shape", "8x8", "--recipe", "mxfp8"],
        ["train", "--data", LONG],
        ["train", "--recipe", f"{LONG}.toml"],
        ["recipes", LONG],
        ["plan", "--model", f"hf:{LONG}"],
    ],
)
def test_a_name_that_no_file_can_have_is_one_line(refused, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    refused(*arguments)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_history_that_no_memory_holds_is_one_line(refused, tmp_path):
    path = tmp_path / "long.toml"
    path.write_text("recipe = 'fp8-delayed'\namax_history_len = 1000000000000")
    for command in ("plan", "train"):
        assert "amax_history_len is 1000000000000; it must be an integer" in refused(command, "--recipe", path)


@pytest.mark.rest
def test_a_warning_is_one_line_and_a_closed_pipe_no_traceback(tmp_path):
    path = tmp_path / "nowhere.toml"
    path.write_text('base = "mxfp8"\n[[rules]]\nmodule = "absent"\nformat = "nvfp4"\n')
    command = f"{sys.executable} -m duotone plan --preset tiny --recipe '{path}' | head -1"
    process = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    text = process.stderr
    assert process.stdout.startswith("nowhere on cpu") and process.stdout.count("\n") == 1
    assert text.startswith("duotone: warning: ") and text.count("\n") == 1 and ".py" not in text

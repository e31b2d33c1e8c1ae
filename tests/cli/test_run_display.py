import io
import time

from rich.console import Console

from duotone_lab.cli.run_display import LiveProgress, Meter, PlainProgress, clock


def test_plain_lines_go_on_while_nothing_happens(capsys):
    heard = ""

    def wait_for(text, times=1):
        """However long a busy machine takes to print it."""
        nonlocal heard
        while heard.count(text) < times:
            time.sleep(0.001)
            heard += capsys.readouterr().err

    with PlainProgress(interval=0.02) as progress:
        progress.begin("mxfp8", steps=4, completed=0, tokens_per_step=128, model="gpt")
        progress.note("first step: compiling casts")
        wait_for("mxfp8: first step: compiling casts (", 2)
        for number in (1, 2, 3, 4):
            progress.step(number, 5.0 - number)
            wait_for(f"mxfp8: step {number}/4, loss {5 - number}.0000")
        progress.end()
        wait_for("mxfp8: step 4/4, loss 1.0000", 2)
        time.sleep(0.1)
        heard += capsys.readouterr().err
        time.sleep(0.1)
        assert capsys.readouterr().err == ""
    lines = heard.splitlines()
    assert lines[0] == "mxfp8: 4 steps of 128 tokens, gpt" and "mxfp8: first step: compiling casts" in lines
    assert lines[-1].startswith("mxfp8: step 4/4, loss 1.0000, ") and "tokens/s" in lines[-1]


def test_a_resumed_run_says_where_it_goes_on(capsys):
    with PlainProgress() as progress:
        progress.begin("mxfp8", steps=4, completed=2, tokens_per_step=128, model="gpt")
    assert capsys.readouterr().err == "mxfp8: 4 steps of 128 tokens, gpt, from step 2\n"


def test_speed_leaves_out_the_first_step(monkeypatch):
    clock = iter([0.0, 20.0, 21.0, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(clock))
    meter = Meter("mxfp8", 10, 0, 2048)
    meter.step(1, 5.0)
    meter.step(3, 4.0)
    assert meter.speed == "4,096 tokens/s" and meter.remaining == "ETA 0:04"


def test_the_live_display_shows_step_loss_speed_and_remaining_time():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with LiveProgress(console) as progress:
        progress.begin("nvfp4 [a]", steps=4, completed=0, tokens_per_step=128, model="gpt")
        progress.note("first step: compiling casts")
        progress.step(1, 5.5)
        progress.step(2, 5.25)
        progress.note("cannot save [b]")
        progress.end()
    screen = stream.getvalue()
    assert "nvfp4 [a], gpt" in screen and "2/4" in screen and "loss 5.2500" in screen
    assert "tokens/s" in screen and "ETA" in screen and "cannot save [b]" in screen


def test_a_clock_reads_minutes_or_hours():
    assert [clock(value) for value in (0.4, 61, 3661)] == ["0:00", "1:01", "1:01:01"]

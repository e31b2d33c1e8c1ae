import io
import time

from rich.console import Console

from duotone.cli.run_display import LiveProgress, Meter, PlainProgress, clock


def test_plain_lines_go_on_while_nothing_happens(capsys):
    with PlainProgress(interval=0.02) as progress:
        progress.begin("mxfp8", steps=4, done=0, tokens_per_step=128, model="gpt")
        progress.note("first step: compiling casts")
        time.sleep(0.15)
        for number in (1, 2, 3, 4):
            progress.step(number, 5.0 - number)
            time.sleep(0.03)
        progress.end()
        time.sleep(0.1)
        before = capsys.readouterr().err
        time.sleep(0.1)
        assert capsys.readouterr().err == ""
    lines = before.splitlines()
    assert lines[:2] == ["mxfp8: 4 steps of 128 tokens, gpt", "mxfp8: first step: compiling casts"]
    assert lines.count("mxfp8: first step: compiling casts (0:00)") >= 2
    assert any(line.startswith("mxfp8: step 2/4, loss 3.0000") for line in lines)
    assert lines[-1].startswith("mxfp8: step 4/4, loss 1.0000, ") and "tokens/s" in lines[-1]


def test_a_resumed_run_says_where_it_goes_on(capsys):
    with PlainProgress() as progress:
        progress.begin("mxfp8", steps=4, done=2, tokens_per_step=128, model="gpt")
    assert capsys.readouterr().err == "mxfp8: 4 steps of 128 tokens, gpt, from step 2\n"


def test_speed_leaves_out_the_first_step(monkeypatch):
    now = iter([0.0, 20.0, 21.0, 21.0])
    monkeypatch.setattr(time, "monotonic", lambda: next(now))
    meter = Meter("mxfp8", 10, 0, 2048)
    meter.step(1, 5.0)
    meter.step(3, 4.0)
    assert meter.speed == "4,096 tokens/s" and meter.remaining == "ETA 0:04"


def test_the_live_display_shows_step_loss_speed_and_remaining_time():
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=True, width=120)
    with LiveProgress(console) as progress:
        progress.begin("nvfp4 [a]", steps=4, done=0, tokens_per_step=128, model="gpt")
        progress.note("first step: compiling casts")
        progress.step(1, 5.5)
        progress.step(2, 5.25)
        progress.note("cannot save [b]")
        progress.end()
    shown = stream.getvalue()
    assert "nvfp4 [a], gpt" in shown and "2/4" in shown and "loss 5.2500" in shown
    assert "tokens/s" in shown and "ETA" in shown and "cannot save [b]" in shown


def test_a_clock_reads_minutes_or_hours():
    assert [clock(value) for value in (0.4, 61, 3661)] == ["0:00", "1:01", "1:01:01"]

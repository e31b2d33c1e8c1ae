import os
import pty
import signal
import subprocess
import sys

import pytest

from duotone_lab.cli.interrupt import Interrupt


def test_the_first_signal_asks_and_the_second_interrupts(capfd):
    before = signal.getsignal(signal.SIGINT)
    with Interrupt() as interrupt:
        assert not interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupt()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert capfd.readouterr().err == "stopping after this step; Ctrl-C again stops at once\n"


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_other_signals_ask_however_often_they_come_and_ctrl_c_still_stops_at_once(capfd, name):
    """A hang-up comes from the kernel and from the shell."""
    number = getattr(signal, name)
    before = signal.getsignal(number)
    with Interrupt("turn") as interrupt:
        os.kill(os.getpid(), number)
        os.kill(os.getpid(), number)
        assert interrupt() and interrupt.exit_code == 128 + number
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(number) is before
    assert capfd.readouterr().err == "stopping after this turn; Ctrl-C again stops at once\n"


def test_a_signal_that_was_ignored_stays_so():
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt() as interrupt:
            os.kill(os.getpid(), signal.SIGHUP)
            assert not interrupt()
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


HUNG_UP = """
import fcntl, sys, termios, time
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from duotone_lab.cli.interrupt import Interrupt
with Interrupt() as interrupt:
    print("ready", flush=True)
    while not interrupt():
        time.sleep(0.01)
    for stream in (sys.stdout, sys.stderr):
        print("a line of progress", file=stream, flush=True)
    open(sys.argv[1], "w").write(str(interrupt.exit_code))
"""


def test_a_terminal_that_hangs_up_takes_no_output_and_raises_nothing(tmp_path):
    master, terminal = pty.openpty()
    command = [sys.executable, "-c", HUNG_UP, tmp_path / "saved"]
    process = subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True)
    os.close(terminal)
    heard = b""
    while b"ready" not in heard:
        heard += os.read(master, 100)
    os.close(master)
    process.wait(timeout=120)
    assert (tmp_path / "saved").read_text() == "129"

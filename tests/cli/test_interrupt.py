import os
import signal

import pytest

from duotone.cli.interrupt import Interrupt


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

"""Lines that runs add to a file."""

import os
import resource
import signal
from pathlib import Path

import pytest

from bench.timing.appending import append_lines


def test_lines_are_added_whole_or_not_at_all(tmp_path):
    path = tmp_path / "records.jsonl"
    append_lines(path, '{"a": 1}\n')
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (12, before[1]))
        with pytest.raises(OSError, match="File too large"):
            append_lines(path, '{"b": 2}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    assert path.read_text() == '{"a": 1}\n'
    append_lines(path, "")
    path.write_text('{"a": 1}\n{"half')
    append_lines(path, '{"b": 2}\n')
    assert path.read_text() == '{"a": 1}\n{"half\n{"b": 2}\n'


def test_lines_go_to_a_pipe_too(tmp_path):
    reader, writer = os.pipe()
    append_lines(Path(f"/proc/self/fd/{writer}"), "a line\n")
    assert os.read(reader, 100) == b"a line\n"
    os.close(reader), os.close(writer)

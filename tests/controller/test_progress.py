"""The bar is for terminals only."""

import io
import os
import termios
import threading

import pytest

from vrl.controller.progress import stage, write_line


def test_a_file_sees_no_bar():
    stream = io.StringIO()
    with stage("warm start", 3, stream) as progress:
        progress.advance(2, "loss 1.0")
    assert stream.getvalue() == ""


def test_a_terminal_sees_title_count_and_note_and_then_nothing():
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    seen = bytearray()

    def read_all() -> None:
        try:
            while data := os.read(ours, 4096):
                seen.extend(data)
        except OSError:  # the other end is closed
            return

    reader = threading.Thread(target=read_all)
    reader.start()
    with os.fdopen(theirs, "w") as terminal:
        with stage("warm start", 3, terminal) as progress:
            progress.advance(3, "loss 0.5")
            progress._bar.refresh()
            write_line("a line", terminal)
        terminal.flush()
    reader.join(10)
    os.close(ours)
    text = seen.decode()
    assert "warm start" in text
    assert "3/3" in text
    assert "loss 0.5" in text
    assert "a line\r\n" in text
    assert text.rsplit("\r", 1)[-1].strip() == ""  # the bar is wiped out


def test_a_failing_stage_ends_its_bar():
    stream = io.StringIO()
    with pytest.raises(ZeroDivisionError), stage("gen", None, stream):
        1 / 0  # noqa: B018 - raises
    assert stream.getvalue() == ""

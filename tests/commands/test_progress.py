"""Progress on a terminal: from the first second, without a long silence, and nothing of it stays."""

from __future__ import annotations

import io
import os
import pty
import re
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from meshwright.commands import terminal as shown_by
from meshwright.commands.terminal import ProgressLine
from tests.places import ROOT

CLEAR = b"\r\x1b[K"
DRAWN = re.compile(rb"\r\x1b\[K +([\d.]+) s  ([^\r\x1b]+)")
TARGET = ["--tokens-per-s", 100_000, "--no-cache"]
SMALL = ["llama-3-8b", "--cluster", "dgx-h100", "--gpus", "16", "--global-batch", "32"]


@pytest.fixture
def looks_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the usual waits."""
    monkeypatch.setattr(shown_by, "FIRST_LOOK_S", shown_by.FIRST_LOOK_S / 5)
    monkeypatch.setattr(shown_by, "NEXT_LOOK_S", shown_by.NEXT_LOOK_S / 5)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], bytes]]:
    """Standard error is a terminal; gives what was written to it so far."""
    ours, theirs = pty.openpty()
    screen = io.TextIOWrapper(os.fdopen(theirs, "wb", buffering=0), write_through=True)
    # The tests' own capture takes `sys.stderr` back.
    monkeypatch.setattr(shown_by, "sys", SimpleNamespace(stderr=screen))

    def written() -> bytes:
        # The kernel hands on what was written a little later, in pieces.
        pieces = []
        while select.select([ours], [], [], 0.2)[0]:
            pieces.append(os.read(ours, 1 << 20))
        return b"".join(pieces)

    yield written
    screen.close()
    os.close(ours)


@pytest.mark.usefixtures("looks_soon")
def test_the_line_moves_on_while_nothing_is_said(terminal: Callable[[], bytes]) -> None:
    with ProgressLine("placing ranks"):
        time.sleep(0.4)
    drawn = DRAWN.findall(terminal())
    assert {words for _, words in drawn} == {b"placing ranks"}
    times_s = [float(shown) for shown, _ in drawn]
    assert times_s[0] < 1.0
    assert len(times_s) >= 3
    assert times_s == sorted(times_s)


@pytest.mark.usefixtures("looks_soon")
def test_what_is_said_last_stays_until_the_end_and_then_goes(terminal: Callable[[], bytes]) -> None:
    with ProgressLine() as progress:
        progress("first\nanswer")
        time.sleep(0.3)
        progress("second answer")
        time.sleep(0.3)
    screen = terminal()
    words = [words for _, words in DRAWN.findall(screen)]
    assert words[0] == b"first answer"
    assert words[-1] == b"second answer"
    assert screen.endswith(CLEAR)
    assert terminal() == b""


def test_what_is_done_at_once_shows_nothing(terminal: Callable[[], bytes]) -> None:
    with ProgressLine("placing ranks"):
        pass
    assert not DRAWN.findall(terminal())


@pytest.mark.usefixtures("looks_soon")
def test_an_error_removes_the_line_too(terminal: Callable[[], bytes]) -> None:
    def fails() -> None:
        with ProgressLine("placing ranks"):
            time.sleep(0.3)
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fails()
    screen = terminal()
    assert DRAWN.findall(screen)
    assert screen.endswith(CLEAR)


@pytest.mark.usefixtures("looks_soon")
def test_where_there_is_no_terminal_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    with ProgressLine("placing ranks") as progress:
        progress("an answer")
        time.sleep(0.3)
    assert capfd.readouterr().err == ""


def on_a_terminal(*words: object) -> tuple[float, float, float, bytes]:
    """Seconds of a command, until it wrote anything, of its longest silence after that; and what it wrote."""
    began = last_s = time.monotonic()
    child, screen = pty.fork()
    if child == 0:
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "cli.py", *map(str, words)])
    first_s, silence_s, text = 0.0, 0.0, b""
    while True:
        select.select([screen], [], [], 120)
        try:
            piece = os.read(screen, 1 << 16)
        except OSError:
            break
        now = time.monotonic()
        if not text:
            first_s = now - began
        else:
            silence_s = max(silence_s, now - last_s)
        last_s, text = now, text + piece
        if not piece:
            break
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0, text[-2000:]
    os.close(screen)
    return time.monotonic() - began, first_s, silence_s, text


@pytest.mark.soak
def test_commands_that_take_their_time_say_so_all_along(tmp_path: Path) -> None:
    """Beside what a command takes to start at all, as other work may share the processor."""
    start_s = max(on_a_terminal("--version")[0] for _ in range(2))
    run, question = tmp_path / "run", [*SMALL, "--seq-len", 8192]
    commands = [
        ["plan", *question, "-o", run],
        ["plan", *question, "--sweep", "gpus=8:16:x2"],
        ["explain", run, "--best"],
        ["report", run, "--sweep", "gpus=8:16:x2", "-o", tmp_path / "page.html"],
        ["recommend", SMALL[0], *SMALL[1:], "--seq-len", 8192, *TARGET],
    ]
    for words in commands:
        took_s, first_s, silence_s, text = on_a_terminal(*words)
        if took_s > 2:
            assert first_s < 2 * start_s + 1.0, words
            assert silence_s < 2 * start_s + 1.0, words
            assert DRAWN.search(text), words
        # What is left on the screen is the answer alone.
        said = {progress for _, progress in DRAWN.findall(text)}
        lines = [line.split(CLEAR)[-1] for line in text.split(b"\r\n")]
        assert not any(progress in line for line in lines for progress in said), lines

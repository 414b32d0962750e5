"""A terminal sees that something takes its time, and afterwards nothing of it; a file sees none."""

from __future__ import annotations

import io
import sys
import time

import pytest

from forerun.launch.views import progress
from forerun.launch.views.progress import Bar, waiting


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """Return each line as a terminal shows it: text after a return overwrites the line."""
        lines = []
        for line in self.getvalue().split("\n"):
            shown = ""
            for text in line.split("\r"):
                shown = text + shown[len(text) :]
            lines.append(shown.rstrip())
        return lines


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_EVERY_S", 0.01)


def streams(monkeypatch: pytest.MonkeyPatch, err: io.StringIO) -> io.StringIO:
    out = io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    return out


def until(seen: Terminal, text: str) -> None:
    while text not in seen.getvalue():
        time.sleep(0.005)


def test_seconds_are_shown_until_the_first_word(
    quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    err = Terminal()
    out = streams(monkeypatch, err)
    with waiting("forerun plan"):
        until(err, "forerun plan: 0 s")
        print("the answer")
        shown = err.getvalue()
        time.sleep(0.05)
        assert err.getvalue() == shown
        print("a note", file=sys.stderr)
    assert (sys.stdout, sys.stderr) == (out, err)
    assert out.getvalue() == "the answer\n"
    assert err.screen() == ["a note", ""] and "\x1b" not in err.getvalue()


def test_an_error_leaves_no_clock(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    out = streams(monkeypatch, err)
    with pytest.raises(ValueError, match="wrong"), waiting("x"):
        until(err, "x: 0 s")
        raise ValueError("wrong")
    assert (sys.stdout, sys.stderr) == (out, err) and err.screen() == [""]


def test_a_file_sees_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    err = io.StringIO()
    streams(monkeypatch, err)
    bar = Bar()
    with waiting("forerun plan"):
        time.sleep(0.05)
        bar.update("search", 0.5)
        bar.end()
    assert err.getvalue() == ""


def test_a_share_is_shown_and_leaves_nothing(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    err = Terminal()
    streams(monkeypatch, err)
    bar = Bar()
    time.sleep(0.02)
    for frac in (0.25, 0.5):
        bar.update("search", frac)
    bar.end()
    assert "search: 50 %" in err.getvalue() and "\x1b" not in err.getvalue()
    assert err.screen() == [""]

"""Ctrl-C during a search: the first asks for the best so far, the second ends the verb."""

from __future__ import annotations

import signal

import pytest

from forerun.launch.views.progress import search_effort


def test_the_first_ctrl_c_stops_the_search_and_the_second_the_verb(
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = signal.getsignal(signal.SIGINT)
    with search_effort(3) as effort:
        assert effort.top == 3 and not effort.is_stopped()
        signal.raise_signal(signal.SIGINT)
        assert effort.is_stopped() and "best so far" in capsys.readouterr().err
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before

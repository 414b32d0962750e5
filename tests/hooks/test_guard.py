"""Faults stay inside, are said once, and take the hooks off at the third."""

from __future__ import annotations

import logging

import pytest

from forerun.hooks.guard import Guard


def fail(text: str) -> None:
    raise ValueError(text)


def test_a_fault_is_counted_and_the_call_returns_none() -> None:
    guard = Guard()
    assert guard.protect(fail)("x") is None
    assert guard.num_faults == 1 and not guard.is_tripped


def test_a_result_passes_through() -> None:
    assert Guard().protect(lambda a, *, b: a + b)(1, b=2) == 3


def test_only_the_first_fault_is_logged_with_file_and_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    guard = Guard()
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            guard.protect(fail)("broken thing")
    assert len(caplog.records) == 1
    line = fail.__code__.co_firstlineno + 1
    assert f"test_guard.py:{line} ValueError: broken thing" in caplog.text


def test_the_third_fault_removes_hooks_once() -> None:
    trips: list[int] = []
    guard = Guard(lambda: trips.append(1))
    for _ in range(5):
        guard.protect(fail)("x")
    assert trips == [1] and guard.is_tripped and guard.num_faults == 5


def test_a_fault_of_the_removal_stays_inside() -> None:
    guard = Guard(lambda: fail("removal"))
    for _ in range(3):
        guard.protect(fail)("x")
    assert guard.is_tripped


def test_what_ends_a_process_is_not_swallowed() -> None:
    def leave() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit):
        Guard().protect(leave)()

"""Faults stay inside, are said once, and take the hooks off at the third."""

from __future__ import annotations

import logging
import threading
import warnings

import pytest

from forerun.hooks.process.guard import THREAD_NAME_PREFIX, Guard


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


@pytest.mark.parametrize(
    ("name", "num_steps_spoilt"), [("autograd", 1), (f"{THREAD_NAME_PREFIX}writer", 0)]
)
def test_a_fault_of_our_own_threads_spoils_no_step(name: str, num_steps_spoilt: int) -> None:
    guard = Guard()
    thread = threading.Thread(target=guard.protect(fail), args=("x",), name=name)
    thread.start()
    thread.join()
    assert (guard.num_faults, guard.num_training_faults) == (1, num_steps_spoilt)


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


class BrokenHandler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        raise OSError("log server is gone")


def test_a_log_handler_that_fails_stays_inside() -> None:
    handler, log = BrokenHandler(), logging.getLogger("forerun.hooks.process.guard")
    log.addHandler(handler)
    try:
        guard = Guard()
        for _ in range(3):
            assert guard.protect(fail)("x") is None
    finally:
        log.removeHandler(handler)
    assert guard.num_faults == 3 and guard.is_tripped


def test_an_error_without_words_stays_inside() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    def raise_mute() -> None:
        raise Mute

    guard = Guard()
    for _ in range(3):
        assert guard.protect(raise_mute)() is None
    assert guard.is_tripped


def test_a_log_record_holds_no_frame_of_the_fault(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        Guard().protect(fail)("x")
    assert not any(isinstance(value, BaseException) for value in caplog.records[0].args)
    assert caplog.records[0].exc_info is None


def test_where_the_stack_ends_in_a_hook_nothing_reaches_training() -> None:
    """At every depth at which training itself still has room for a call and the guard's own."""
    guard = Guard()

    def deep(depth: int) -> int:
        return depth and deep(depth - 1)

    def hook() -> int:
        return deep(50)

    protected = guard.protect(hook)

    def train(depth: int) -> int:
        try:
            deep(3)
        except RecursionError:
            return depth
        protected()
        return train(depth + 1)

    assert train(0) > 100 and guard.num_faults > 0


def test_warnings_as_errors_are_faults_like_others() -> None:
    def warn() -> None:
        warnings.warn("old name", DeprecationWarning, stacklevel=1)

    guard = Guard()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guard.protect(warn)() is None
    assert guard.num_faults == 1


def test_another_thread_leaves_the_removal_to_the_one_that_trains() -> None:
    trips: list[int] = []
    guard = Guard(lambda: trips.append(threading.get_ident()))

    def fail_often() -> None:
        for _ in range(5):
            guard.protect(fail)("x")

    other = threading.Thread(target=fail_often)
    other.start()
    other.join()
    assert guard.is_tripped and trips == []
    guard.enter()
    guard.enter()
    assert trips == [threading.get_ident()]


def test_the_thread_that_trains_may_be_another_than_the_first() -> None:
    trips: list[int] = []
    guard = Guard(lambda: trips.append(threading.get_ident()))

    def train() -> None:
        guard.enter()
        for _ in range(3):
            guard.protect(fail)("x")

    trainer = threading.Thread(target=train)
    trainer.start()
    trainer.join()
    assert len(trips) == 1 and trips != [threading.get_ident()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_a_loop_passes_uncounted(error: type[BaseException]) -> None:
    def leave() -> None:
        raise error

    guard = Guard()
    with pytest.raises(error):
        guard.protect(leave)()
    assert guard.num_faults == 0

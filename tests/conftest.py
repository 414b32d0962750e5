"""Settings of all tests: no example of a property has a deadline, since machines differ.

One thread computes in each process: tests run side by side, and so do their own processes.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")

settings.register_profile("forerun", deadline=None)
settings.load_profile("forerun")

_GOLDEN = str(Path(__file__).with_name("golden"))
_WRITES = {"open", "os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate"}


def _refuse_writes_to_golden(event: str, args: tuple[Any, ...]) -> None:
    """Tests share ``tests/golden`` and copy it side by side: what writes there uses a copy."""
    if event not in _WRITES or (event == "open" and not args[2] & (os.O_WRONLY | os.O_RDWR)):
        return
    for path in args[: 2 if event == "os.rename" else 1]:
        if isinstance(path, str | bytes | Path) and os.fsdecode(path).startswith(_GOLDEN):
            raise AssertionError(
                f"{event} of {os.fsdecode(path)}: tests use a copy of tests/golden"
            )


sys.addaudithook(_refuse_writes_to_golden)


def pytest_configure() -> None:
    """Shells start what runs in the background without Ctrl-C, and every child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than processors where there are trainings, which wait for each other."""
    return (os.cpu_count() or 1) + (config.option.markexpr != "not slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What a test has printed goes between processes as UTF-8, whatever a path has in it."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report

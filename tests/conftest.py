"""Settings of all tests: no example of a property has a deadline, since machines differ.

``FORERUN_EXAMPLES=1000`` draws as many of each property that does not say how many.

One thread computes in each process: tests run side by side, and so do their own processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

os.environ.setdefault("OMP_NUM_THREADS", "1")
# pytest-xdist sets it to 80, and tables in a pipe are as wide as it says.
os.environ.pop("COLUMNS", None)

settings.register_profile(
    "forerun", deadline=None, max_examples=int(os.environ.get("FORERUN_EXAMPLES", "40"))
)
settings.load_profile("forerun")

_GOLDEN = Path(__file__).with_name("golden")


def _recorded() -> set[Path]:
    return {*_GOLDEN.glob("*"), *_GOLDEN.glob("*/*")}


_AS_CLONED = _recorded()


@pytest.fixture(autouse=True)
def recorded_runs_stay_as_they_are() -> Iterator[None]:
    """Tests share ``tests/golden`` and copy it side by side: what writes there uses a copy.

    No audit hook sees to it: dynamo would compile that as one more frame of who compiles.
    """
    yield
    written = _recorded() - _AS_CLONED
    assert not written, f"{written}: use golden_copy() of golden_copies.py"


def pytest_configure() -> None:
    """Shells start what runs in the background without Ctrl-C, and every child inherits that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """One more than processors where there are trainings, which wait for each other."""
    return (os.cpu_count() or 1) + ("not slow" not in config.option.markexpr)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first, so that no process is alone with one at the end."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make a test's printed output valid UTF-8 to pass between processes, whatever paths hold."""
    report = yield
    report.sections = [
        (name, text.encode("utf-8", "backslashreplace").decode()) for name, text in report.sections
    ]
    return report

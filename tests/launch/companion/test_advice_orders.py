"""Orders of the companion to training after each decision."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from companion_settings import companion_settings

from forerun.calib.workload.run_options import OnAdvice
from forerun.launch.companion._companion_loop import PATIENCE_S, CompanionLoop
from forerun.launch.sinks.sink import Sink

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


def orders_of(directory: Path, num_windows: int, **settings: Any) -> list[dict[str, Any]]:
    """The orders of a run whose deadline is over, window after window."""
    orders: list[dict[str, Any]] = []
    loop = CompanionLoop(
        companion_settings(directory, deadline_unix_s=900.0, **settings),
        open_sink=lambda _: Sink(),
        give_order=orders.append,
    )
    for step in range(3, 11):
        value = {"event": "step", "step": step, "time_s": 0.15, "gap_s": 0.0, "is_hooked": False,
                 "window": 0, "is_after_window": False, "flags": [], "unix_s": 1000.0}  # fmt: skip
        loop.handle(value, 1000.0)
    for window in range(num_windows):
        loop.handle({"event": "window_closed", "window": window, "last_step": 10}, 1000.0)
        loop.poll(1001.0 + PATIENCE_S * (window + 1))
    return orders


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(GOLDEN / "records", tmp_path / "records")
    return tmp_path


def test_a_second_window_is_asked_for_and_then_the_stop(directory: Path) -> None:
    first, second = orders_of(
        directory, 2, on_advice=OnAdvice.STOP, host_argv=("t.py", "--save", "there")
    )
    assert (first["order"], second["order"]) == ("window", "stop")
    assert first["reason"].startswith("deadline")
    assert second["rule"] == "deadline" and "after the deadline" in second["reason"]
    assert second["command"][-2:] == ["--load", "there"]


@pytest.mark.slow
@pytest.mark.parametrize("choice", [OnAdvice.LOG, OnAdvice.ALERT])
def test_a_run_that_is_not_to_be_stopped_is_only_looked_at_again(
    directory: Path, choice: OnAdvice
) -> None:
    orders = orders_of(directory, 3, on_advice=choice)
    assert [order["order"] for order in orders] == ["window"]

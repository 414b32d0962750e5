"""A drift in the companion: said, kept, asked about, and what the forecast then rests on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from forerun.launch.companion._drift_watch import DRIFT, DriftWatch
from forerun.launch.store.place import Place
from forerun.launch.store.run_log import LoggedStep

STEP_S = 0.5


class Listener:
    """Collects the lines and orders of a drift watch."""

    def __init__(self, directory: Path, run_id: str = "run") -> None:
        self.lines: list[str] = []
        self.orders: list[dict[str, Any]] = []
        place = Place(directory=directory, launch_id="one", run_id=run_id)
        self.watching = DriftWatch(place, notify=self.lines.append, give_order=self.orders.append)


def rows(times_s: np.ndarray, flags: dict[int, tuple[str, ...]] | None = None) -> list[LoggedStep]:
    return [
        LoggedStep(
            iteration=i + 1, time_s=float(time_s), is_after_window=True,
            is_hooked=False, flags=(flags or {}).get(i + 1, ()), unix_s=float(i),
        )
        for i, time_s in enumerate(times_s)
    ]  # fmt: skip


def noisy(count: int) -> np.ndarray:
    return STEP_S * np.exp(0.01 * np.random.default_rng(0).standard_normal(count))


def events(directory: Path) -> list[dict[str, Any]]:
    value = json.loads((directory / "runs" / "one" / DRIFT).read_text(encoding="utf-8"))
    assert value["schema"] == 1
    return value["events"]


def test_a_drift_is_said_kept_and_asked_about_and_its_recovery_as_well(tmp_path: Path) -> None:
    listener = Listener(tmp_path)
    times = noisy(300)
    times[100:200] *= 1.2
    listener.watching.begin()
    drifts = [drift for row in rows(times) if (drift := listener.watching.add(row)) is not None]
    assert [drift.since_iteration for drift in drifts] == pytest.approx([101, 201], abs=2)
    assert listener.lines[0].startswith("drift: a step takes 0.")
    assert " more than before (0.5" in listener.lines[0]
    assert listener.lines[1].startswith("recovered: a step takes 0.")
    assert [order["order"] for order in listener.orders] == ["window", "window"]
    assert [e["kind"] for e in events(tmp_path)] == ["slower", "recovered"]
    values = listener.watching.values()
    assert values["level_s"] == pytest.approx(STEP_S, rel=0.02)
    assert values["drift_frac"] == pytest.approx(0.0, abs=0.02)


def test_what_came_before_the_first_answer_is_judged_with_it(tmp_path: Path) -> None:
    listener, times = Listener(tmp_path), noisy(120)
    times[60:] *= 1.3
    assert not any(listener.watching.add(row) for row in rows(times))
    (drift,) = listener.watching.begin()
    assert drift.since_iteration == pytest.approx(61, abs=1)


def test_a_new_batch_size_and_flagged_steps_are_no_drift(tmp_path: Path) -> None:
    listener, times = Listener(tmp_path), noisy(300)
    times[150:] *= 2.0
    listener.watching.begin(ends=(150, 300))
    flags = {}
    for step in range(10, 290, 12):
        times[step : step + 3] *= 5.0
        flags |= {step + n: ("evaluated",) for n in (1, 2, 3)}
    assert not any(listener.watching.add(row) for row in rows(times, flags))
    assert listener.lines == [] and not (tmp_path / "runs" / "one" / DRIFT).exists()


def test_events_of_earlier_launches_stay_and_so_does_a_file_of_others(tmp_path: Path) -> None:
    times = noisy(120)
    times[60:] *= 1.3
    for run_id in ("first", "second"):
        listener = Listener(tmp_path, run_id)
        listener.watching.begin()
        for row in rows(times):
            listener.watching.add(row)
    assert [event["run_id"] for event in events(tmp_path)] == ["first", "second"]
    (tmp_path / "runs" / "one" / DRIFT).write_text("{", encoding="utf-8")
    listener = Listener(tmp_path, "third")
    listener.watching.begin()
    for row in rows(times):
        listener.watching.add(row)
    assert (tmp_path / "runs" / "one" / DRIFT).read_text(encoding="utf-8") == "{"

"""Drift of the step's level during a run: logged, stored, measured by a window, explained."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.drift.monitor import (
    SCHEMA,
    Drift,
    DriftEvent,
    DriftMonitor,
    drift_causes,
    transfer_causes,
)
from ...calib.errors import ForerunError
from ...calib.records.files import CREATED, write_json
from ...calib.records.iso_times import with_iso_times
from ...calib.samples.table import SampleTable, windows_of
from ..store.place import Place
from ..store.run_folders import read_object
from ..store.run_log import LoggedStep
from ._log_lines import WriteGuard

DRIFT = "drift.json"
MOST_WINDOWS = 10
"""Maximum number of windows requested because of drifts in one run."""
MOST_EVENTS = 500
"""Maximum number of events in the file, over all launches; the newest are retained."""
# Bounds steps buffered before the first answer, for runs with steps of milliseconds.
_MOST_WAITING = 10_000


class DriftWatch:
    """Takes steps in order; passes event lines to ``notify`` and window orders to ``give_order``.

    Steps are buffered until ``begin``: only then are the changes of batch size known, which are not
    drifts.
    """

    def __init__(
        self,
        place: Place,
        *,
        notify: Callable[[str], None],
        give_order: Callable[[dict[str, Any]], object],
        writing: WriteGuard | None = None,
    ) -> None:
        self._writing = writing or WriteGuard()
        self._place, self._notify, self._give_order = place, notify, give_order
        self._monitor = DriftMonitor()
        self._waiting: deque[LoggedStep] = deque(maxlen=_MOST_WAITING)
        self._is_begun = False
        self._ends: tuple[int, ...] = ()
        self._size_place = 0
        self._first_level_s: float | None = None
        self._earlier_events = _read_events(place.path / DRIFT)
        self._events: list[DriftEvent] = []
        self._open: int | None = None
        """Index of the newest event without known causes."""
        self._compared: tuple[int, ...] = ()
        self._num_requested = 0

    def begin(self, ends: Sequence[int] = ()) -> list[Drift]:
        """Set the last iteration of each batch size and return the drifts in buffered steps."""
        self._is_begun, self._ends = True, tuple(ends)
        waiting = [*self._waiting]
        self._waiting.clear()
        return [drift for row in waiting if (drift := self.add(row)) is not None]

    def add(self, row: LoggedStep) -> Drift | None:
        """Add a step; return the drift that it confirms, if any."""
        if not self._is_begun:
            self._waiting.append(row)
            return None
        place = bisect_left(self._ends, row.iteration)
        if place != self._size_place:
            self._size_place, self._first_level_s = place, None
            self._monitor = DriftMonitor()
        is_masked = row.is_hooked or row.is_disturbed or bool(row.flags)
        drift = self._monitor.add(row.iteration, row.time_s, is_masked=is_masked)
        if self._first_level_s is None:
            self._first_level_s = self._monitor.level_s
        if drift is None:
            return None
        self._keep(row.unix_s, drift.iteration, drift=drift)
        self._open = len(self._events) - 1
        if self._num_requested < MOST_WINDOWS:
            self._num_requested += 1
            self._give_order({"order": "window", "reason": self._events[-1].line})
        return drift

    def values(self) -> dict[str, float]:
        """Return W&B values: the step's level, and its relative deviation from the first level."""
        level_s, first_s = self._monitor.level_s, self._first_level_s
        if level_s is None or first_s is None:
            return {}
        return {"level_s": level_s, "drift_frac": level_s / first_s - 1.0}

    def window_closed(self, table: SampleTable, window: int, *, unix_s: float) -> None:
        """Compare a closed window with earlier ones to explain a drift or find a hidden change."""
        try:
            explained = self._explain(table, window)
            windows = tuple(w for w in windows_of(table) if w <= window)[-2:]
            level_s = self._monitor.level_s or float(table.steps["time_s"].median())
            causes = transfer_causes(table, windows, level_s)
        except (ForerunError, KeyError, ValueError):
            return
        is_compared, self._compared = windows == self._compared, windows
        if is_compared or not causes or explained:
            return
        last = table.windows[table.windows["window"] == window]["last_step"].max()
        self._keep(unix_s, int(last) + 1, causes=causes)

    def _explain(self, table: SampleTable, window: int) -> bool:
        if self._open is None:
            return False
        event = self._events[self._open]
        causes = () if event.drift is None else drift_causes(table, event.drift, window)
        if not causes:
            return False
        self._events[self._open] = replace(event, causes=causes)
        line, self._open = self._events[self._open].line, None
        self._write()
        self._notify(line)
        return True

    def _keep(self, unix_s: float, iteration: int, **what: Any) -> None:
        run_id = self._place.run_id
        event = DriftEvent(run_id=run_id, unix_s=unix_s, iteration=iteration, **what)
        self._events.append(event)
        if len(self._events) > MOST_EVENTS:
            del self._events[0]
            self._open = self._open - 1 if self._open else None
        self._write()
        self._notify(event.line)

    def _write(self) -> None:
        events = [*self._earlier_events, *(event.to_json() for event in self._events)]
        value = {"schema": SCHEMA, **CREATED, **self._place.stamp()}
        path = self._place.path / DRIFT
        whole = with_iso_times({**value, "events": events[-MOST_EVENTS:]})
        self._writing(lambda: write_json(path, whole))


def _read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events of earlier starts of this launch; empty if missing or damaged."""
    events = (read_object(path) or {}).get("events")
    return [one for one in events if isinstance(one, dict)] if isinstance(events, list) else []

"""The step's level while a run goes on: drifts are said, kept, asked about, and later explained."""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...calib.drift import SCHEMA, Drift, DriftEvent, DriftMonitor, drift_causes, transfer_causes
from ...calib.errors import ForerunError
from ...calib.records import with_iso_times, write_json
from ...calib.samples import SampleTable, windows_of
from ..store import LoggedStep, Place, read_object
from .log_lines import WriteGuard

DRIFT = "drift.json"
MOST_WINDOWS = 10
"""Windows that are asked for because of drifts, in one run."""
MOST_EVENTS = 500
"""Newest events that are kept in the file, of all launches."""
# Steps before the first answer; a run of milliseconds a step must not fill memory.
_MOST_WAITING = 10_000


class DriftWatch:
    """Takes steps in order; ``notify`` gets each event's line, ``give_order`` the wish for a window.

    Steps wait until ``begin``: only then is it known where the batch size changes, which is no
    drift.
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
        """Place of the newest event whose causes are not known yet."""
        self._compared: tuple[int, ...] = ()
        self._num_requested = 0

    def begin(self, ends: Sequence[int] = ()) -> list[Drift]:
        """Start, or go on, with the last iteration of each batch size; drifts of what waited."""
        self._is_begun, self._ends = True, tuple(ends)
        waiting = [*self._waiting]
        self._waiting.clear()
        return [drift for row in waiting if (drift := self.add(row)) is not None]

    def add(self, row: LoggedStep) -> Drift | None:
        """Take a step; a drift where this step confirms one."""
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
        """For W&B: the level of the step, and how far it is from the first one."""
        level_s, first_s = self._monitor.level_s, self._first_level_s
        if level_s is None or first_s is None:
            return {}
        return {"level_s": level_s, "drift_frac": level_s / first_s - 1.0}

    def window_closed(self, table: SampleTable, window: int, *, unix_s: float) -> None:
        """Hold a window against those before: what explains the drift, and what the step hides."""
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
        value = {"schema": SCHEMA, "created_by": "forerun", **self._place.stamp()}
        path = self._place.path / DRIFT
        whole = with_iso_times({**value, "events": events[-MOST_EVENTS:]})
        self._writing(lambda: write_json(path, whole))


def _read_events(path: Path) -> list[dict[str, Any]]:
    """What earlier starts of this launch have kept; nothing where it is missing or damaged."""
    events = (read_object(path) or {}).get("events")
    return [one for one in events if isinstance(one, dict)] if isinstance(events, list) else []

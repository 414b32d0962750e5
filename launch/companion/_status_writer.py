"""Writer of ``status.json`` during training, in a thread that no analysis blocks.

Standard library only: it starts before pandas is loaded.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from statistics import median
from typing import Any

from ...calib.records.files import replace_file
from ...hooks.process.launch_identity import process_start
from ...hooks.process.settings import CompanionSettings
from ..store.place import place_of
from ..store.run_folders import finite_number
from ..store.status_file import BEAT_S, STATUS, Phase, StatusFile, this_host

EVERY_S = 5.0
"""Minimum seconds between two writes."""
NUM_NEWEST = 100
"""Number of newest regular steps from which the reported step time is computed."""
_MISSED_FRAC = 0.05


class StatusWriter:
    """Collects events by ``note`` and, after ``start``, writes the status at intervals."""

    def __init__(self, companion_settings: CompanionSettings) -> None:
        self._place = place_of(companion_settings)
        self._newest: deque[float] = deque(maxlen=NUM_NEWEST)
        self._lock, self._writing = threading.Lock(), threading.Lock()
        start = process_start(os.getpid()) or 0
        process: dict[str, Any] = {"host": this_host(), "pid": os.getpid(), "pid_start": start}
        began_unix_s = companion_settings.started_unix_s
        self._now = StatusFile(
            steps_total=companion_settings.num_steps, began_unix_s=began_unix_s, **process
        )
        self._is_new = True
        self._ended = threading.Event()

    def start(self) -> None:
        """Write at once, then after new events and as a heartbeat."""
        threading.Thread(target=self._run, daemon=True).start()

    def note(self, event: Mapping[str, Any]) -> None:
        """Take an event of training; values that are not numbers are ignored."""
        kind, unix_s = event.get("event"), finite_number(event.get("unix_s"))
        with self._lock:
            changed: dict[str, Any] = {"heard_unix_s": unix_s or self._now.heard_unix_s}
            if kind == "step":
                changed["iteration"] = max(
                    self._now.iteration, int(finite_number(event.get("step"))) + 1
                )
                time_s = finite_number(event.get("time_s"))
                if time_s > 0 and not event.get("flags") and not event.get("is_hooked"):
                    self._newest.append(time_s)
            elif kind == "end":
                changed["phase"] = Phase.ENDED
            self._now = replace(self._now, **changed)
            self._is_new = True

    def end(self, otherwise: Phase = Phase.GONE) -> None:
        """Write the final status: ended, or ``otherwise`` if training sent no end event."""
        with self._lock:
            if self._now.phase is Phase.RUNS:
                self._now = replace(self._now, phase=otherwise)
        self._ended.set()
        self._write(time.time())

    def _run(self) -> None:
        last_s = -BEAT_S
        while not self._ended.is_set():
            if self._is_new or time.monotonic() - last_s >= BEAT_S:
                self._is_new, last_s = False, time.monotonic()
                self._write(time.time())
            self._ended.wait(EVERY_S)

    def _write(self, now_unix_s: float) -> None:
        # One write at a time, so that the final status is last; events do not wait for the disk.
        with self._writing:
            with self._lock:
                if times := sorted(self._newest):
                    beyond = int(_MISSED_FRAC * len(times))
                    span = {"step_low_s": times[beyond], "step_high_s": times[-1 - beyond]}
                    middle_s = median(times)
                    self._now = replace(
                        self._now, step_time_s=middle_s, num_steps=len(times), **span
                    )
                text = json.dumps(
                    replace(self._now, unix_s=now_unix_s).to_json(self._place.stamp()),
                    indent=2,
                )
            # A full disk is reported by the code that writes answers.
            with suppress(OSError):
                if self._place.is_newest_run:
                    replace_file(self._place.path / STATUS, text + "\n")
                    self._place.offer_latest()

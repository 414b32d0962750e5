"""Predicted against actual in the host's own W&B run, always with the host's step."""

from __future__ import annotations

import math
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ...calib.plain_json import parse_json
from .launch_identity import launch_folder

FORECAST = "forecast.json"
# A forecast has some kilobytes; what somebody else put there is not read whole.
_MOST_NBYTES = 1 << 20
_FORECAST_KEYS = ("finish_p50_unix_s", "finish_p95_unix_s", "overhead_frac")
_RATES = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu_frac")
"""Of the forecast's step; those of another are as much higher as it is shorter."""


def host_run() -> Any | None:
    """The run that the host has open in this process; W&B is never imported for it."""
    with suppress(Exception):  # a module that is not W&B's, or is only half imported
        return getattr(sys.modules.get("wandb"), "run", None)
    return None


class ForecastFile:
    """The newest forecast of this launch's companion; read off the training thread."""

    def __init__(self, directory: Path, launch_id: Callable[[], str]) -> None:
        self._directory = directory
        self._launch_id = launch_id
        self._modified_ns = 0
        self.values: dict[str, float] = {}

    def poll(self) -> None:
        """Read the file where it has changed; a missing, damaged or foreign one changes nothing."""
        name = self._launch_id()
        if not name:
            return
        path = launch_folder(self._directory, name) / FORECAST
        try:
            found = path.stat()
            if found.st_mtime_ns == self._modified_ns or found.st_size > _MOST_NBYTES:
                return
            value = parse_json(path.read_bytes())
        except (OSError, ValueError):
            return
        self._modified_ns = found.st_mtime_ns
        if isinstance(value, dict) and value.get("launch_id") == name:
            self.values = {
                key: number
                for key in ("step_time_s", *_FORECAST_KEYS, *_RATES)
                if (number := _number(value.get(key))) is not None
            }


class HostWandb:
    """Logs ``calib/*`` of each step into the host's run."""

    def __init__(self, forecast: ForecastFile, *, is_stepped: bool = True) -> None:
        self._forecast = forecast
        self._is_stepped = is_stepped
        self._bare_s: deque[float] = deque(maxlen=64)

    def note_bare(self, time_s: float) -> None:
        """A bare step of a window: the prediction until there is a forecast."""
        self._bare_s.append(time_s)

    def log(self, *, step: int, time_s: float, is_after_window: bool) -> None:
        """Log the step under the number that the host gives to it.

        That is ``step + 1``, or the next after the host's last where a resumed run counts on.  Of
        a host whose numbers are not known, a row ahead of its own would make W&B reject those:
        there the values wait for the host's next row, and the latest ones go with it.
        """
        run = host_run()
        if run is None:
            return
        values = {"calib/step_time_s": time_s}
        predicted = self._predicted_s() if is_after_window else None
        if predicted is not None:
            values["calib/step_time_predicted_s"] = predicted
            values["calib/step_time_error_frac"] = predicted / time_s - 1.0
            for key in _FORECAST_KEYS:
                if key in self._forecast.values:
                    values[f"calib/{key}"] = self._forecast.values[key]
            values |= self._rates(time_s)
        if self._is_stepped:
            run.log(values, step=max(step, run.step) + 1)
        else:
            run.log(values, commit=False)

    def _rates(self, time_s: float) -> dict[str, float]:
        known = self._forecast.values
        faster = known.get("step_time_s", 0.0) / time_s if time_s > 0 else 0.0
        return {f"calib/{key}": faster * known[key] for key in _RATES if faster and key in known}

    def _predicted_s(self) -> float | None:
        predicted = self._forecast.values.get("step_time_s")
        if predicted is None and self._bare_s:
            predicted = median(self._bare_s)
        return predicted


def _number(value: object) -> float | None:
    """A finite number, else None."""
    with suppress(OverflowError):
        if isinstance(value, (int, float)) and math.isfinite(value):
            return float(value)
    return None

"""Predicted against actual in the host's own W&B run, always with the host's step."""

from __future__ import annotations

import math
import stat
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

from ...calib.plain_json import parse_json
from ...calib.records.run_values import ITERATION, PREFIX, Unsent, hours_left
from .launch_identity import launch_folder

FORECAST = "forecast.json"
# A forecast has some kilobytes; what somebody else put there is not read whole.
_MOST_NBYTES = 1 << 20
_FORECAST_KEYS = (
    *("finish_p50_unix_s", "finish_p95_unix_s"),
    *("overhead_frac", "overhead_below_frac"),
)
_BAND = ("single_low_s", "single_high_s")
"""Interval of 90 % in which a forecast says that a single step lies."""
_RATES = ("tokens_per_s", "tokens_per_s_per_gpu", "mfu_frac")
"""Of the forecast's step; those of another are as much higher as it is shorter."""


def host_run() -> Any | None:
    """The run that the host has open in this process; W&B is never imported for it."""
    with suppress(Exception):  # a module that is not W&B's, or is only half imported
        return getattr(sys.modules.get("wandb"), "run", None)
    return None


def define_steps(run: Any) -> None:
    """Draw what is ours over our own count of steps; nothing of the host's is defined by it."""
    run.define_metric(PREFIX + ITERATION, hidden=True)
    run.define_metric(f"{PREFIX}*", step_metric=PREFIX + ITERATION)


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
            found = path.lstat()
            if found.st_mtime_ns == self._modified_ns or found.st_size > _MOST_NBYTES:
                return
            if not stat.S_ISREG(found.st_mode):  # a pipe would wait for its writer
                return
            value = parse_json(path.read_bytes())
        except (OSError, ValueError):
            return
        self._modified_ns = found.st_mtime_ns
        if isinstance(value, dict) and value.get("launch_id") == name:
            self.values = {
                key: number
                for key in ("step_time_s", *_BAND, *_FORECAST_KEYS, *_RATES)
                if (number := _number(value.get(key))) is not None
            }


class HostWandb:
    """Logs ``calib/*`` of each step into the host's run."""

    def __init__(self, forecast: ForecastFile, *, is_stepped: bool = True) -> None:
        self._forecast = forecast
        self._is_stepped = is_stepped
        self._bare_s: deque[float] = deque(maxlen=64)
        self._unsent = Unsent()
        self._is_defined = False

    def note_bare(self, time_s: float) -> None:
        """A bare step of a window: the prediction until there is a forecast."""
        self._bare_s.append(time_s)

    def log(self, *, step: int, time_s: float, is_after_window: bool, unix_s: float = 0.0) -> None:
        """Log the step, which ended at ``unix_s``, under the number that the host gives to it.

        That is ``step + 1``, or the next after the host's last where a resumed run counts on.  Of
        a host whose numbers are not known, a row ahead of its own would make W&B reject those:
        there the values wait for the host's next row, and the latest ones go with it.
        """
        run = host_run()
        if run is None:
            return
        if not self._is_defined:
            self._is_defined = True
            define_steps(run)
        values = {"step_time_s": time_s}
        predicted = self._predicted_s() if is_after_window else None
        if predicted is not None:
            values["step_time_predicted_s"] = predicted
            values["step_time_error_frac"] = predicted / time_s - 1.0
            values |= self._band(time_s) | self._ahead(unix_s) | self._rates(time_s)
        found = {ITERATION: step + 1, **self._unsent.of(values)}
        row = {PREFIX + name: value for name, value in found.items()}
        if self._is_stepped:
            run.log(row, step=max(step, run.step) + 1)
        else:
            run.log(row, commit=False)

    def _band(self, time_s: float) -> dict[str, float]:
        known = self._forecast.values
        if any(name not in known for name in _BAND):
            return {}
        low_s, high_s = (known[name] for name in _BAND)
        return {
            "step_time_predicted_low_s": low_s,
            "step_time_predicted_high_s": high_s,
            "is_in_interval": float(low_s <= time_s <= high_s),
        }

    def _ahead(self, unix_s: float) -> dict[str, float]:
        known = self._forecast.values
        found = {name: known[name] for name in _FORECAST_KEYS if name in known}
        if unix_s and (finish := found.get("finish_p50_unix_s")):
            found["eta_h"] = hours_left(finish, unix_s)
        return found

    def _rates(self, time_s: float) -> dict[str, float]:
        known = self._forecast.values
        faster = known.get("step_time_s", 0.0) / time_s if time_s > 0 else 0.0
        return {name: faster * known[name] for name in _RATES if faster and name in known}

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

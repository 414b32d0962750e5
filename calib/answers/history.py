"""Prediction errors over the windows of a run.

Each window is compared with the models fitted before and after it, and these models with what
followed: the step of the next window, and the finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar

import numpy as np

from ..fit import Calibration, calibrate, measured_operators
from ..forecast import ModelForecast, RunProgress, run_forecast
from ..network import Measured
from ..samples import SampleTable, only_windows, windows_of
from ..steps import fit_steps, live_times
from ..workload import Encoded, Operator
from .routing import routed_s, with_measured_routing
from .run_measurements import (
    mean_waiting_s,
    measured_overhead,
    measured_step_s,
    perturbed_frac,
)

MOST_WINDOWS = 200
"""Number of newest windows whose errors are stored."""
MOST_REFITTED = 12
"""Number of newest windows of a table for which models are fitted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowError:
    """Errors of the models on one window: modelled over measured step, minus one.

    ``before_frac`` is from the models of the windows before it (None for the first),
    ``after_frac`` from the models refitted with its own rows; ``operator_*`` are the corresponding
    median absolute errors over its operators.
    """

    window: int
    num_rows: int
    measured_s: float
    before_frac: float | None
    after_frac: float
    operator_before_frac: float | None
    operator_after_frac: float
    modelled_before_s: float | None
    """Step time predicted by the models before this window."""
    modelled_after_s: float
    """Step time predicted by the models with this window."""
    finish_before_unix_s: float | None = None
    """Median finish when the window closed, by models and levels of the windows before it; None
    for the first window, or if no answer was given then."""
    finish_after_unix_s: float | None = None
    """Median finish by models and levels with this window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Errors of a run's windows, oldest first, and the models for the next one.

    A window costs one fit, as the models with it are those before the next window.
    """

    errors: tuple[WindowError, ...] = ()
    before: Models | None = None
    """Models of the windows before the newest; None if there are none."""
    after: Models | None = None
    """Models with the newest window."""
    forecast_inputs_before: ForecastInputs | None = None
    """Forecast inputs before the newest window; None if no forecast was made."""
    forecast_inputs: ForecastInputs | None = None

    @staticmethod
    def of(table: SampleTable) -> History:
        """Return the history of the newest run's windows, at most the newest ``MOST_REFITTED``."""
        windows = windows_of(table)
        history = History()
        begin = max(0, len(windows) - MOST_REFITTED)
        if begin:
            history = History(after=Models.of(only_windows(table, windows[:begin])))
        for place in range(begin, len(windows)):
            history = history.followed_by(only_windows(table, windows[: place + 1]))
        return history

    def followed_by(
        self, table: SampleTable, models: Models | None = None, levels: ForecastInputs | None = None
    ) -> History:
        """Return the history with the table's newest window added, or replaced if already there.

        ``models`` are those of the table if they are fitted already; ``levels`` are the inputs of
        the forecast after the window.
        """
        window = windows_of(table)[-1]
        is_repeated = bool(self.errors) and self.errors[-1].window == window
        before = self.before if is_repeated else self.after
        known = self.errors[:-1] if is_repeated else self.errors
        levels_before = self.forecast_inputs_before if is_repeated else self.forecast_inputs
        after = models or Models.of(table)
        here = only_windows(table, [window])
        measured_s = measured_step_s(here)
        operators = measured_operators(here)
        error = WindowError(
            window=window,
            num_rows=len(here.samples),
            measured_s=measured_s,
            before_frac=before.step_error_frac(measured_s) if before else None,
            after_frac=after.step_error_frac(measured_s),
            operator_before_frac=before.operator_error_frac(operators) if before else None,
            operator_after_frac=after.operator_error_frac(operators),
            modelled_before_s=before.step_time_s if before else None,
            modelled_after_s=after.step_time_s,
            finish_before_unix_s=levels_before.finish_unix_s(levels.so_far)
            if levels_before and levels
            else None,
            finish_after_unix_s=levels.finish_unix_s(levels.so_far) if levels else None,
        )
        return History(
            errors=(*known, error)[-MOST_WINDOWS:],
            before=before,
            after=after,
            forecast_inputs_before=levels_before,
            forecast_inputs=levels,
        )

    def with_finishes(self, finishes: Mapping[int, tuple[float | None, float | None]]) -> History:
        """Return the history with predicted finishes (before, after), by window number."""
        errors = [
            replace(
                error,
                finish_before_unix_s=finishes[error.window][0],
                finish_after_unix_s=finishes[error.window][1],
            )
            if error.window in finishes
            else error
            for error in self.errors
        ]
        return replace(self, errors=tuple(errors))


@dataclass(frozen=True, slots=True, kw_only=True)
class ForecastInputs:
    """Inputs of a forecast."""

    model_forecast: ModelForecast
    so_far: RunProgress

    def finish_unix_s(self, now: RunProgress) -> float:
        """Return the median finish at another moment, as if nothing had been measured since."""
        moved = replace(self.so_far, now_unix_s=now.now_unix_s, last_step=now.last_step)
        return run_forecast(self.model_forecast, moved).finish_p50_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """Models fitted on the windows up to one of them."""

    calibration: Calibration
    step_time_s: float
    """Step time of the running layout by these models."""

    @staticmethod
    def of(table: SampleTable) -> Models:
        """Fit models on the rows of the table's newest run only."""
        table = only_windows(table, windows_of(table))
        config = with_measured_routing(table.config(), table)
        calibration = calibrate(table, device=config.device)
        steps = fit_steps(live_times(calibration, config))
        waiting_s = mean_waiting_s(table, routed_s(steps, config))
        bare_frac = 1.0 - perturbed_frac(table, measured_overhead(table))
        (step_time_s,) = steps.predict([config]).time_s.tolist()
        return Models(calibration=calibration, step_time_s=bare_frac * (step_time_s + waiting_s))

    def step_error_frac(self, measured_s: float) -> float:
        """Return modelled over measured step, minus one."""
        return self.step_time_s / measured_s - 1

    def operator_error_frac(self, measured: Mapping[Operator, Measured]) -> float:
        """Return the median absolute error over measured operators; 0 if there are none."""
        if not measured:
            return 0.0
        estimates = self.calibration.operators(list(measured))
        actual = np.array([one.time_s for one in measured.values()])
        return float(np.median(np.abs(estimates.time_s / actual - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore(Encoded):
    """Errors of a window, and of what followed it."""

    JSON: ClassVar[str] = (
        "**error next_before_frac next_after_frac finish_before_frac finish_after_frac"
    )

    error: WindowError
    next_before_frac: float | None
    """Next window's step by the models before this window over the measured one, minus one; None if
    there were no such models or no next window yet."""
    next_after_frac: float | None
    """Next window's error by the models refitted with this window."""
    finish_before_frac: float | None
    """Error of the finish predicted when this window closed, by models and levels of the windows
    before: lateness over the time of the whole run.  None if none was predicted."""
    finish_after_frac: float | None
    """Error of the finish by models and levels with this window."""


def window_scores(
    errors: Sequence[WindowError], *, started_unix_s: float, finish_unix_s: float
) -> list[WindowScore]:
    """Return a score for each window, oldest first.

    ``finish_unix_s`` is the end of the run, or its newest forecast while the run goes on.
    """
    total_s = finish_unix_s - started_unix_s

    def late_frac(predicted_unix_s: float | None) -> float | None:
        if predicted_unix_s is None or total_s <= 0:
            return None
        return (predicted_unix_s - finish_unix_s) / total_s

    def next_frac(modelled_s: float | None, following: WindowError | None) -> float | None:
        if modelled_s is None or following is None:
            return None
        return modelled_s / following.measured_s - 1

    return [
        WindowScore(
            error=error,
            next_before_frac=next_frac(error.modelled_before_s, following),
            next_after_frac=next_frac(error.modelled_after_s, following),
            finish_before_frac=late_frac(error.finish_before_unix_s),
            finish_after_frac=late_frac(error.finish_after_unix_s),
        )
        for error, following in zip_longest(errors, errors[1:])
    ]

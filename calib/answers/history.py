"""How the error moved: each window is held against the models before and after it, and these
against what lay ahead: the next window's step, and the finish."""

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
    perturbation_s,
)

MOST_WINDOWS = 200
"""Newest windows whose errors are kept."""
MOST_REFITTED = 12
"""Newest windows of a table that are held against models of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowError:
    """How well a window was known: modelled over measured step, minus one.

    ``before_frac`` is from the models of the windows before it (None for the first),
    ``after_frac`` from the models refitted with its own rows; ``operator_*`` the same as the
    median absolute error over its operators.
    """

    window: int
    num_rows: int
    measured_s: float
    before_frac: float | None
    after_frac: float
    operator_before_frac: float | None
    operator_after_frac: float
    modelled_before_s: float | None
    """The step that the models before the window and with it foretell."""
    modelled_after_s: float
    finish_before_unix_s: float | None = None
    """The median finish when the window closed, by models and levels of the windows before it; None
    for the first, and where no answer was given then."""
    finish_after_unix_s: float | None = None
    """The same with this window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """The errors of a run's windows, oldest first, and the models for the next one.

    A window costs one fit: its models are those before the window after it.
    """

    errors: tuple[WindowError, ...] = ()
    before: Models | None = None
    """Of the windows before the newest; None where there are none."""
    after: Models | None = None
    """With the newest window."""
    forecast_inputs_before: ForecastInputs | None = None
    """Likewise what forecasts were made from; None where none were."""
    forecast_inputs: ForecastInputs | None = None

    @staticmethod
    def of(table: SampleTable) -> History:
        """That of all windows of the table's newest run, the newest ``MOST_REFITTED`` of many."""
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
        """With the newest window of the table; again, where that is the newest one here.

        ``models`` are those of the table, where they are known already; ``levels`` what the
        forecast after the window was made from.
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
        """With the finishes that were predicted at windows of these numbers, before and after."""
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
    """What a forecast was made from."""

    model_forecast: ModelForecast
    so_far: RunProgress

    def finish_unix_s(self, now: RunProgress) -> float:
        """The median finish at another moment, had nothing been measured since."""
        moved = replace(self.so_far, now_unix_s=now.now_unix_s, last_step=now.last_step)
        return run_forecast(self.model_forecast, moved).finish_p50_unix_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Models:
    """What was fitted on the windows up to one of them."""

    calibration: Calibration
    step_time_s: float
    """The running layout's step by these models."""

    @staticmethod
    def of(table: SampleTable) -> Models:
        """Fitted on the rows of the table's newest run alone."""
        table = only_windows(table, windows_of(table))
        config = with_measured_routing(table.config(), table)
        calibration = calibrate(table, device=config.device)
        steps = fit_steps(live_times(calibration, config))
        waiting_s = mean_waiting_s(table, routed_s(steps, config))
        rest_s = waiting_s - perturbation_s(table, measured_overhead(table))
        (step_time_s,) = steps.predict([config]).time_s.tolist()
        return Models(calibration=calibration, step_time_s=step_time_s + rest_s)

    def step_error_frac(self, measured_s: float) -> float:
        """Modelled over measured step, minus one."""
        return self.step_time_s / measured_s - 1

    def operator_error_frac(self, measured: Mapping[Operator, Measured]) -> float:
        """Median absolute error of measured operators."""
        if not measured:
            return 0.0
        estimates = self.calibration.operators(list(measured))
        actual = np.array([one.time_s for one in measured.values()])
        return float(np.median(np.abs(estimates.time_s / actual - 1)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScore(Encoded):
    """A window, its own errors and those of what lay ahead of it."""

    JSON: ClassVar[str] = (
        "**error next_before_frac next_after_frac finish_before_frac finish_after_frac"
    )

    error: WindowError
    next_before_frac: float | None
    """The next window's step by the models before this one, over the measured one, minus one; None
    where there were none, or no next window yet."""
    next_after_frac: float | None
    """The same by the models refitted with this window."""
    finish_before_frac: float | None
    """The finish by models and levels of the windows before, at the moment when this one closed:
    how much too late it is, over the time of the whole run.  None where none was predicted."""
    finish_after_frac: float | None
    """The same by those with this window."""


def window_scores(
    errors: Sequence[WindowError], *, started_unix_s: float, finish_unix_s: float
) -> list[WindowScore]:
    """A score for each window, oldest first.

    ``finish_unix_s`` is the end of the run, or while that is to come the newest forecast of it.
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

"""How the error moved: each window is held against the models before and after it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .evidence import (
    mean_waiting_s,
    measured_overhead,
    measured_step_s,
    only_windows,
    perturbation_s,
    windows_of,
)
from .fit.calibration import Calibration, calibrate
from .fit.training import measured_operators
from .samples.table import SampleTable
from .timeline.step import estimate_step


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


def window_history(table: SampleTable) -> tuple[WindowError, ...]:
    """The error of each window under the models before it and after it, oldest first."""
    windows = windows_of(table)
    out: list[WindowError] = []
    for place, window in enumerate(windows):
        here = only_windows(table, [window])
        after = _Fit.of(only_windows(table, windows[: place + 1]))
        before = _Fit.of(only_windows(table, windows[:place])) if place else None
        measured_s = measured_step_s(here)
        out.append(
            WindowError(
                window=int(window),
                num_rows=len(here.samples),
                measured_s=measured_s,
                before_frac=before.step_error_frac(measured_s) if before else None,
                after_frac=after.step_error_frac(measured_s),
                operator_before_frac=before.operator_error_frac(here) if before else None,
                operator_after_frac=after.operator_error_frac(here),
            )
        )
    return tuple(out)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Fit:
    calibration: Calibration
    own_s: float

    @staticmethod
    def of(table: SampleTable) -> _Fit:
        config = table.config()
        calibration = calibrate(table, device=config.device)
        rest_s = mean_waiting_s(table) - perturbation_s(table, measured_overhead(table))
        own_s = estimate_step(config, calibration).time_s + rest_s
        return _Fit(calibration=calibration, own_s=own_s)

    def step_error_frac(self, measured_s: float) -> float:
        """Modelled over measured step, minus one."""
        return self.own_s / measured_s - 1

    def operator_error_frac(self, table: SampleTable) -> float:
        """Median absolute error of the operators that the table measured."""
        rows = measured_operators(table)
        if not rows:
            return 0.0
        found = self.calibration.operators(list(rows))
        actual = np.array([row.time_s for row in rows.values()])
        return float(np.median(np.abs(found.time_s / actual - 1)))

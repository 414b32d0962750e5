"""Modelled gains for a launch: times of other layouts, and of work between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from ..advice import Candidate, compare
from ..forecast import (
    EVAL_SIGMA_LOG,
    FEW_SIGMA_LOG,
    SAVE_SIGMA_LOG,
    ModelForecast,
    model_forecast,
)
from ..memory import Verdict
from ..regressors import Z_90
from ..steps import FittedSteps
from ..workload import RunConfig
from .gain import Gain


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Work between steps: seconds of one, and their standard deviation (log)."""

    time_s: float
    sigma_log: float

    def gain(self, change: Callable[[float], float]) -> Gain:
        """Return the gain of the run, given as function ``change`` of the seconds of one."""
        spread = math.exp(Z_90 * self.sigma_log)
        ends = sorted((change(self.time_s / spread), change(self.time_s * spread)))
        return Gain(time_frac=change(self.time_s), low_frac=ends[0], high_frac=ends[1], of_run=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pricing:
    """One launch with the step model of a run, for gains by the same comparison as in a plan."""

    config: RunConfig
    """Layout of the launch as written."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None = None
    memory_offset_nbytes: int | None = None
    mtbf_s: float | None = None
    """Mean time between failures of the job, if stated."""
    restart_s: float = 0.0
    eval_times_s: tuple[float, ...] = ()
    save_times_s: tuple[float, ...] = ()
    """Measured evaluations and saves of this launch."""

    def candidates(self, layouts: Sequence[RunConfig]) -> list[Candidate]:
        """Return the layouts compared with the launch as written, in order."""
        return compare(
            self.config,
            layouts,
            self.steps,
            memory_capacity_nbytes=self.memory_capacity_nbytes,
            memory_offset_nbytes=self.memory_offset_nbytes,
        )

    @cached_property
    def current(self) -> Candidate:
        """The launch as written."""
        return self.candidates([self.config])[0]

    def gain(self, one: Candidate) -> Gain | None:
        """Return the gain of a layout; None if it needs more memory and does not fit."""
        change_nbytes = one.memory.total_nbytes - self.current.memory.total_nbytes
        if change_nbytes > 0 and one.verdict is Verdict.DOES_NOT_FIT:
            return None
        return Gain(
            time_frac=one.time_frac,
            low_frac=one.time_frac_low,
            high_frac=one.time_frac_high,
            memory_nbytes=change_nbytes,
            memory_frac=one.memory.total_nbytes / self.current.memory.total_nbytes - 1,
        )

    @cached_property
    def _model_forecast(self) -> ModelForecast:
        estimate = self.steps.estimates([self.config])[0]
        return model_forecast(self.config, self.steps, estimate, started_unix_s=0.0)

    @property
    def evaluation(self) -> Part:
        """One evaluation, as measured or else as modelled."""
        if self.eval_times_s:
            return _measured(self.eval_times_s)
        return Part(time_s=self._model_forecast.eval_s, sigma_log=EVAL_SIGMA_LOG)

    @property
    def save(self) -> Part:
        """One save, as measured or else as modelled."""
        if self.save_times_s:
            return _measured(self.save_times_s)
        return Part(time_s=self._model_forecast.save_s, sigma_log=SAVE_SIGMA_LOG)

    def interval_gain(self, part: Part, now: int, then: float = math.inf) -> Gain:
        """Return the gain from another interval (steps) of a part, relative to steps with parts.

        An infinite interval means that the part takes no training time.
        """
        step_s = self.current.step_time_s
        return part.gain(lambda one_s: (step_s + one_s / then) / (step_s + one_s / now) - 1)


def _measured(times_s: Sequence[float]) -> Part:
    return Part(time_s=fmean(times_s), sigma_log=FEW_SIGMA_LOG / math.sqrt(len(times_s)))

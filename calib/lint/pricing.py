"""What the model of a run says of a launch: times of other layouts, and of what is beside steps."""

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
    """Work between steps: seconds of one, and the standard deviation of their logarithm."""

    time_s: float
    sigma_log: float

    def gain(self, change: Callable[[float], float]) -> Gain:
        """The gain of the run where ``change`` is what it is for such seconds."""
        spread = math.exp(Z_90 * self.sigma_log)
        ends = sorted((change(self.time_s / spread), change(self.time_s * spread)))
        return Gain(time_frac=change(self.time_s), low_frac=ends[0], high_frac=ends[1], of_run=True)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pricing:
    """One launch over the step model of a run; all that is asked of it is what plans ask."""

    config: RunConfig
    """The launch as it is."""
    steps: FittedSteps
    memory_capacity_nbytes: int | None = None
    memory_offset_nbytes: int | None = None
    mtbf_s: float | None = None
    """Mean time between failures of the job, where somebody said it."""
    restart_s: float = 0.0
    eval_times_s: tuple[float, ...] = ()
    save_times_s: tuple[float, ...] = ()
    """Measured ones of this launch."""

    def candidates(self, layouts: Sequence[RunConfig]) -> list[Candidate]:
        """Layouts against the launch as it is, in their order."""
        return compare(
            self.config,
            layouts,
            self.steps,
            memory_capacity_nbytes=self.memory_capacity_nbytes,
            memory_offset_nbytes=self.memory_offset_nbytes,
        )

    @cached_property
    def current(self) -> Candidate:
        """The launch as it is."""
        return self.candidates([self.config])[0]

    def gain(self, one: Candidate) -> Gain | None:
        """The gain of a layout; None where it needs more memory than there is."""
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
        """One evaluation, as measured or as the model has it."""
        if self.eval_times_s:
            return _measured(self.eval_times_s)
        return Part(time_s=self._model_forecast.eval_s, sigma_log=EVAL_SIGMA_LOG)

    @property
    def save(self) -> Part:
        """One save, as measured or as the model has it."""
        if self.save_times_s:
            return _measured(self.save_times_s)
        return Part(time_s=self._model_forecast.save_s, sigma_log=SAVE_SIGMA_LOG)

    def interval_gain(self, part: Part, now: int, then: float = math.inf) -> Gain:
        """What other steps between two of a part are worth, of the time of steps and these; for
        ever apart: they take no time of training at all."""
        step_s = self.current.step_time_s
        return part.gain(lambda one_s: (step_s + one_s / then) / (step_s + one_s / now) - 1)


def _measured(times_s: Sequence[float]) -> Part:
    return Part(time_s=fmean(times_s), sigma_log=FEW_SIGMA_LOG / math.sqrt(len(times_s)))

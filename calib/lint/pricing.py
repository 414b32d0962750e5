"""Modelled gains for a launch: times of other layouts, and of work between steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

from ..advice.planning import Candidate, compare
from ..forecast.modelled import ModelForecast, model_forecast
from ..forecast.remaining_run import FEW_SIGMA_LOG
from ..memory.peak import Verdict
from ..regressors.estimate import Estimate
from ..search.results import ANY_MEMORY, MemoryBudget
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from ._gain import Gain


@dataclass(frozen=True, kw_only=True, eq=False)
class Pricing:
    """One launch with the step model of a run, for gains by the same comparison as in a plan."""

    config: RunConfig
    """Layout of the launch as written."""
    steps: FittedSteps
    budget: MemoryBudget = ANY_MEMORY
    mtbf_s: float | None = None
    """Mean time between failures of the job, if stated."""
    restart_s: float = 0.0
    eval_times_s: tuple[float, ...] = ()
    save_times_s: tuple[float, ...] = ()
    """Measured evaluations and saves of this launch."""

    def candidates(self, layouts: Sequence[RunConfig]) -> list[Candidate]:
        """Return the layouts compared with the launch as written, in order."""
        return compare(self.config, layouts, self.steps, budget=self.budget)

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
            low_frac=one.ratio.low - 1,
            high_frac=one.ratio.high - 1,
            memory_nbytes=change_nbytes,
            memory_frac=one.memory.total_nbytes / self.current.memory.total_nbytes - 1,
        )

    @cached_property
    def _model_forecast(self) -> ModelForecast:
        estimate = self.steps.estimates([self.config])[0]
        return model_forecast(self.config, self.steps, estimate, started_unix_s=0.0)

    @property
    def evaluation(self) -> Estimate:
        """One evaluation, as measured or else as modelled."""
        if self.eval_times_s:
            return _measured(self.eval_times_s)
        return self._model_forecast.evaluation

    @property
    def save(self) -> Estimate:
        """One save, as measured or else as modelled."""
        if self.save_times_s:
            return _measured(self.save_times_s)
        return self._model_forecast.save

    def interval_gain(self, part: Estimate, now: int, then: float = math.inf) -> Gain:
        """Return the gain from another interval (steps) of a part, relative to steps with parts.

        An infinite interval means that the part takes no training time.
        """
        step_s = self.current.step_time_s
        return self.run_gain(
            part, lambda one_s: (step_s + one_s / then) / (step_s + one_s / now) - 1
        )

    @staticmethod
    def run_gain(part: Estimate, change: Callable[[float], float]) -> Gain:
        """Return the gain of the run, given as function ``change`` of the seconds of one part."""
        low, high = sorted((change(part.low), change(part.high)))
        return Gain(time_frac=change(part.median), low_frac=low, high_frac=high, of_run=True)


def _measured(times_s: Sequence[float]) -> Estimate:
    sigma = FEW_SIGMA_LOG / math.sqrt(len(times_s))
    return Estimate(median=fmean(times_s), unshared_sigma_log=sigma)

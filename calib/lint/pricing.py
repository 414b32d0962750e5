"""What the model of a run says of a launch: times of other layouts, and of what is beside steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from ..advice.micro_batch import MicroBatchAdvice, micro_batch_advice
from ..advice.plan import Candidate, compare
from ..forecast.model_forecast import ModelForecast, model_forecast
from ..forecast.run_forecast import EVAL_SIGMA_LOG, FEW_SIGMA_LOG, SAVE_SIGMA_LOG
from ..memory.peak import Verdict
from ..regressors.intervals import Z_90
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from .rule import Gain, Part


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
    def own(self) -> Candidate:
        """The launch as it is."""
        return self.candidates([self.config])[0]

    def has_room(self, one: Candidate) -> bool:
        """Whether memory is no reason against a layout: it needs no more, or is not refused."""
        is_more = one.memory.total_nbytes > self.own.memory.total_nbytes
        return not is_more or one.verdict is not Verdict.DOES_NOT_FIT

    @cached_property
    def micro_batch(self) -> MicroBatchAdvice:
        """Micro-batches and recompute that the measured memory allows."""
        return micro_batch_advice(
            self.config,
            self.steps,
            memory_capacity_nbytes=self.memory_capacity_nbytes,
            memory_offset_nbytes=self.memory_offset_nbytes,
        )

    @cached_property
    def _beside(self) -> ModelForecast:
        own = self.steps.estimates([self.config])[0]
        return model_forecast(self.config, self.steps, own, started_unix_s=0.0)

    def part_s(self, part: Part) -> tuple[float, float]:
        """Seconds of one evaluation or save, and the deviation of their logarithm."""
        is_save = part is Part.SAVES
        seen = self.save_times_s if is_save else self.eval_times_s
        if seen:
            return float(np.mean(seen)), FEW_SIGMA_LOG / math.sqrt(len(seen))
        if is_save:
            return self._beside.save_s, SAVE_SIGMA_LOG
        return self._beside.eval_s, EVAL_SIGMA_LOG

    def interval(self, part: Part) -> int:
        """Steps between two; 0 where there are none."""
        cadence = self.config.cadence
        return cadence.save_interval if part is Part.SAVES else cadence.eval_interval

    def apart(self, part: Part, interval: int = 0) -> Gain:
        """What other steps between two evaluations or saves are worth, of the time of steps and
        these; 0 steps: they take no time of training at all."""
        now = self.interval(part)
        time_s, sigma_log = self.part_s(part)
        spread = math.exp(Z_90 * sigma_log)

        def change(one_s: float) -> float:
            then_s = one_s / interval if interval else 0.0
            return (self.own.step_time_s + then_s) / (self.own.step_time_s + one_s / now) - 1

        # More seconds of each are more to gain.
        ends = sorted((change(time_s / spread), change(time_s * spread)))
        return Gain(time_frac=change(time_s), low_frac=ends[0], high_frac=ends[1], of_run=True)

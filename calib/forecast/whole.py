"""A run from first step to last: number of steps, duration and cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import ConfigError
from ..plain_json import JsonObject
from ..steps.model import FittedSteps
from ..units import DAY_S, HOUR_S, format_count
from ..workload.config import RunConfig
from ..workload.config_json import Encoded, encode_fields, encoded
from .modelled import batch_levels, model_forecast
from .remaining_schedule import POWERS, BatchLevel, remaining_schedule, step_groups


@dataclass(frozen=True, slots=True, kw_only=True)
class WholeRun(Encoded):
    """A run over a number of tokens, with the evaluations and saves of its arguments."""

    num_tokens: int
    """Tokens of all steps, including the whole last one."""
    num_steps: int
    duration_s: float
    low_s: float
    """Lower end of the 90 % interval."""
    high_s: float
    """Upper end of the 90 % interval."""
    gpu_hours: float
    price_per_gpu_hour: float | None = None

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(**encode_fields(self), cost=self.cost)

    @property
    def cost(self) -> float | None:
        """Cost in the currency of the price; None if unknown."""
        price = self.price_per_gpu_hour
        return None if price is None else self.gpu_hours * price

    @property
    def days(self) -> str:
        """Duration with its interval, as ``14.8 days (90 %: 10.8 to 20.2)``."""
        unit, word = (DAY_S, "days") if self.duration_s >= DAY_S else (HOUR_S, "hours")
        low, high = self.low_s / unit, self.high_s / unit
        return f"{self.duration_s / unit:.3g} {word} (90 %: {low:.3g} to {high:.3g})"

    @property
    def lines(self) -> tuple[str, str]:
        """Duration and cost in two short lines."""
        cost = "" if self.cost is None else f", cost {format_count(self.cost)}"
        # As users type it: 1T, 300B.
        letter, power = next(((k, v) for k, v in POWERS if self.num_tokens >= v), ("", 1))
        return (
            f"{self.num_tokens / power:.4g}{letter} tokens: {self.days}",
            f"{self.num_steps:,} steps, {format_count(self.gpu_hours)} GPU-hours{cost}",
        )


def whole_run(
    config: RunConfig,
    steps: FittedSteps,
    *,
    num_tokens: int = 0,
    price_per_gpu_hour: float | None = None,
) -> WholeRun:
    """Return the run of a layout over ``num_tokens`` tokens (0: the length in its arguments).

    Raises ``ConfigError`` if neither gives the length.
    """
    (estimate,) = steps.estimates([config])
    levels, seq_length = batch_levels(config), config.model.seq_length
    num_steps = config.cadence.train_iters
    if num_tokens:
        num_steps = _num_steps(-(-num_tokens // seq_length), levels)
    if not num_steps:
        raise ConfigError("the length of the run is not known; give --tokens such as 1T")
    ahead = model_forecast(config, steps, estimate, started_unix_s=0.0)
    schedule = remaining_schedule(
        config.cadence,
        levels,
        steps_done=0,
        steps_total=num_steps,
        is_saving=config.cadence.is_saving,
    )
    each_s = [
        estimate.time_s * ahead.ratios[one.global_batch_size].median for one in schedule.groups
    ]
    duration_s = math.fsum(
        (
            *(one.num_steps * time_s for one, time_s in zip(schedule.groups, each_s, strict=True)),
            schedule.num_evals * ahead.evaluation.median,
            schedule.num_saves * ahead.save.median,
        )
    )
    return WholeRun(
        num_tokens=sum(one.num_steps * one.global_batch_size for one in schedule.groups)
        * seq_length,
        num_steps=num_steps,
        duration_s=duration_s,
        low_s=duration_s * estimate.low_s / estimate.time_s,
        high_s=duration_s * estimate.high_s / estimate.time_s,
        gpu_hours=duration_s / HOUR_S * config.parallelism.num_ranks,
        price_per_gpu_hour=price_per_gpu_hour,
    )


def _num_steps(samples: int, levels: Sequence[BatchLevel]) -> int:
    """Return the steps needed for at least ``samples`` samples, as a batch has at least one."""
    steps = 0
    for group in step_groups(samples, levels):
        needed = -(-samples // group.global_batch_size)
        if needed <= group.num_steps:
            return steps + needed
        steps += group.num_steps
        samples -= group.num_steps * group.global_batch_size
    return steps

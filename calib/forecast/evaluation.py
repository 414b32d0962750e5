"""Evaluation of forecasts against the outcome: error over time, coverage, and settling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import ClassVar

from ..plain_json import JsonObject
from ..units import format_frac
from ..workload.config_json import Encoded, encode_fields, encoded
from .forecast_record import NOMINAL_FRAC, SCHEMA, Forecast

SETTLED_FRAC = (0.05, 0.02)
"""Largest errors of a settled forecast, as shares of the whole run's time."""
_STATED_FRAC = 0.9
"""Nominal share of the interval that a forecast has for a single step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Encoded):
    """End of a run."""

    schema: ClassVar[int] = SCHEMA
    kind: ClassVar[str] = "end"

    run_id: str
    last_step_unix_s: float
    end_unix_s: float
    """End of training, after the last evaluations and saves."""
    iteration: int
    """Number of steps done."""
    steps_total: int
    """Number of steps planned."""
    num_steps: int = 0
    """Number of unflagged steps with a single-step interval."""
    num_inside: Mapping[str, int] = field(default_factory=dict)
    """Number of these within each nominal interval."""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(schema=self.schema, kind=self.kind, **encode_fields(self))

    @property
    def is_complete(self) -> bool:
        """True if the run reached its last step, so that its finish is known."""
        return 0 < self.steps_total <= self.iteration


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishError:
    """Error of one forecast of the finish; positive if the forecast is too late."""

    iteration: int
    error_s: float
    of_left_frac: float
    """Error over the time that remained at the forecast."""
    of_total_frac: float
    """Error over the time of the whole run."""
    is_inside: bool
    """True if the finish is within the 90 % interval."""
    is_beyond_p95: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Coverage(Encoded):
    """Observed coverage of a nominal interval."""

    nominal_frac: float
    num: int
    num_inside: int
    observed_frac: float
    """Observed share within the interval; 0 without cases."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settled:
    """Iteration from which forecasts were within a share of the whole run's time."""

    within_frac: float
    first_iteration: int | None
    """Iteration of the first forecast within; None if none was."""
    stays_from_iteration: int | None
    """Iteration of the first forecast after which none was outside; None if there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation(Encoded):
    """All forecasts of one run, evaluated against its end."""

    run_id: str
    num_forecasts: int
    is_complete: bool
    total_s: float
    first_error_of_total_frac: float | None
    """Error of the first forecast, with which users plan; None without forecasts."""
    errors: tuple[FinishError, ...]
    finish_coverage: tuple[Coverage, ...]
    step_coverage: tuple[Coverage, ...]
    settled: tuple[Settled, ...]

    @property
    def line(self) -> str:
        """Error of the first predicted finish in words; empty without a forecast."""
        error_frac = self.first_error_of_total_frac
        if error_frac is None:
            return ""
        side = "late" if error_frac >= 0 else "early"
        words = [
            f"scored: the finish was predicted {format_frac(abs(error_frac))} of the run "
            f"too {side} after {self.errors[0].iteration} steps"
        ]
        tight = self.settled[-1]
        if tight.stays_from_iteration is not None and self.num_forecasts > 1:
            share = format_frac(tight.within_frac)
            words.append(f"within {share} of it from step {tight.stays_from_iteration} on")
        inside = next(row for row in self.finish_coverage if row.nominal_frac == _STATED_FRAC)
        words.append(f"{inside.num_inside} of {inside.num} 90 % intervals contained the finish")
        return " · ".join(words)


def is_held(time_s: float, low_s: float, high_s: float) -> dict[str, bool]:
    """Return, by nominal share, if a step is within its interval; the given one is of 90 %, and is
    scaled to other shares as if normal.

    >>> is_held(1.05, 0.9, 1.1)
    {'0.5': False, '0.8': True, '0.9': True, '0.95': True}
    """
    away_s, half_s = abs(time_s - 0.5 * (low_s + high_s)), 0.5 * (high_s - low_s)
    return {key: away_s <= half_s * wide for key, wide in _WIDTHS.items()}


_STATED_WIDTH = NormalDist().inv_cdf(0.5 + 0.5 * _STATED_FRAC)
_WIDTHS = {
    str(share): NormalDist().inv_cdf(0.5 + 0.5 * share) / _STATED_WIDTH for share in NOMINAL_FRAC
}


def evaluate(made: Sequence[Forecast], ended: Ended) -> Evaluation:
    """Evaluate the forecasts of a run against its end.

    If the run stopped before its last step, it has no finish to compare with, and only single steps
    are scored.  Forecasts made after the last step are excluded.
    """
    ahead = sorted(
        (m for m in made if m.steps_left > 0), key=lambda m: (m.steps_done, m.now_unix_s)
    )
    scored = ahead if ended.is_complete else []
    total_s = ended.end_unix_s - min((m.begin_unix_s for m in made), default=0.0)
    errors = tuple(_error(m, ended.end_unix_s, total_s) for m in scored)
    return Evaluation(
        run_id=ended.run_id,
        num_forecasts=len(ahead),
        is_complete=ended.is_complete,
        total_s=total_s,
        first_error_of_total_frac=errors[0].of_total_frac if errors else None,
        errors=errors,
        finish_coverage=_coverage(len(scored), _finish_inside(scored, ended.end_unix_s)),
        step_coverage=_coverage(ended.num_steps, ended.num_inside),
        settled=tuple(_settled(errors, within) for within in SETTLED_FRAC),
    )


def _coverage(num: int, num_inside: Mapping[str, int]) -> tuple[Coverage, ...]:
    inside = {share: num_inside.get(str(share), 0) for share in NOMINAL_FRAC}
    return tuple(
        Coverage(nominal_frac=share, num=num, num_inside=n, observed_frac=n / num if num else 0.0)
        for share, n in inside.items()
    )


def _finish_inside(made: Sequence[Forecast], end_unix_s: float) -> dict[str, int]:
    """Return the number of forecasts with the end inside, by nominal interval."""
    inside = dict.fromkeys(_WIDTHS, 0)
    for one in made:
        for key in inside:
            low, high = one.finish_intervals_unix_s[key]
            inside[key] += low <= end_unix_s <= high
    return inside


def _error(made: Forecast, end_unix_s: float, total_s: float) -> FinishError:
    error_s = made.finish_p50_unix_s - end_unix_s
    remaining_s = end_unix_s - made.now_unix_s
    return FinishError(
        iteration=made.steps_done,
        error_s=error_s,
        of_left_frac=error_s / remaining_s if remaining_s > 0 else 0.0,
        of_total_frac=error_s / total_s if total_s > 0 else 0.0,
        is_inside=made.finish_low_unix_s <= end_unix_s <= made.finish_p95_unix_s,
        is_beyond_p95=end_unix_s > made.finish_p95_unix_s,
    )


def _settled(errors: Sequence[FinishError], within_frac: float) -> Settled:
    good = [abs(error.of_total_frac) <= within_frac for error in errors]
    bad = [place for place, is_good in enumerate(good) if not is_good]
    stays = bad[-1] + 1 if bad else 0
    return Settled(
        within_frac=within_frac,
        first_iteration=errors[good.index(True)].iteration if True in good else None,
        stays_from_iteration=errors[stays].iteration if stays < len(errors) else None,
    )

"""Which layouts to measure: those that tell most of the step times of all.

I-optimal design (Atkinson, Donev & Tobias 2007, section 10.6): the mean variance of the predicted
log step times over all layouts is as small as so many measurements make it.  Greedy choice, then
exchange of one row at a time (Fedorov 1972) while that helps.  Variances are those of the step
model, linearised at its prior mode; the effects of tp and micro-batch are among the constants, or a
design would crowd into a few cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..fit.choices import first_of_least
from ..samples.step_rows import StepRow
from ..timeline.items import Floats
from .base_times import BaseTimes, prior_times
from .layouts import effects_of, layouts_of
from .model import MODEL_SIGMA_LOG, StepScales, gradient, prior

_MAX_EXCHANGES = 50
_GAIN_FRAC = 1e-6


def design(rows: Sequence[StepRow], num_rows: int, start: StepScales | None = None) -> list[int]:
    """Positions of the rows to calibrate on, in the order of choice; reads no measured time.

    ``start`` says what is known of the machine; without it the priors of the first row's device.
    Raises ``ConfigError`` where there are fewer rows than are asked for.
    """
    if not 0 <= num_rows <= len(rows):
        raise ConfigError(f"--rows {num_rows} is not within the {len(rows)} rows there are")
    if num_rows == 0:
        return []
    study = _study(rows, start)
    chosen: list[int] = []
    for _ in range(num_rows):
        chosen.append(study.most_telling(chosen))
    return _exchanged(study, chosen)


def expected_sigma_log(
    rows: Sequence[StepRow], chosen: Sequence[int], start: StepScales | None = None
) -> float:
    """Root of the mean variance of log step time over all rows once the chosen are measured."""
    study = _study(rows, start)
    return float(np.sqrt(study.mean_variance(list(chosen)) + MODEL_SIGMA_LOG**2))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Study:
    slopes: Floats
    """Of log step times, shape (rows, constants), in prior deviations of each constant."""
    noise_variance: float

    def posterior(self, chosen: list[int]) -> Floats:
        """Covariance of the constants once the chosen rows are measured."""
        own = self.slopes[chosen]
        return np.linalg.inv(np.eye(self.slopes.shape[1]) + own.T @ own / self.noise_variance)

    def mean_variance(self, chosen: list[int]) -> float:
        """Mean variance of all rows, that of the measurement itself left out."""
        covariance = self.posterior(chosen)
        return float(np.mean(np.einsum("ri,ij,rj->r", self.slopes, covariance, self.slopes)))

    def most_telling(self, chosen: list[int]) -> int:
        """The row that takes most off the mean variance; the first of equals."""
        shown = self.slopes @ self.posterior(chosen)
        variance = np.einsum("ri,ri->r", shown, self.slopes)
        total = self.slopes.T @ self.slopes
        gain = np.einsum("ri,ij,rj->r", shown, total, shown) / (variance + self.noise_variance)
        gain[chosen] = -1.0
        return first_of_least(-gain)


def _study(rows: Sequence[StepRow], start: StepScales | None) -> _Study:
    start = start or StepScales(base=_prior_of)
    base = start.base(rows[0])
    effects = tuple(dict.fromkeys(effect for row in rows for effect in effects_of(row)))
    layouts = layouts_of(rows, base, effects)
    center, spread = prior(layouts)
    # What all rows share cannot be told from the machine's own constants.
    is_shared = [all(effect in effects_of(row) for row in rows) for effect in effects]
    spread[len(layouts.scales) :][is_shared] = 0.0
    noise = start.measured_sigma_log**2 + MODEL_SIGMA_LOG**2
    return _Study(slopes=gradient(layouts, center)[1] * spread, noise_variance=noise)


def _prior_of(row: StepRow) -> BaseTimes:
    return prior_times(row.config.device, is_attention_fused=row.config.is_attention_fused)


def _exchanged(study: _Study, chosen: list[int]) -> list[int]:
    """Exchanges one row at a time for a better one until none is."""
    best = study.mean_variance(chosen)
    for _ in range(_MAX_EXCHANGES):
        before = best
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            trial = [*chosen[:place], study.most_telling(others), *chosen[place + 1 :]]
            found = study.mean_variance(trial)
            if found < best * (1 - _GAIN_FRAC):
                chosen, best = trial, found
        if best == before:
            break
    return chosen

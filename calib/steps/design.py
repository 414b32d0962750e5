"""Which layouts to measure: those that tell most of the step times of all.

I-optimal design (Atkinson, Donev & Tobias 2007, section 10.6): the mean variance of the predicted
log step times over all layouts is as small as so many measurements make it.  Greedy choice, then
exchange of one row at a time (Fedorov 1972) while that helps.  Variances are those of the step
model, linearised where it stands, with what its constants leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..errors import ConfigError
from ..records.step_rows import StepRow
from ..regressors.choices import first_of_least
from ..timeline.items import Floats
from .known import MEASURED_SIGMA_LOG, correlations
from .model import ERROR_INFLATION, fit_steps
from .posterior import MODEL_SIGMA_LOG
from .priced_items import SCALE
from .table_steps import row_times

_MAX_EXCHANGES = 50
"""A search that exchanges rows ends after a few; this only bounds it."""
_GAIN_FRAC = 1e-6
"""A smaller gain is rounding."""
_NOISE_SIGMA_LOG = float(np.hypot(MEASURED_SIGMA_LOG, 0.02))
"""Of a measured step as a witness of the constants: what is its own is not theirs."""


def design(rows: Sequence[StepRow], num_rows: int) -> list[int]:
    """Positions of the rows to calibrate on, in the order of choice; reads no measured time.

    Raises ``ConfigError`` where there are fewer rows than are asked for.
    """
    if not 0 <= num_rows <= len(rows):
        raise ConfigError(f"--rows {num_rows} is not within the {len(rows)} rows there are")
    if num_rows == 0:
        return []
    study = _study(rows)
    chosen: list[int] = []
    for _ in range(num_rows):
        chosen.append(study.most_informative(chosen))
    return _exchanged(study, chosen)


def expected_sigma_log(rows: Sequence[StepRow], chosen: Sequence[int]) -> float:
    """Root of the mean variance of log step time over all rows once the chosen are measured."""
    return float(np.sqrt(_study(rows).mean_variance(list(chosen))))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Study:
    covariance: Floats
    """Of log step times, shape (rows, rows), that of measurements left out."""

    def posterior(self, chosen: list[int]) -> Floats:
        """The same once the chosen rows are measured."""
        if not chosen:
            return self.covariance
        shared = self.covariance[:, chosen]
        seen = self.covariance[np.ix_(chosen, chosen)] + _NOISE_SIGMA_LOG**2 * np.eye(len(chosen))
        return self.covariance - shared @ np.linalg.solve(seen, shared.T)

    def mean_variance(self, chosen: list[int]) -> float:
        """Mean variance of all rows."""
        return float(np.mean(np.diag(self.posterior(chosen))))

    def most_informative(self, chosen: list[int]) -> int:
        """The row that takes most off the mean variance; the first of equals."""
        left = self.posterior(chosen)
        gain = np.einsum("ri,ri->i", left, left) / (np.diag(left) + _NOISE_SIGMA_LOG**2)
        gain[chosen] = -1.0
        return first_of_least(-gain)


def _study(rows: Sequence[StepRow]) -> _Study:
    base = row_times(rows[0])
    found = fit_steps(base).estimates([row.config for row in rows])
    names = sorted({name for one in found for name in one.error_log})
    slopes = np.array([[one.error_log.get(name, 0.0) for name in names] for one in found])
    # What all rows share cannot be told from the machine's own constants.
    is_effect = np.array([not name.startswith(SCALE) for name in names])
    is_shared = is_effect & (slopes != 0.0).all(axis=0)
    told = slopes[:, ~is_shared] / ERROR_INFLATION
    discrepancy = MODEL_SIGMA_LOG**2 * correlations([row.config for row in rows])
    return _Study(covariance=told @ told.T + discrepancy)


def _exchanged(study: _Study, chosen: list[int]) -> list[int]:
    """Exchanges one row at a time for a better one until none is."""
    best = study.mean_variance(chosen)
    for _ in range(_MAX_EXCHANGES):
        before = best
        for place in range(len(chosen)):
            others = chosen[:place] + chosen[place + 1 :]
            trial = [*chosen[:place], study.most_informative(others), *chosen[place + 1 :]]
            found = study.mean_variance(trial)
            if found < best * (1 - _GAIN_FRAC):
                chosen, best = trial, found
        if best == before:
            break
    return chosen

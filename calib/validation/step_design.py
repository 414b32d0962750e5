"""Which rows of a table of steps would teach most, by the ten analytical terms.

Greedy I-optimal design (Atkinson, Donev & Tobias 2007, chapter 10): each next row is the one that
takes most off the mean variance of log time over all rows.  A random effect for each (tp,
micro-batch) is in the covariance; without it the design crowds into a few cells.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..errors import ConfigError
from ..samples.step_rows import StepRow
from .step_baselines import TERM_SIGMA_LOG, term_shares

_CELL_SIGMA_LOG = 0.12
_NOISE_SIGMA_LOG = 0.03


def design_rows(rows: Sequence[StepRow], num_rows: int) -> list[int]:
    """Positions of the rows to calibrate on, the most telling first; no measured time is read.

    ``ConfigError`` where there are fewer rows than are asked for.
    """
    if not 0 <= num_rows <= len(rows):
        raise ConfigError(f"--rows {num_rows} is not within the {len(rows)} rows there are")
    covariance = _prior_covariance(rows)
    chosen: list[int] = []
    for _ in range(num_rows):
        best = _most_telling(covariance, chosen)
        column = covariance[:, best] / (covariance[best, best] + _NOISE_SIGMA_LOG**2)
        covariance = covariance - np.outer(column, covariance[best])
        chosen.append(best)
    return chosen


def expected_sigma_log(rows: Sequence[StepRow], chosen: Sequence[int]) -> float:
    """Root of the mean variance of log time over all rows, once the chosen ones are measured."""
    covariance = _prior_covariance(rows)
    if chosen:
        own = covariance[np.ix_(chosen, chosen)] + _NOISE_SIGMA_LOG**2 * np.eye(len(chosen))
        cross = covariance[:, chosen]
        covariance = covariance - cross @ np.linalg.solve(own, cross.T)
    return float(np.sqrt(np.mean(np.maximum(np.diag(covariance), 0.0))))


def _prior_covariance(rows: Sequence[StepRow]) -> NDArray[np.float64]:
    """Covariance of log times before any is measured, ``(rows, rows)``."""
    shares = term_shares(rows)
    keys = [(r.config.parallelism.tp, r.config.batch.micro_batch_size) for r in rows]
    cells = [keys.index(key) for key in keys]
    is_same = np.equal.outer(cells, cells)
    # The random effect is on the layers: the first four terms.
    layers = shares[:, :4].sum(axis=1)
    effect = _CELL_SIGMA_LOG**2 * np.outer(layers, layers) * is_same
    return TERM_SIGMA_LOG**2 * shares @ shares.T + effect


def _most_telling(covariance: NDArray[np.float64], chosen: Sequence[int]) -> int:
    gain = np.sum(covariance**2, axis=0) / (np.diag(covariance) + _NOISE_SIGMA_LOG**2)
    gain[list(chosen)] = -1.0
    return int(np.argmax(gain))

"""How fast a machine runs one kind of operator: seconds per launch, FLOP and byte of its law.

The parts of a law add up as a power mean: exponent 1 is their sum, infinity their maximum.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import robust_minimum
from .batches import spread_rows
from .operator_kinds import Columns

_LEAST = 1e-30
"""Keeps logarithms of absent work finite."""
_SAMPLE_SIGMA_LOG = 0.06
"""How far one row lies from a pool's law. At 0.12 instead, 24 SimuMax shapes give 8.5 % instead of
8.9 and eight 11.2 instead of 11.1; at 0.03 coverage of another device falls by 7 points
(benchmarks/sensitivity.py)."""
_MOST_ROWS = 160
"""Rows that constants are fitted on, spread over the sizes: more add nothing but time."""
_POWER = (0.0, 0.2)
"""Log exponent of the power mean, and its standard deviation."""
_CHAIN_POWER = (np.log(2.2), 0.5)
"""Log exponent for chains of short calls, whose launches and bytes bound in turn: nearer to a
maximum than to a sum."""
_LEAD = (-1.5, 1.0)
"""Logit of the share of a chain's work that its launches do not hide, and its deviation."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Fitted constants of one pool of operators."""

    log_unit_s: NDArray[np.float64]
    """Log seconds of one launch, FLOP or byte of each column, ``(columns,)``."""
    log_power: float
    lead_frac: float
    """Share of work that adds to the launches before the larger of the two leads; 0 for a sum."""

    def log_time(self, columns: Columns) -> NDArray[np.float64]:
        """Log seconds by the law, ``(rows,)``."""
        return self._law(columns).log_time

    def slopes(self, columns: Columns) -> NDArray[np.float64]:
        """Change of log time with the log of each column's unit, ``(rows, columns)``."""
        return self._law(columns).of_units

    def shares(self, columns: Columns) -> NDArray[np.float64]:
        """How much of each row's time is due to each column, ``(rows, columns)``; rows sum to 1."""
        parts = _seconds(columns, self.log_unit_s)
        return _power_shares(parts, np.exp(self.log_power))[0]

    def _law(self, columns: Columns) -> _Law:
        return _law(_seconds(columns, self.log_unit_s), self.log_power, self.lead_frac)


def fit_rates(
    columns: Columns,
    log_time: NDArray[np.float64],
    weight: NDArray[np.float64],
    *,
    start: NDArray[np.float64],
    sigma: NDArray[np.float64],
    is_chain: bool,
) -> Rates:
    """Constants at the greatest posterior: robust in log time, normal priors in log constants.

    ``start`` and ``sigma`` are those priors, ``(columns,)``.
    """
    rows = spread_rows(columns.amounts, log_time, _MOST_ROWS)
    amounts = Columns(costs=columns.costs, amounts=columns.amounts[rows])
    seen, scale = log_time[rows], np.sqrt(weight[rows]) / _SAMPLE_SIGMA_LOG
    extra = np.array([_CHAIN_POWER, _LEAD] if is_chain else [_POWER])
    center, spread = np.concatenate([[start, sigma], extra.T], axis=1)
    number = len(start)

    def law(theta: NDArray[np.float64]) -> _Law:
        lead = _sigmoid(theta[-1]) if is_chain else 0.0
        return _law(_seconds(amounts, theta[:number]), theta[number], lead)

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([(law(theta).log_time - seen) * scale, (theta - center) / spread])

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        found = law(theta)
        slopes = [found.of_units, found.of_power[:, None]]
        if is_chain:
            lead = _sigmoid(theta[-1])
            slopes.append(lead * (1.0 - lead) * found.of_lead[:, None])
        return np.vstack([np.hstack(slopes) * scale[:, None], np.diag(1.0 / spread)])

    theta = robust_minimum(residuals, jacobian, center, spread=spread)
    return Rates(
        log_unit_s=theta[:number],
        log_power=float(theta[number]),
        lead_frac=_sigmoid(float(theta[-1])) if is_chain else 0.0,
    )


def _seconds(columns: Columns, log_unit_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(columns.amounts * np.exp(log_unit_s), _LEAST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Law:
    """Log seconds, ``(rows,)``, and their slopes."""

    log_time: NDArray[np.float64]
    of_units: NDArray[np.float64]
    """By the log of each column's unit, ``(rows, columns)``."""
    of_power: NDArray[np.float64]
    """By the log of the exponent, ``(rows,)``."""
    of_lead: NDArray[np.float64]
    """By the share of work in the lead, ``(rows,)``."""


def _law(parts: NDArray[np.float64], log_power: float, lead_frac: float) -> _Law:
    """The power mean of seconds ``(rows, columns)``; in a chain, of launches with the lead of the
    work and of the work."""
    power, work = np.exp(log_power), parts[:, 1:].sum(axis=1)
    sums = parts
    if lead_frac:
        sums = np.column_stack([parts[:, 0] + lead_frac * work, work])
    shares, logs, total = _power_shares(sums, power)
    of_units, of_lead = shares, np.zeros(len(parts))
    if lead_frac:
        of_lead = shares[:, 0] / sums[:, 0]
        of_work = lead_frac * of_lead + shares[:, 1] / work
        of_units = parts * np.column_stack([of_lead, *[of_work] * (parts.shape[1] - 1)])
        of_lead = of_lead * work
    return _Law(
        log_time=np.log(sums.max(axis=1)) + np.log(total) / power,
        of_units=of_units,
        of_power=(shares * logs).sum(axis=1) - np.log(total) / power,
        of_lead=of_lead,
    )


def _power_shares(
    parts: NDArray[np.float64], power: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Shares of the powers in their sum, logs of parts over the largest, and the sum of these."""
    relative = parts / parts.max(axis=1, keepdims=True)
    powers = relative**power
    total = powers.sum(axis=1)
    return powers / total[:, None], np.log(relative), total


def _sigmoid(value: float) -> float:
    return float(1.0 / (1.0 + np.exp(-value)))

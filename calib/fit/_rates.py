"""Rates of a machine for one kind of operator: seconds per launch, FLOP and byte of its law.

The parts of a law are combined as a power mean: exponent 1 is their sum, infinity their maximum.
For a product the launch is added to that mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from ..regressors.robust import SAMPLE_SIGMA_LOG, robust_minimum
from .batches import spread_rows
from .operator_kinds import Columns

_LEAST = 1e-30
"""Keeps logarithms of absent work finite."""
_MOST_ROWS = 160
"""Rows that constants are fitted on, spread over the sizes: more only add run time."""
_POWER = (0.0, 0.2)
"""Log exponent of the power mean, and its standard deviation."""
_CHAIN_POWER = (np.log(2.2), 0.5)
"""Log exponent and deviation for many small kernels, alternately launch- and bandwidth-bound:
nearer to a maximum than to a sum."""
_OVERLAP_POWER = (np.log(3.0), 0.3)
"""Log exponent and deviation for kernels that load their next tiles while they multiply: near a
maximum of FLOP and bytes. Error from small to large products: 10.2 and 9.6 % with 2 and 4, 7.8 with
3."""
_LEAD = (-1.5, 1.0)
"""Logit of the share of a chain's work that its launches do not hide, and its deviation."""
_INDEPENDENT_PRODUCTS = 8.0
"""Independent rows that any larger number of product rows counts for. The loss of kernels on small
shapes is in no law and common to all rows, whose number would otherwise outweigh the data sheets on
large shapes."""


class Form(Enum):
    """How the parts of a law combine."""

    SUM = "sum"
    """Almost additive."""
    CHAIN = "chain"
    """Many small kernels, alternately launch- and bandwidth-bound."""
    OVERLAP = "overlap"
    """A launch, then FLOP overlapped with bytes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rates:
    """Fitted constants of one pool of operators."""

    log_unit_s: NDArray[np.float64]
    """Log seconds of one launch, FLOP or byte of each column, ``(columns,)``."""
    log_power: float
    lead_frac: float
    """Share of work added to the launches before the power mean with the work; 0 for a sum."""
    is_overlapped: bool = False
    """True if the launch is added separately, and the power mean covers the rest."""

    def log_time(self, columns: Columns) -> NDArray[np.float64]:
        """Return log seconds by the law, ``(rows,)``."""
        return self._law(columns).log_time

    def slopes(self, columns: Columns) -> NDArray[np.float64]:
        """Return the derivative of log time by the log of each column's unit,
        ``(rows, columns)``."""
        return self._law(columns).of_units

    def shares(self, columns: Columns) -> NDArray[np.float64]:
        """Return the share of each row's time due to each column, ``(rows, columns)``; rows sum to
        1."""
        if self.is_overlapped:
            return self._law(columns).of_units
        parts = _seconds(columns, self.log_unit_s)
        return _power_shares(parts, np.exp(self.log_power))[0]

    def _law(self, columns: Columns) -> _Law:
        parts = _seconds(columns, self.log_unit_s)
        if self.is_overlapped:
            return _overlapped(parts, self.log_power)
        return _law(parts, self.log_power, self.lead_frac)


def fit_rates(
    columns: Columns,
    log_time: NDArray[np.float64],
    weight: NDArray[np.float64],
    *,
    start: NDArray[np.float64],
    sigma: NDArray[np.float64],
    form: Form,
    least: NDArray[np.float64] | None = None,
) -> Rates:
    """Fit the constants of largest posterior: robust in log time, normal priors in log constants.

    ``start`` and ``sigma`` are those priors, ``(columns,)``; ``least`` has hard floors of the log
    seconds per unit.
    """
    rows = spread_rows(columns.amounts, log_time, _MOST_ROWS)
    amounts = Columns(costs=columns.costs, amounts=columns.amounts[rows])
    seen, counted = log_time[rows], weight[rows]
    if form is Form.OVERLAP:
        counted = counted * min(1.0, _INDEPENDENT_PRODUCTS / max(len(rows), 1))
    scale = np.sqrt(counted) / SAMPLE_SIGMA_LOG
    extra = np.array(_EXTRA[form])
    center, spread = np.concatenate([[start, sigma], extra.T], axis=1)
    number = len(start)
    floor = np.full(len(center), -np.inf)
    floor[:number] = floor[:number] if least is None else least

    def law(theta: NDArray[np.float64]) -> _Law:
        return _made(theta, number, form)._law(amounts)

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        return np.concatenate([(law(theta).log_time - seen) * scale, (theta - center) / spread])

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        slopes = _slopes(law(theta), theta, form) * scale[:, None]
        return np.vstack([slopes, np.diag(1.0 / spread)])

    theta = robust_minimum(residuals, jacobian, center, spread=spread, lowest=floor)
    return _made(theta, number, form)


_EXTRA = {
    Form.SUM: [_POWER],
    Form.CHAIN: [_CHAIN_POWER, _LEAD],
    Form.OVERLAP: [_OVERLAP_POWER],
}
"""Priors of a form's constants other than units: the exponent, and a chain's lead."""


def _made(theta: NDArray[np.float64], number: int, form: Form) -> Rates:
    """Build rates from the constants in the order of a fit: units, exponent, lead."""
    return Rates(
        log_unit_s=theta[:number],
        log_power=float(theta[number]),
        lead_frac=_sigmoid(float(theta[-1])) if form is Form.CHAIN else 0.0,
        is_overlapped=form is Form.OVERLAP,
    )


def _slopes(law: _Law, theta: NDArray[np.float64], form: Form) -> NDArray[np.float64]:
    """Return the derivative of log time by each constant of a fit, ``(rows, constants)``."""
    slopes = [law.of_units, law.of_power[:, None]]
    if form is Form.CHAIN:
        lead = _sigmoid(float(theta[-1]))
        slopes.append(lead * (1.0 - lead) * law.of_lead[:, None])
    return np.hstack(slopes)


def _seconds(columns: Columns, log_unit_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.maximum(columns.amounts * np.exp(log_unit_s), _LEAST)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Law:
    """Log seconds, ``(rows,)``, and their derivatives."""

    log_time: NDArray[np.float64]
    of_units: NDArray[np.float64]
    """Derivative by the log of each column's unit, ``(rows, columns)``."""
    of_power: NDArray[np.float64]
    """Derivative by the log of the exponent, ``(rows,)``."""
    of_lead: NDArray[np.float64]
    """Derivative by the share of work in the lead, ``(rows,)``."""


def _law(parts: NDArray[np.float64], log_power: float, lead_frac: float) -> _Law:
    """Return the power mean of seconds ``(rows, columns)``; for a chain, of launches plus the lead
    share of the work, and of the work."""
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


def _overlapped(parts: NDArray[np.float64], log_power: float) -> _Law:
    """Return a launch plus the power mean of the other seconds, ``(rows, columns)``."""
    power = np.exp(log_power)
    shares, logs, total = _power_shares(parts[:, 1:], power)
    work = parts[:, 1:].max(axis=1) * total ** (1.0 / power)
    whole = parts[:, 0] + work
    frac = work / whole
    return _Law(
        log_time=np.log(whole),
        of_units=np.column_stack([parts[:, 0] / whole, frac[:, None] * shares]),
        of_power=frac * ((shares * logs).sum(axis=1) - np.log(total) / power),
        of_lead=np.zeros(len(parts)),
    )


def _power_shares(
    parts: NDArray[np.float64], power: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return shares of the powers in their sum, logs of parts over the largest, and the sum of the
    relative powers."""
    relative = parts / parts.max(axis=1, keepdims=True)
    powers = relative**power
    total = powers.sum(axis=1)
    return powers / total[:, None], np.log(relative), total


def _sigmoid(value: float) -> float:
    return float(1.0 / (1.0 + np.exp(-value)))

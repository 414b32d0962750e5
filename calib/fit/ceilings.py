"""The machine's ceilings, estimated from the samples themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator, OperatorKind, Phase
from .laws import Ceilings, Family, family, work
from .priors import DevicePrior
from .robust import robust_minimum

# How far the efficiency of one operator kind and phase may lie from the others' (log, one sigma):
# products run at similar rates, pass counts of the rest are rough.
_OFFSET_SIGMA_LOG = {
    Family.LINEAR: 0.15, Family.ATTENTION: 0.7, Family.MEMORY: 0.7, Family.OPTIMIZER: 0.5,
}
_SAMPLE_SIGMA_LOG = 0.1
_ENVELOPE_QUANTILE = 0.9
_LAUNCH_SIGMA_FACTOR = 0.7


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rows:
    """What was measured, ``(samples,)``; ``cost`` in FLOP, bytes and launches, ``(samples, 3)``."""

    cost: NDArray[np.float64]
    log_time: NDArray[np.float64]
    group: NDArray[np.int64]
    offset_sigma: NDArray[np.float64]
    weight: NDArray[np.float64]
    is_linear: NDArray[np.bool_]


def estimate_ceilings(
    operators: Sequence[Operator],
    time_s: NDArray[np.float64],
    weight: NDArray[np.float64],
    prior: DevicePrior,
) -> Ceilings:
    """Launch, FLOP and byte rates that explain the samples together, scaled to their envelope.

    A maximum-a-posteriori fit of ``launches * launch_s + flop / flop_per_s + nbytes / bytes_per_s``
    in log time, with one free factor per operator kind and phase: a rate that the samples do not
    identify stays at the prior.  The envelope is the 90 % quantile of the products' efficiency.
    """
    keep = [i for i, o in enumerate(operators) if family(o.kind) is not Family.HOST]
    start = _start(operators, prior)
    if not keep:
        return _ceilings(start)
    rows = _rows([operators[i] for i in keep], time_s[keep], weight[keep])
    sigma = prior.sigma_log * np.array([1.0, 1.0, _LAUNCH_SIGMA_FACTOR])
    logs = _fit(rows, start, sigma)
    efficiency = _log_law(rows, logs) - rows.log_time
    chosen = efficiency[rows.is_linear] if rows.is_linear.any() else efficiency
    return _ceilings(logs + float(np.quantile(chosen, _ENVELOPE_QUANTILE)))


def _start(operators: Sequence[Operator], prior: DevicePrior) -> NDArray[np.float64]:
    """Logarithms of FLOP rate, byte rate and launch rate."""
    sizes = [o.element_nbytes for o in operators if o.kind.is_linear]
    ceilings = prior.ceilings_for(int(np.median(sizes)) if sizes else 2)
    return np.log([ceilings.flop_per_s, ceilings.bytes_per_s, 1.0 / ceilings.launch_s])


def _ceilings(logs: NDArray[np.float64]) -> Ceilings:
    flop_per_s, bytes_per_s, launches_per_s = np.exp(logs).tolist()
    return Ceilings(flop_per_s=flop_per_s, bytes_per_s=bytes_per_s, launch_s=1.0 / launches_per_s)


def _rows(
    operators: Sequence[Operator], time_s: NDArray[np.float64], weight: NDArray[np.float64]
) -> _Rows:
    done = [work(o) for o in operators]
    groups: dict[tuple[OperatorKind, Phase], int] = {}
    group = np.array([groups.setdefault((o.kind, o.phase), len(groups)) for o in operators])
    return _Rows(
        cost=np.array([[w.flop, w.nbytes, w.num_launches] for w in done], dtype=np.float64),
        log_time=np.log(time_s), group=group, weight=np.sqrt(weight),
        offset_sigma=np.array([_OFFSET_SIGMA_LOG[family(kind)] for kind, _ in groups]),
        is_linear=np.array([o.kind.is_linear for o in operators]),
    )


def _log_law(rows: _Rows, logs: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.log(rows.cost @ np.exp(-logs))


def _fit(
    rows: _Rows, start: NDArray[np.float64], sigma: NDArray[np.float64]
) -> NDArray[np.float64]:
    num_samples, num_groups = len(rows.log_time), len(rows.offset_sigma)
    scale = rows.weight / _SAMPLE_SIGMA_LOG

    def residuals(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        logs, offsets = theta[:3], theta[3:]
        data = (_log_law(rows, logs) + offsets[rows.group] - rows.log_time) * scale
        return np.concatenate([data, (logs - start) / sigma, offsets / rows.offset_sigma])

    def jacobian(theta: NDArray[np.float64]) -> NDArray[np.float64]:
        out = np.zeros((num_samples + 3 + num_groups, 3 + num_groups))
        parts = rows.cost * np.exp(-theta[:3])
        out[:num_samples, :3] = -parts / parts.sum(axis=1, keepdims=True) * scale[:, None]
        out[np.arange(num_samples), 3 + rows.group] = scale
        out[num_samples:, :] = np.diag(1.0 / np.concatenate([sigma, rows.offset_sigma]))
        return out

    first = np.concatenate([start, np.zeros(num_groups)])
    return robust_minimum(residuals, jacobian, first)[:3]

"""Figures of step predictions: errors, intervals, order of layouts, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.stats import kendalltau

from ..records.step_rows import StepKind, StepRow
from ..regressors.choices import first_of_least
from .scores import ALL_GROUPS, FIGURES
from .steps import StepsScored

MIN_RANKED = 4
"""Layouts that a group needs to be ranked."""
TIE_FRAC = 0.02
"""Measured times closer than this count as equal in ``kendall_tau_without_ties``."""
NUM_WORST = 10
RANK_FIGURES = (
    "kendall_tau",
    "kendall_tau_without_ties",
    "regret_median_frac",
    "regret_p95_frac",
)
STEP_FIGURES = (*FIGURES, "p90_draw_mape_frac", *RANK_FIGURES, "memory_mape_frac")


def step_results(scored: Sequence[StepsScored], table: str) -> list[dict[str, Any]]:
    """One JSON row per protocol and group; first ``all``, then each machine, then each group.

    Every figure is over the rows of all draws together, each with equal weight.  Kendall's tau is
    scipy's tau-b of predicted against measured times within a ranking group and draw that scores
    four rows or more, then the mean over these; ``..._without_ties`` leaves out pairs whose
    measured times are within 2 %.  Regret is the measured time of the layout that the model would
    choose over the best measured one, minus 1.  Figures that cannot be told are None.
    """
    results = []
    for protocol in dict.fromkeys(one.protocol for one in scored):
        members = [one for one in scored if one.protocol == protocol]
        kinds = {row.kind for one in members for row in one.rows}
        head = {"table": table, "protocol": protocol}
        synthetic = {"is_synthetic": True} if kinds == {StepKind.SYNTHETIC} else {}
        results.append({**head, "group": ALL_GROUPS, **_figures(members), **synthetic})
        names = list(dict.fromkeys(one.machine for one in members))
        for name in names if len(names) > 1 else ():
            of_machine = [one for one in members if one.machine == name]
            results.append({**head, "group": name, **_figures(of_machine), **synthetic})
        for name in dict.fromkeys(row.group for one in members for row in one.rows):
            parts = [_of_group(one, name) for one in members]
            figures = _figures([part for part in parts if part.rows])
            results.append({**head, "group": name, **figures, **synthetic})
    return results


def step_rows(scored: Sequence[StepsScored], table: str) -> list[dict[str, Any]]:
    """Every scored row of every draw: measured, predicted, interval, memory."""
    found = []
    for one in scored:
        for i, row in enumerate(one.rows):
            told = {
                "table": table,
                "protocol": one.protocol,
                "draw": one.draw,
                "machine": one.machine,
                "group": row.group,
                "row_id": row.row_id,
                "measured_s": _number(row.measured_s),
                "predicted_s": _number(one.predicted_s[i]),
                "low_s": _number(one.low_s[i]),
                "high_s": _number(one.high_s[i]),
                "measured_memory_nbytes": row.measured_memory_nbytes,
                "predicted_memory_nbytes": _number(one.memory_nbytes[i]),
            }
            found.append(told | ({"reason": one.reasons[i]} if one.reasons[i] else {}))
    return found


def worst_rows(scored: Sequence[StepsScored], count: int = NUM_WORST) -> list[dict[str, Any]]:
    """The rows with the largest mean absolute error over draws, with the mean signed error."""
    errors: dict[str, list[float]] = {}
    layouts: dict[str, str] = {}
    for one in scored:
        for row, error in zip(one.rows, one.error_frac, strict=True):
            if math.isfinite(error):
                errors.setdefault(row.row_id, []).append(float(error))
                layouts[row.row_id] = layout_text(row)
    means = {name: float(np.mean(found)) for name, found in errors.items()}
    sizes = {name: float(np.mean(np.abs(found))) for name, found in errors.items()}
    names = sorted(sizes, key=lambda name: -sizes[name])[:count]
    return [
        {
            "row_id": name,
            "layout": layouts[name],
            "error_frac": round(means[name], 6),
            "mean_ape_frac": round(sizes[name], 6),
        }
        for name in names
    ]


def layout_text(row: StepRow) -> str:
    """The layout of a row in one word for each degree that is not one.

    Micro-batch size and number of micro-batches are always there: ``tp8 pp4 dp2 mb1x32``.
    """
    par, config = row.config.parallelism, row.config
    degrees = {name: getattr(par, name) for name in ("tp", "pp", "vp", "dp", "cp", "ep")}
    parts = [f"{name}{degree}" for name, degree in degrees.items() if degree > 1]
    return " ".join([*parts, f"mb{config.batch.micro_batch_size}x{config.num_microbatches}"])


def tau_without_ties(measured: NDArray[np.float64], predicted: NDArray[np.float64]) -> float:
    """Kendall's (C - D) / (C + D) over the pairs whose measured times differ by more than 2 %.

    >>> tau_without_ties(np.array([1.0, 1.01, 2.0]), np.array([1.2, 1.1, 1.9]))
    1.0
    """
    first, second = np.triu_indices(len(measured), 1)
    lower = np.minimum(measured[first], measured[second])
    apart = np.abs(measured[first] - measured[second]) > TIE_FRAC * lower
    signs = np.sign(measured[first] - measured[second]) * np.sign(
        predicted[first] - predicted[second]
    )
    chosen = signs[apart]
    return float(chosen.mean()) if len(chosen) else math.nan


def _figures(members: Sequence[StepsScored]) -> dict[str, Any]:
    measured = _joined([one.measured_s for one in members])
    predicted = _joined([one.predicted_s for one in members])
    low, high = _joined([o.low_s for o in members]), _joined([o.high_s for o in members])
    is_told = np.isfinite(predicted) & np.isfinite(low)
    error = predicted[is_told] / measured[is_told] - 1
    inside = (low <= measured)[is_told] & (measured <= high)[is_told]
    width = ((high - low) / 2 / predicted)[is_told]
    figures: dict[str, Any] = dict.fromkeys((*STEP_FIGURES, "max_ape_frac"))
    num_abstained = int((~np.isfinite(predicted)).sum())
    if len(error):
        size = np.abs(error)
        values = (size.mean(), np.median(size), np.quantile(size, 0.9), error.mean())
        named = dict(zip(FIGURES, (*values, inside.mean(), width.mean()), strict=True))
        figures |= {name: _number(value) for name, value in named.items()}
        figures["p90_draw_mape_frac"] = _p90_of_draws(members)
        figures["max_ape_frac"] = _number(size.max())
    figures |= {**_ranking(members), "memory_mape_frac": _memory_error(members)}
    return {"n": len(measured), "num_abstained": num_abstained, **figures}


def _p90_of_draws(members: Sequence[StepsScored]) -> float | None:
    by_draw: dict[int, list[float]] = {}
    for one in members:
        errors = np.abs(one.error_frac)
        by_draw.setdefault(one.draw, []).extend(errors[np.isfinite(errors)].tolist())
    means = [float(np.mean(found)) for found in by_draw.values() if found]
    return _number(float(np.quantile(means, 0.9))) if means else None


def _ranking(members: Sequence[StepsScored]) -> Mapping[str, Any]:
    groups: dict[tuple[str, int, str], list[tuple[float, float]]] = {}
    for one in members:
        for row, predicted in zip(one.rows, one.predicted_s, strict=True):
            if math.isfinite(predicted):
                key = (one.machine, one.draw, row.group)
                groups.setdefault(key, []).append((row.measured_s, float(predicted)))
    taus, plain, regrets = [], [], []
    for pairs in groups.values():
        if len(pairs) < MIN_RANKED:
            continue
        measured, predicted = np.array(pairs, dtype=np.float64).T
        taus.append(float(np.asarray(kendalltau(predicted, measured))[0]))
        plain.append(tau_without_ties(measured, predicted))
        regrets.append(float(measured[first_of_least(predicted)] / measured.min() - 1))
    if not regrets:
        return dict.fromkeys(RANK_FIGURES)
    values = (
        _mean(taus),
        _mean(plain),
        float(np.median(regrets)),
        float(np.quantile(regrets, 0.95)),
    )
    return {name: _number(v) for name, v in zip(RANK_FIGURES, values, strict=True)}


def _memory_error(members: Sequence[StepsScored]) -> float | None:
    errors = [
        abs(estimate / row.measured_memory_nbytes - 1)
        for one in members
        for row, estimate in zip(one.rows, one.memory_nbytes, strict=True)
        if row.measured_memory_nbytes and math.isfinite(estimate)
    ]
    return _number(float(np.mean(errors))) if errors else None


def _of_group(one: StepsScored, group: str) -> StepsScored:
    chosen = [i for i, row in enumerate(one.rows) if row.group == group]
    return StepsScored(
        protocol=one.protocol,
        draw=one.draw,
        machine=one.machine,
        rows=tuple(one.rows[i] for i in chosen),
        predicted_s=one.predicted_s[chosen],
        low_s=one.low_s[chosen],
        high_s=one.high_s[chosen],
        reasons=tuple(one.reasons[i] for i in chosen),
        memory_nbytes=one.memory_nbytes[chosen],
    )


def _joined(parts: Sequence[NDArray[np.float64]]) -> NDArray[np.float64]:
    return np.concatenate([np.empty(0), *parts])


def _mean(values: Sequence[float]) -> float:
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None

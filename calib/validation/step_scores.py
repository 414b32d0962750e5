"""Figures of step predictions: errors, intervals, order of layouts, memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.stats import kendalltau

from ..records.step_rows import StepKind, StepRow
from ..regressors.choices import first_of_least
from .scores import ALL_GROUPS, FIGURES, TIMES, figures

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


def step_results(scored: pd.DataFrame, table: str) -> list[dict[str, Any]]:
    """One JSON row per protocol and group; first ``all``, then each machine, then each group.

    Every figure is over the rows of all draws together, each with equal weight.  Kendall's tau is
    scipy's tau-b of predicted against measured times within a ranking group and draw that scores
    four rows or more, then the mean over these; ``..._without_ties`` leaves out pairs whose
    measured times are within 2 %.  Regret is the measured time of the layout that the model would
    choose over the best measured one, minus 1.  Figures that cannot be told are None.
    """
    results = []
    for protocol, members in scored.groupby("protocol", sort=False):
        kinds = {row.kind for row in members["row"]}
        synthetic = {"is_synthetic": True} if kinds == {StepKind.SYNTHETIC} else {}
        of_machines = [*members.groupby("machine", sort=False)]
        parts = [
            (ALL_GROUPS, members),
            *(of_machines if len(of_machines) > 1 else ()),
            *members.groupby("group", sort=False),
        ]
        head = {"table": table, "protocol": protocol}
        results += [{**head, "group": name, **_figures(part), **synthetic} for name, part in parts]
    return results


def step_rows(scored: pd.DataFrame, table: str) -> list[dict[str, Any]]:
    """Every scored row of every draw: measured, predicted, interval, memory."""
    found = []
    for one in scored.to_dict("records"):
        row: StepRow = one["row"]
        told = {
            "table": table,
            **{name: one[name] for name in ("protocol", "draw", "machine", "group")},
            "row_id": row.row_id,
            **{name: _number(one[name]) for name in TIMES},
            "measured_memory_nbytes": row.measured_memory_nbytes,
            "predicted_memory_nbytes": _number(one["memory_nbytes"]),
        }
        found.append(told | ({"reason": one["reason"]} if one["reason"] else {}))
    return found


def worst_rows(scored: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows with the largest mean absolute error over draws, with the mean signed error.

    None of a frame without rows, which may have no columns either.
    """
    if scored.empty:
        return []
    told = scored[np.isfinite(scored["error_frac"])]
    by_row = [*told.groupby(told["row"].map(lambda row: row.row_id), sort=False)]
    sizes = [part["error_frac"].abs().mean() for _, part in by_row]
    return [
        {
            "row_id": by_row[place][0],
            "layout": layout_text(by_row[place][1]["row"].iloc[-1]),
            "error_frac": round(float(by_row[place][1]["error_frac"].mean()), 6),
            "mean_ape_frac": round(float(sizes[place]), 6),
        }
        for place in sorted(range(len(by_row)), key=lambda place: -sizes[place])[:NUM_WORST]
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


def _figures(rows: pd.DataFrame) -> dict[str, Any]:
    is_predicted = np.isfinite(rows["predicted_s"])
    told = rows[is_predicted & np.isfinite(rows["low_s"])]
    found: dict[str, Any] = dict.fromkeys((*STEP_FIGURES, "max_ape_frac"))
    if len(told):
        found |= figures(told)
        size = rows["error_frac"].abs()[is_predicted]
        of_draws = size.groupby(rows["draw"][is_predicted]).mean()
        found["p90_draw_mape_frac"] = np.quantile(of_draws, 0.9)
        found["max_ape_frac"] = told["error_frac"].abs().max()
    found |= {**_ranking(rows[is_predicted]), "memory_mape_frac": _memory_error(rows)}
    rounded = {name: None if value is None else _number(value) for name, value in found.items()}
    return {"n": len(rows), "num_abstained": int((~is_predicted).sum()), **rounded}


def _ranking(rows: pd.DataFrame) -> Mapping[str, Any]:
    taus, plain, regrets = [], [], []
    for _, part in rows.groupby(["machine", "draw", "group"], sort=False):
        if len(part) < MIN_RANKED:
            continue
        measured, predicted = part["measured_s"].to_numpy(), part["predicted_s"].to_numpy()
        taus.append(float(np.asarray(kendalltau(predicted, measured))[0]))
        plain.append(tau_without_ties(measured, predicted))
        regrets.append(float(measured[first_of_least(predicted)] / measured.min() - 1))
    if not regrets:
        return {}
    values = _mean(taus), _mean(plain), np.median(regrets), np.quantile(regrets, 0.95)
    return dict(zip(RANK_FIGURES, values, strict=True))


def _memory_error(rows: pd.DataFrame) -> float:
    measured = [row.measured_memory_nbytes or math.nan for row in rows["row"]]
    return _mean(np.abs(rows["memory_nbytes"].to_numpy() / np.array(measured) - 1))


def _mean(values: Sequence[float] | NDArray[np.float64]) -> float:
    """Of the finite ones; NaN where there are none."""
    finite = [v for v in values if math.isfinite(v)]
    return float(np.mean(finite)) if finite else math.nan


def _number(value: float) -> float | None:
    return round(float(value), 6) if math.isfinite(value) else None

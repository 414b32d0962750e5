"""Scores of estimated transfers; for ``models.py``."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from forerun.benchmarks.protocols.collectives import COLLECTIVE_PROTOCOLS, scored_rows

LARGE_NBYTES = 16 * 2**20
HUGE_NBYTES = 256 * 10**6
OURS = "ours"
CURVE = ["device", "fabric", "collective", "num_ranks", "num_nodes"]


def collective_figures(table: pd.DataFrame, name: str, seeds: Sequence[int]) -> pd.DataFrame:
    """Return one row per protocol of a canonical table, every collective with equal weight.

    Mean absolute percentage errors over all payloads (``mape_frac``), from 16 MiB
    (``large_mape_frac``) and above 256 MB (``huge_mape_frac``); coverage and half-width of the 90 %
    interval; mean distance of a payload's repeats from their median (``floor_frac``).
    ``leave_span`` is split by whether the machine has several nodes.
    """
    floor = repeats_frac(table[table["flag"] == ""])
    several = table.groupby(["device", "fabric"])["num_nodes"].transform("max") > 1
    parts = {
        protocol: (protocol, table) for protocol in COLLECTIVE_PROTOCOLS if protocol != "leave_span"
    }
    parts["leave_span, one node"] = ("leave_span", table[~several])
    parts["leave_span, nodes x 4"] = ("leave_span", table[several])
    rows = []
    for label, (protocol, part) in parts.items():
        scored = scored_rows(part, protocol, seeds=seeds)
        if len(scored):
            labels = {"table": name, "protocol": label, "n": len(scored)}
            inside, width = intervals(scored)
            figures = {"coverage_90_frac": inside, "interval_width_frac": width}
            rows.append({**labels, **errors(scored), **figures, "floor_frac": floor})
    return pd.DataFrame(rows)


def errors(rows: pd.DataFrame) -> dict[str, float]:
    """Return MAPE over all, large and huge payloads, mean over collectives; NaN if none."""
    error = (rows["predicted_s"] / rows["measured_s"] - 1.0).abs()
    least = {"mape_frac": 0, "large_mape_frac": LARGE_NBYTES, "huge_mape_frac": HUGE_NBYTES}
    masks = {name: rows["nbytes"] >= nbytes for name, nbytes in least.items()}
    return {n: float(error[k].groupby(rows["group"][k]).mean().mean()) for n, k in masks.items()}


def intervals(rows: pd.DataFrame) -> tuple[float, float]:
    """Return the share of measurements inside their 90 % interval and half of it over the estimate,
    mean over collectives."""
    inside = rows["measured_s"].between(rows["low_s"], rows["high_s"])
    width = (rows["high_s"] - rows["low_s"]) / 2 / rows["predicted_s"]
    by = rows["group"]
    return float(inside.groupby(by).mean().mean()), float(width.groupby(by).mean().mean())


def repeats_frac(table: pd.DataFrame) -> float:
    """Return the mean distance of repeats from their median; NaN if nothing was repeated."""
    times = table.groupby([*CURVE, "nbytes"])["time_s"]
    distance = (table["time_s"] / times.transform("median") - 1.0).abs()
    repeated = distance[times.transform("size") > 1]
    return (
        float(repeated.groupby(table["collective"]).mean().mean())
        if len(repeated)
        else float("nan")
    )

"""Scores of operator models on rows that each protocol holds out; run by ``models.py``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols import scores
from forerun.benchmarks.protocols.operator_samples import (
    OperatorSamples,
    generator,
    operator_samples,
    splits,
)
from forerun.benchmarks.protocols.operators import (
    DEVICE_PROBES,
    OPERATOR_PROTOCOLS,
    Fit,
    scored_cells,
    validate_operators,
)
from forerun.benchmarks.protocols.scores import Split
from forerun.calib.fit._outliers import refuse
from forerun.calib.fit._pools import coordinates
from forerun.calib.fit.priors import device_prior

CHOSEN = "chosen_24"
"""Like ``few_24``, with shapes spread evenly over those of the table."""
NUM_CHOSEN = 24
MIN_TEST = 5
PROTOCOLS = (*(p for p in OPERATOR_PROTOCOLS if p != "leave_tp"), CHOSEN, "leave_tp")
WITHOUT_REFUSED = ", without refused rows"
"""Suffix of the protocol's name if rows that the gates refuse are not scored."""
Mask = NDArray[np.bool_]


def figures(
    frame: pd.DataFrame,
    method: str,
    fit: Fit,
    seeds: Sequence[int],
    *,
    protocols: Sequence[str] = PROTOCOLS,
) -> pd.DataFrame:
    """Return one row per protocol and group of a canonical table, with its figures.

    If the gates refuse rows that a protocol scores, it also has figures without these rows.
    """
    parts = []
    for protocol in protocols:
        predicted = predictions(frame, protocol, seeds, fit)
        if predicted.empty:
            continue
        parts.append(_figures(predicted, method, protocol))
        if predicted["is_refused"].any():
            answered = predicted[~predicted["is_refused"]]
            parts.append(_figures(answered, method, protocol + WITHOUT_REFUSED))
    return joined(parts)


def _figures(predicted: pd.DataFrame, method: str, protocol: str) -> pd.DataFrame:
    rows = []
    for group, part in predicted.groupby("group", sort=False):
        name, _, phase = str(group).rpartition("/")
        labels = {"method": method, "protocol": protocol, "operator": name, "phase": phase}
        rows.append({**labels, "n": len(part), **scores.figures(part)})
    return pd.DataFrame(
        rows, columns=["method", "protocol", "operator", "phase", "n", *scores.FIGURES]
    )


def predictions(frame: pd.DataFrame, protocol: str, seeds: Sequence[int], fit: Fit) -> pd.DataFrame:
    """Return every row that a protocol scores, with ``is_refused``.

    The splits are those of ``protocols/operators.py``; ``chosen_24`` is only here.
    """
    if protocol == "leave_gpu" or protocol in DEVICE_PROBES:
        predicted = validate_operators(frame, seeds=seeds, protocols=[protocol], fit=fit)
        return predicted.assign(is_refused=False)
    devices: dict[str, list[OperatorSamples]] = {}
    for samples in operator_samples(frame):
        devices.setdefault(samples.device, []).append(samples)
    parts = []
    for members in devices.values():
        refused = refused_rows(members)
        for scored in scored_cells(members, protocol, seeds, fit, draw=_splits):
            is_refused = refused[scored["group"].iloc[0]][scored.index]
            parts.append(scored.assign(is_refused=is_refused))
    return joined(parts)


def joined(parts: Iterable[pd.DataFrame]) -> pd.DataFrame:
    """Concatenate the non-empty parts; without any rows there are no columns either."""
    return pd.concat([p for p in parts if len(p)] or [pd.DataFrame()], ignore_index=True)


def _splits(samples: OperatorSamples, protocol: str, seed: int) -> Iterable[tuple[str, Split]]:
    if protocol != CHOSEN:
        return splits(samples, protocol, seed)
    if len(samples) < NUM_CHOSEN + MIN_TEST:
        return []
    train = np.zeros(len(samples), dtype=bool)
    train[spread_samples(samples, NUM_CHOSEN, generator(samples, protocol, seed))] = True
    return [("", Split(train=train, test=~train))]


def spread_samples(
    samples: OperatorSamples, number: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """Return samples that fill the space of sizes: each next one is that farthest from all before.

    Distances are in octaves of each size; the first sample is random.  Times are not used.
    """
    cell = max(samples.cells, key=lambda c: len(c.timed))
    points = coordinates(cell.timed.batch)
    chosen = [int(rng.integers(len(points)))]
    nearest = np.full(len(points), np.inf)
    while len(chosen) < min(number, len(points)):
        apart = np.linalg.norm(points - points[chosen[-1]], axis=1)
        nearest = np.minimum(nearest, apart)
        nearest[chosen] = -1.0
        chosen.append(int(np.argmax(nearest)))
    return cell.sample[chosen]


def refused_rows(members: Sequence[OperatorSamples]) -> dict[str, Mask]:
    """Return masks of each group's rows that the fit's gates refuse, given all of one device."""
    prior = device_prior(members[0].device)
    timed = {cell.name: cell.timed for samples in members for cell in samples.cells}
    # The gates ignore weights, so the weight carries the row's index here.
    numbered = {
        name: replace(group_timed, weight=np.arange(len(group_timed), dtype=np.float64))
        for name, group_timed in timed.items()
    }
    refused = {name: np.ones(len(group_timed), dtype=bool) for name, group_timed in timed.items()}
    passed, _ = refuse(numbered, prior.peaks_for if prior.num_units else None)
    for name, accepted in passed.items():
        refused[name][accepted.weight.astype(np.int64)] = False
    return refused

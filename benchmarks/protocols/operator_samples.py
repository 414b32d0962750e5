"""Splits of an operator group into training and scored rows, by protocol.

Forward and backward of one shape are always on the same side: a split is drawn over samples, and a
sample is a shape (the k-th repeat of it if measured more than once) with its times in all phases.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols import scores
from forerun.benchmarks.protocols.scores import (
    PROTOCOLS,
    TEST_FRAC,
    Split,
    sample_splits,
    samples_of,
    usable,
)
from forerun.calib.fit.batches import Timed
from forerun.calib.fit.laws import work_of
from forerun.calib.steps._operator_tables import timed_rows
from forerun.calib.workload.operators import OperatorKind, Phase


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One operator in one phase on one device."""

    group: str
    phase: Phase
    timed: Timed
    sample: NDArray[np.int64]
    """Index of the operator's sample for each row, ``(rows,)``."""

    @property
    def name(self) -> str:
        """Name of the group in fits and scores."""
        return f"{self.group}/{self.phase.value}"

    def where(self, chosen: NDArray[np.bool_]) -> Timed:
        """Return the rows of the chosen samples; ``chosen`` is a mask over all samples."""
        return self.timed.take(chosen[self.sample])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorSamples:
    """All samples of one operator on one device."""

    device: str
    group: str
    cells: tuple[Cell, ...]
    work: NDArray[np.float64]
    """Law size of each sample, ``(samples,)``, which orders them from small to large."""
    tp: NDArray[np.int64]
    """Tensor-parallel degree of each sample, 0 if unknown."""

    def __len__(self) -> int:
        return len(self.work)

    @property
    def kind(self) -> OperatorKind:
        """Kind of the operator."""
        return self.cells[0].timed.batch.kind


def operator_samples(frame: pd.DataFrame) -> list[OperatorSamples]:
    """Return the operators of a canonical table in its order, without flagged rows."""
    usable = frame[frame["flag"] == ""]
    return [
        _samples(str(device), str(group), rows)
        for (device, group), rows in usable.groupby(["device", "group"], sort=False)
    ]


def _samples(device: str, group: str, rows: pd.DataFrame) -> OperatorSamples:
    code, tp = samples_of(rows)
    sample_at = pd.Series(code, index=rows.index)
    work = np.zeros(len(tp))
    cells = []
    for (_, phase), part in rows.groupby(["kind", "phase"], sort=False):
        timed, sample = timed_rows(part), sample_at[part.index].to_numpy()
        cells.append(Cell(group=group, phase=Phase(phase), timed=timed, sample=sample))
        work[sample] = np.maximum(work[sample], work_of(timed.batch))
    return OperatorSamples(device=device, group=group, cells=tuple(cells), work=work, tp=tp)


def splits(samples: OperatorSamples, protocol: str, seed: int) -> Iterator[tuple[str, Split]]:
    """Yield the splits of a protocol, each with a label of the fit it belongs to.

    Yields nothing if the operator has too few samples, or only one degree for ``leave_tp``.
    """
    rng, count = generator(samples, protocol, seed), len(samples)
    if protocol in PROTOCOLS["operators"]:
        yield from sample_splits(samples.tp, protocol, rng)
        return
    if is_drawn := protocol.startswith("few_"):
        order, few = rng.permutation(count), int(protocol.removeprefix("few_"))
        train_end, test_begin = few, few
    else:
        order = np.argsort(samples.work, kind="stable")
        train_end, test_begin = count // 2, count - round(TEST_FRAC * count)
    place = np.argsort(order)
    split = Split(train=place < train_end, test=place >= test_begin, is_drawn=is_drawn)
    yield from usable("", split, rng)


def generator(samples: OperatorSamples, protocol: str, seed: int) -> np.random.Generator:
    """Return a generator for one operator, independent of the rest of the table."""
    return scores.generator(samples.device, samples.group, protocol, seed)

"""Which rows of an operator group train and which are scored, by protocol.

Forward and backward of one shape always fall on the same side: a split is drawn over samples, and
a sample is a shape (the k-th of it where a shape was measured more than once) with its times in
all phases.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..fit.batches import ShapeBatch, Timed
from ..fit.laws import work_of
from ..importers.own_format import shape_sizes
from ..workload.operators import OperatorKind, Phase

MAX_ROWS = 2000
"""Rows of a group that train, and rows that are scored, at most, for each seed."""
TEST_FRAC = 0.2
_MIN_TRAIN = 8
_MIN_TEST = 5
"""A protocol is left out where it has fewer samples than these."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Cell:
    """One operator in one phase on one device."""

    group: str
    phase: Phase
    timed: Timed
    sample: NDArray[np.int64]
    """Which sample of the operator a row is of, ``(rows,)``."""

    @property
    def name(self) -> str:
        """How fits and scores call it."""
        return f"{self.group}/{self.phase.value}"

    def where(self, chosen: NDArray[np.bool_]) -> Timed:
        """The rows of the chosen samples; ``chosen`` is a mask over all samples."""
        return self.timed.take(chosen[self.sample])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OperatorSamples:
    """All samples of one operator on one device."""

    device: str
    group: str
    cells: tuple[Cell, ...]
    work: NDArray[np.float64]
    """Law size of each sample, ``(samples,)``: what small and large mean."""
    tp: NDArray[np.int64]
    """Tensor-parallel degree of each sample, 0 where unknown."""

    def __len__(self) -> int:
        return len(self.work)

    @property
    def kind(self) -> OperatorKind:
        """What it computes."""
        return self.cells[0].timed.batch.kind


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """Masks over what is split: samples of one operator, or rows of one table of transfers."""

    train: NDArray[np.bool_]
    test: NDArray[np.bool_]
    is_drawn: bool = True
    """False where every seed gives the same split."""


def operator_samples(frame: pd.DataFrame) -> list[OperatorSamples]:
    """The operators of a canonical table, flagged rows left out, in the order of the table."""
    usable = frame[frame["flag"] == ""]
    return [
        _samples(str(device), str(group), rows)
        for (device, group), rows in usable.groupby(["device", "group"], sort=False)
    ]


def _samples(device: str, group: str, rows: pd.DataFrame) -> OperatorSamples:
    tp = pd.to_numeric(rows["tp"]).fillna(0).astype(np.int64)
    identity = [rows["kind"], rows["shape"], rows["element_nbytes"], tp]
    repeat = rows.groupby(["phase", "kind", "shape", "element_nbytes", tp], sort=False).cumcount()
    code = pd.Series(
        rows.groupby([*identity, repeat], sort=False).ngroup().to_numpy(), index=rows.index
    )
    num_samples = int(code.max()) + 1
    work, degrees = np.zeros(num_samples), np.zeros(num_samples, dtype=np.int64)
    cells = []
    for (kind, phase), part in rows.groupby(["kind", "phase"], sort=False):
        batch = ShapeBatch(
            kind=OperatorKind(kind),
            phase=Phase(phase),
            sizes=shape_sizes(part["shape"]),
            element_nbytes=part["element_nbytes"].to_numpy(dtype=np.float64),
        )
        sample = code[part.index].to_numpy()
        timed = Timed(
            batch=batch,
            time_s=part["time_s"].to_numpy(dtype=np.float64),
            weight=np.ones(len(part)),
        )
        cells.append(Cell(group=group, phase=batch.phase, timed=timed, sample=sample))
        work[sample] = np.maximum(work[sample], work_of(batch))
        degrees[sample] = tp[part.index].to_numpy()
    return OperatorSamples(device=device, group=group, cells=tuple(cells), work=work, tp=degrees)


def splits(samples: OperatorSamples, protocol: str, seed: int) -> Iterator[tuple[str, Split]]:
    """The splits of a protocol, each with a label that says which fit it belongs to.

    None where the operator has too few samples for it, or one degree only for ``leave_tp``.
    """
    rng, count = generator(samples, protocol, seed), len(samples)
    is_drawn = protocol in ("random", "few_8", "few_24")
    planned: dict[str, tuple[NDArray[np.bool_], NDArray[np.bool_]]] = {}
    if protocol == "leave_tp":
        degrees = np.unique(samples.tp[samples.tp > 0])
        for degree in degrees if len(degrees) > 1 else ():
            planned[f"tp {degree}"] = samples.tp != degree, samples.tp == degree
    else:
        order = rng.permutation(count) if is_drawn else np.argsort(samples.work, kind="stable")
        place = np.argsort(order)
        cut = count - round(TEST_FRAC * count)
        ends = {"random": (cut, cut), "small_to_large": (count // 2, cut)}
        few = int(protocol.removeprefix("few_")) if protocol not in ends else 0
        train_end, test_begin = ends.get(protocol, (few, few))
        planned[""] = place < train_end, place >= test_begin
    for label, (train, test) in planned.items():
        if train.sum() >= _MIN_TRAIN and test.sum() >= _MIN_TEST:
            yield label, _capped(Split(train=train, test=test, is_drawn=is_drawn), rng)


def generator(samples: OperatorSamples, protocol: str, seed: int) -> np.random.Generator:
    """Draws of one operator, which do not depend on what else the table holds."""
    name = f"{samples.device}/{samples.group}/{protocol}"
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _capped(split: Split, rng: np.random.Generator) -> Split:
    """At most ``MAX_ROWS`` samples on either side, drawn where there are more."""
    masks = {}
    for side in ("train", "test"):
        mask = getattr(split, side)
        rows = np.flatnonzero(mask)
        if len(rows) > MAX_ROWS:
            keep = np.zeros_like(mask)
            keep[rng.choice(rows, MAX_ROWS, replace=False)] = True
            masks[side] = keep
    return replace(split, **masks, is_drawn=split.is_drawn or bool(masks))

"""One pool of operators: a law with fitted rates, and what regressors learn beside it.

Matrix products of one phase form a pool, since they run at one machine's rate; every other
operator is a pool of its own.  The regressors learn the log of measured time over the law's time,
which is the negative log of efficiency up to a constant.  They see shapes as numbers: where a shape
lies, and what its tiles leave idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..regressors import (
    UNMEASURED_SIGMA_LOG,
    Forest,
    GaussianProcess,
    Inputs,
    Line,
    Trees,
    fit_forest,
    fit_gaussian,
    fit_line,
    fit_trees,
    robust_sigma,
    stacked,
)
from ..workload import OperatorKind
from .batches import ShapeBatch, Timed
from .laws import columns
from .operator_kinds import KINDS, Columns, products
from .rates import Form, Rates, fit_rates

_FEWEST_FOR_TREES = 64
"""Distinct shapes of a member from which trees alone take over from the process."""
_FEWEST_FOR_FOREST = 12
"""Below, the process alone: at 6 instead, eight SimuMax shapes are predicted to 10.7 % instead of
11.1; not taken, since one table says so (benchmarks/sensitivity.py)."""
_SHARE_STEP = 0.6
"""Doubt of the law's constants: that of each column moves log time by its share times this."""
_LEAST_FREEDOM = 0.1
"""A law keeps a tenth of its doubt however few shapes there are."""
_FREE_SHAPES = 8
"""Shapes from which a pool's rates are its own as far as their priors allow."""
_GROWTH_LOG, _GROWTH_FRAC = 0.02, 0.12
"""Deviation that a doubling outside the measured range adds, in log time: a constant, and a share
of what the law did not explain inside it."""
_DECIMALS = 6
"""Of features: shapes that differ by rounding alone are one."""

Vector = NDArray[np.float64]
_TILES = ((128, 256), (128, 128))
"""Rows and columns of the blocks that matrix kernels commonly compute."""
_ATTENTION_ROWS = 128
"""Rows of queries that a block of fused attention takes."""
_HEAD_TILE = 32
"""Multiple to which it pads the channels of a head."""
_STEP = 0.3
"""Size of a yes-or-no feature, so that one prior suits it and the others."""
_MOST_HALVINGS = 8
"""Alignment beyond 256 elements changes no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residual:
    """What a pool says of shapes, ``(rows,)`` each."""

    law: Vector
    """Log time by the law."""
    detail: Vector
    """What the regressor adds to it."""
    sigma_log: Vector
    """Standard deviation of log time by the model's own account."""
    octaves: Vector
    """Doublings from the nearest corner of the measured range."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """Range of the shapes of one member."""

    lowest: Vector
    highest: Vector

    @staticmethod
    def of(points: NDArray[np.float64]) -> Support:
        """The range of points, ``(points, sizes)``."""
        return Support(lowest=points.min(axis=0), highest=points.max(axis=0))

    def octaves_outside(self, points: NDArray[np.float64]) -> Vector:
        """Doublings outside the range in the direction that lies farthest out, ``(rows,)``."""
        outside = np.maximum(self.lowest - points, points - self.highest)
        return np.maximum(outside.max(axis=1), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regressors:
    """What learns beside the law: a process for few shapes, trees for many."""

    process: GaussianProcess | None
    forest: Forest | None
    """Beside the process, from a dozen shapes on."""
    trees: Trees | None
    """Either the process or these."""
    line: Line | None
    """Beside trees of products: for what lies beyond the largest of them."""
    inflation: float
    """Of the process's deviations, for the constants of the law that the same samples fitted."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PoolModel:
    """A fitted pool."""

    rates: Rates
    members: tuple[str, ...]
    num_shapes: int
    num_units: int | None
    regressors: Regressors
    axes: NDArray[np.int64]
    """Coordinates that vary among the samples."""
    origin: Vector
    supports: Mapping[str, Support]
    shapes_of: Mapping[str, int]
    """Distinct shapes of each member."""
    detail_sigma: Mapping[str, float]
    """How much of a member's time the law does not explain: deviation of its residuals."""
    left_out: Mapping[str, Vector]
    """Residuals of left-out samples in log time, by member."""
    left_out_sigma: Mapping[str, Vector]
    """The model's own deviation of each of them."""

    @property
    def model(self) -> str:
        """Name of the regressor."""
        return "gaussian process" if self.regressors.trees is None else self.regressors.trees.name

    def predict(self, member: str, batch: ShapeBatch) -> Residual:
        """Log time of shapes of one member, or of an operator that the pool has not seen."""
        is_known = member in self.members
        number = self.members.index(member) if is_known else len(self.members)
        seen = _Seen.of(batch, number, self.rates, self.num_units)
        octaves = np.full(len(batch), np.inf)
        if is_known:
            octaves = self.supports[member].octaves_outside(seen.places())
        detail, sigma = self._detail(member, seen)
        away = np.where(np.isfinite(octaves), octaves, 0.0)
        spread = self.detail_sigma.get(member, max(self.detail_sigma.values()))
        sigma = np.hypot(sigma, (_GROWTH_LOG + _GROWTH_FRAC * spread) * away)
        sigma = np.minimum(sigma, UNMEASURED_SIGMA_LOG)
        return Residual(law=seen.law, detail=detail, sigma_log=sigma, octaves=octaves)

    def _detail(self, member: str, seen: _Seen) -> tuple[Vector, Vector]:
        """What the regressors add to the law, and their own deviation."""
        learned = self.regressors
        if learned.trees is not None:
            known = [self.left_out_sigma[m] for m in self.members if member in (m, "")]
            sigma = np.full(len(seen.batch), max(float(k[0]) for k in known))
            found = learned.trees.predict(features := seen.features())
            return found if learned.line is None else learned.line.joined(features, found), sigma
        assert learned.process is not None
        detail, sigma = learned.process.predict(seen.inputs().along(self.axes, self.origin))
        if learned.forest is not None:
            detail = (detail + learned.forest.predict(seen.features())) / 2
        return detail, sigma * learned.inflation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Seen:
    """A batch as the law of its pool and what learns beside it see it."""

    batch: ShapeBatch
    member: int
    num_units: int | None
    law: Vector
    """Log time by the law, ``(rows,)``."""
    shares: NDArray[np.float64]
    """Of the law's columns in it, ``(rows, columns)``."""

    @staticmethod
    def of(batch: ShapeBatch, member: int, rates: Rates, num_units: int | None) -> _Seen:
        done = columns(batch, num_units)
        return _Seen(
            batch=batch,
            member=member,
            num_units=num_units,
            law=rates.log_time(done),
            shares=rates.shares(done),
        )

    def places(self) -> NDArray[np.float64]:
        """Coordinates, and doublings of the law's time, in which a shape may lie outside too."""
        return np.column_stack([coordinates(self.batch), self.law / np.log(2.0)])

    def inputs(self) -> Inputs:
        """Coordinates, and features in which the law's own constants may be wrong."""
        features = [trend(self.batch, self.num_units), _SHARE_STEP * self.shares]
        return Inputs(
            coordinates=coordinates(self.batch),
            trend=np.column_stack(features),
            member=np.full(len(self.batch), self.member, dtype=np.int64),
        )

    def features(self) -> NDArray[np.float64]:
        """What trees split on, ``(rows, features)``."""
        batch = self.batch
        member = np.full(len(batch), float(self.member))
        found = [coordinates(batch), halvings(batch), trend(batch, self.num_units), member]
        return np.column_stack([self.law, self.shares, *found])


def fit_pool(
    samples: Mapping[str, Timed],
    *,
    start: Vector,
    sigma: Vector,
    num_units: int | None,
    least: Vector | None = None,
) -> PoolModel:
    """Fit the samples of one pool by member; ``start``, ``sigma`` and ``least`` are priors and
    floors of the rates (``fit_rates``)."""
    rows = _Rows.of(samples, num_units)
    freedom = max(rows.num_shapes - 1, _LEAST_FREEDOM) / (_FREE_SHAPES - 1)
    rates = fit_rates(
        rows.columns,
        rows.log_time,
        rows.weight,
        start=start,
        sigma=min(freedom, 1.0) * sigma,
        form=_form(rows.batches[0].kind, num_units),
        least=least,
    )
    return _pool(rows, rates, rows.log_time - rates.log_time(rows.columns), num_units)


def fit_residuals(
    member: str, timed: Timed, residuals: Vector, *, rates: Rates, num_units: int | None
) -> PoolModel:
    """What samples of one member leave of a model, ``(rows,)`` in log time, as a pool's detail.

    ``rates`` are the law that the model stands on: only its shares are looked at.
    """
    return _pool(_Rows.of({member: timed}, num_units), rates, residuals, num_units)


def _pool(rows: _Rows, rates: Rates, values: Vector, num_units: int | None) -> PoolModel:
    seen = [_Seen.of(batch, i, rates, num_units) for i, batch in enumerate(rows.batches)]
    inputs = stacked([one.inputs() for one in seen])
    axes, origin = _axes(inputs.coordinates)
    learned, left_out, left_out_sigma = _learn(
        rows, values, seen, inputs.along(axes, origin), is_held=rates.is_overlapped
    )
    return PoolModel(
        rates=rates,
        members=rows.members,
        num_shapes=rows.num_shapes,
        num_units=num_units,
        regressors=learned,
        axes=axes,
        origin=origin,
        supports={m: Support.of(s.places()) for m, s in zip(rows.members, seen, strict=True)},
        shapes_of={m: len(np.unique(rows.shape[rows.of_member(m)])) for m in rows.members},
        detail_sigma={m: _deviation(values[rows.of_member(m)]) for m in rows.members},
        left_out={m: left_out[rows.of_member(m)] for m in rows.members},
        left_out_sigma={m: left_out_sigma[rows.of_member(m)] for m in rows.members},
    )


def _form(kind: OperatorKind, num_units: int | None) -> Form:
    """How a kind's law adds up; a GPU's products hide their bytes behind their FLOP."""
    if KINDS[kind].is_chain:
        return Form.CHAIN
    is_product = kind.is_linear or kind is OperatorKind.GROUPED_LINEAR
    return Form.OVERLAP if is_product and num_units else Form.SUM


def _learn(
    rows: _Rows, values: Vector, seen: Sequence[_Seen], inputs: Inputs, *, is_held: bool
) -> tuple[Regressors, Vector, Vector]:
    """What the law, ``is_held`` by the data sheet or not, leaves, learned by the regressor that the
    number of shapes deserves.

    Beside it the residual of each sample when it was left out, and the model's deviation of it.
    """
    each = rows.num_shapes / len(rows.members)
    process = forest = trees = line = None
    features = [one.features() for one in seen]
    if each >= _FEWEST_FOR_TREES:
        trees = fit_trees(np.concatenate(features), values, rows.weight, rows.shape)
        line = fit_line(np.concatenate(features), values) if is_held else None
        left_out = trees.left_out
        typical = np.array([robust_sigma(left_out[rows.of_member(m)]) for m in rows.members])
        sigma_log = typical[rows.member]
    else:
        process = fit_gaussian(inputs, values, rows.weight)
        left_out, sigma_log = process.left_out, process.left_out_sigma
        if each >= _FEWEST_FOR_FOREST:
            forest = fit_forest(np.concatenate(features), values, rows.weight)
    inflation = _inflation(rows.num_shapes, rows.columns.amounts.shape[1])
    found = Regressors(process=process, forest=forest, trees=trees, line=line, inflation=inflation)
    return found, left_out, sigma_log


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The samples of all members, one after the other."""

    members: tuple[str, ...]
    batches: tuple[ShapeBatch, ...]
    columns: Columns
    log_time: Vector
    weight: Vector
    member: NDArray[np.int64]
    shape: NDArray[np.int64]
    """Number of each row's distinct shape."""

    @staticmethod
    def of(samples: Mapping[str, Timed], num_units: int | None) -> _Rows:
        members = tuple(sorted(samples))
        timed = [samples[m] for m in members]
        done = [columns(t.batch, num_units) for t in timed]
        member = np.repeat(np.arange(len(members)), [len(t) for t in timed])
        keys = np.column_stack([member, np.concatenate([coordinates(t.batch) for t in timed])])
        shape = np.unique(np.round(keys, _DECIMALS), axis=0, return_inverse=True)[1]
        return _Rows(
            members=members,
            batches=tuple(t.batch for t in timed),
            columns=Columns(costs=done[0].costs, amounts=np.concatenate([d.amounts for d in done])),
            log_time=np.log(np.concatenate([t.time_s for t in timed])),
            weight=np.concatenate([t.weight for t in timed]),
            member=member,
            shape=shape.reshape(-1).astype(np.int64),
        )

    @property
    def num_shapes(self) -> int:
        return int(self.shape.max()) + 1

    def of_member(self, name: str) -> NDArray[np.bool_]:
        return self.member == self.members.index(name)


def _deviation(values: Vector) -> float:
    return robust_sigma(values - float(np.median(values)))


def _inflation(num_shapes: int, num_constants: int) -> float:
    """Root of samples over degrees of freedom, at most 2.

    >>> round(_inflation(8, 3), 3)
    1.265
    """
    return float(np.sqrt(num_shapes / max(num_shapes - num_constants, num_shapes / 4)))


def _axes(points: NDArray[np.float64]) -> tuple[NDArray[np.int64], Vector]:
    """Coordinates that vary and repeat no other, and their middle."""
    middle = points.mean(axis=0)
    moved = np.round(points - middle, _DECIMALS)
    kept: list[int] = []
    for axis in range(points.shape[1]):
        is_new = all(not np.array_equal(moved[:, axis], moved[:, other]) for other in kept)
        if is_new and np.ptp(moved[:, axis]) > 0:
            kept.append(axis)
    axes = np.array(kept, dtype=np.int64)
    return axes, middle[axes]


def coordinates(batch: ShapeBatch) -> NDArray[np.float64]:
    """Log2 of each size and of the element's bytes, ``(rows, sizes + 1)``."""
    return np.log2(np.column_stack([np.maximum(batch.sizes, 1.0), batch.element_nbytes]))


def halvings(batch: ShapeBatch) -> NDArray[np.float64]:
    """How often each size can be halved, at most 8: what alignment depends on, ``(rows, sizes)``.

    >>> from .batches import batch_of
    >>> from ..workload.operators import Operator, Phase
    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 6), element_nbytes=2)
    >>> halvings(batch_of([norm])).tolist()
    [[3.0, 1.0]]
    """
    whole = np.maximum(np.rint(batch.sizes), 1.0).astype(np.int64)
    return np.minimum(np.log2((whole & -whole).astype(np.float64)), _MOST_HALVINGS)


def trend(batch: ShapeBatch, num_units: int | None) -> NDArray[np.float64]:
    """Features in which log time moves about linearly, ``(rows, features)``; none off a GPU."""
    none = np.zeros((len(batch), 0))
    if not num_units:
        return none
    kind, sizes = batch.kind, batch.sizes
    if kind.is_linear or kind is OperatorKind.BATCHED_PRODUCT:
        number = np.ones(len(batch)) if kind.is_linear else sizes[:, 0]
        return _product_waves(batch, number, num_units)
    if kind is OperatorKind.FLASH_ATTENTION:
        number, heads, _, seq, key, _ = sizes.T
        blocks = number * heads * np.ceil(seq / _ATTENTION_ROWS)
        flags = [key % _HEAD_TILE > 0, key < 64, key > 128]
        return np.column_stack([idle_waves(blocks, num_units), *(_STEP * f for f in flags)])
    if kind in (OperatorKind.SOFTMAX, OperatorKind.FUSED_SOFTMAX):
        padded = np.exp2(np.ceil(np.log2(sizes[:, -1:])))
        return np.asarray(_STEP * (padded > sizes[:, -1:]), dtype=np.float64)
    if kind is OperatorKind.ROTARY:
        return np.asarray(_STEP * (sizes[:, -1:] % 64 > 0), dtype=np.float64)
    return none


def idle_waves(blocks: Vector, num_units: int) -> Vector:
    """Log of whole waves over the waves that the blocks fill: the last wave's idle units.

    >>> idle_waves(np.array([108.0, 162.0]), 108).round(3).tolist()
    [0.0, 0.288]
    """
    waves = blocks / num_units
    return np.asarray(np.log(np.ceil(waves) / waves), dtype=np.float64)


def _product_waves(batch: ShapeBatch, number: Vector, num_units: int) -> NDArray[np.float64]:
    done = products(batch)
    return np.column_stack(
        [
            sum(
                idle_waves(number * np.ceil(rows / high) * np.ceil(cols / wide), num_units)
                for rows, _, cols in done
            )
            / len(done)
            for high, wide in _TILES
        ]
    )

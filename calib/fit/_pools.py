"""A pool of operators: a law with fitted rates, and regressors on its residuals.

Matrix products of one phase form a pool, since they share the machine's rate; every other operator
is a pool of its own. The regressors learn the log of measured time over the law's time, which is
the negative log of efficiency up to a constant. Their features are a shape's coordinates and the
units that its tiles leave idle.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..regressors.gaussian import GaussianProcess, Inputs, fit_gaussian, stacked
from ..regressors.robust import UNMEASURED_SIGMA_LOG, robust_sigma
from ..regressors.trees import Forest, Line, Trees, fit_forest, fit_line, fit_trees
from ..workload.operators import OperatorKind
from ._rates import Form, Rates, fit_rates
from .batches import ShapeBatch, Timed
from .laws import columns
from .operator_kinds import KINDS, Columns, products

_FEWEST_FOR_TREES = 64
"""Distinct shapes of a member from which trees replace the Gaussian process."""
_FEWEST_FOR_FOREST = 12
"""Distinct shapes from which a forest joins the Gaussian process. With 6 instead, eight SimuMax
shapes are predicted to 10.7 % instead of 11.1; not adopted, since only one table shows it
(benchmarks/RESULTS.md)."""
_SHARE_STEP = 0.6
"""Prior deviation of the law's constants: each column's moves log time by its share times this."""
_LEAST_FREEDOM = 0.1
"""Least share of the rates' prior deviation that a law keeps, however few shapes there are."""
_FREE_SHAPES = 8
"""Shapes from which a pool's rates may deviate as far as their priors allow."""
_GROWTH_LOG, _GROWTH_FRAC = 0.02, 0.12
"""Deviation that a doubling outside the measured range adds, in log time: a constant, and a share
of the deviation inside it that the law did not explain."""
_DECIMALS = 6
"""Decimals of features: shapes that differ only by rounding count as one."""

Vector = NDArray[np.float64]
_TILES = ((128, 256), (128, 128))
"""Rows and columns of the tiles that matrix kernels commonly compute."""
_ATTENTION_ROWS = 128
"""Query rows that a block of fused attention takes."""
_HEAD_TILE = 32
"""Multiple to which fused attention pads the channels of a head."""
_STEP = 0.3
"""Size of a boolean feature, so that one prior suits it and the others."""
_MOST_HALVINGS = 8
"""Alignment beyond 256 elements changes no kernel."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Residual:
    """Prediction of a pool for a batch of shapes, ``(rows,)`` each."""

    law: Vector
    """Log time by the law."""
    detail: Vector
    """Correction that the regressor adds to the law."""
    sigma_log: Vector
    """Standard deviation of log time by the model itself."""
    octaves: Vector
    """Doublings outside the nearest bound of the measured range."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Support:
    """Range of the shapes of one member."""

    lowest: Vector
    highest: Vector

    @staticmethod
    def of(points: NDArray[np.float64]) -> Support:
        """Return the range of points, ``(points, sizes)``."""
        return Support(lowest=points.min(axis=0), highest=points.max(axis=0))

    def octaves_outside(self, points: NDArray[np.float64]) -> Vector:
        """Return the doublings outside the range along the axis that lies farthest out,
        ``(rows,)``."""
        outside = np.maximum(self.lowest - points, points - self.highest)
        return np.maximum(outside.max(axis=1), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Regressors:
    """Regressors on the law's residuals: a Gaussian process for few shapes, trees for many."""

    process: GaussianProcess | None
    forest: Forest | None
    """Averaged with the process, from a dozen shapes on."""
    trees: Trees | None
    """Used instead of the process."""
    line: Line | None
    """Used with trees of products, for shapes beyond the largest of them."""
    inflation: float
    """Factor on the process's deviations, for the law's constants that were fitted to the same
    samples."""


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
    """Deviation of each member's residuals from the law."""
    held_out_residuals: Mapping[str, Vector]
    """Residuals of held-out samples in log time, by member."""
    held_out_sigma: Mapping[str, Vector]
    """The model's own deviation of each held-out residual."""

    @property
    def model(self) -> str:
        """Name of the regressor."""
        return "gaussian process" if self.regressors.trees is None else self.regressors.trees.name

    def predict(self, member: str, batch: ShapeBatch) -> Residual:
        """Return the log time of shapes of one member, or of an operator that the pool has no
        samples of."""
        is_known = member in self.members
        number = self.members.index(member) if is_known else len(self.members)
        seen = _BatchFeatures.of(batch, number, self.rates, self.num_units)
        octaves = np.full(len(batch), np.inf)
        if is_known:
            octaves = self.supports[member].octaves_outside(seen.places())
        detail, sigma = self._detail(member, seen)
        away = np.where(np.isfinite(octaves), octaves, 0.0)
        spread = self.detail_sigma.get(member, max(self.detail_sigma.values()))
        sigma = np.hypot(sigma, (_GROWTH_LOG + _GROWTH_FRAC * spread) * away)
        sigma = np.minimum(sigma, UNMEASURED_SIGMA_LOG)
        return Residual(law=seen.law, detail=detail, sigma_log=sigma, octaves=octaves)

    def _detail(self, member: str, seen: _BatchFeatures) -> tuple[Vector, Vector]:
        """Return the regressors' correction to the law, and its deviation."""
        learned = self.regressors
        if learned.trees is not None:
            known = [self.held_out_sigma[m] for m in self.members if member in (m, "")]
            sigma = np.full(len(seen.batch), max(float(k[0]) for k in known))
            tree_detail = learned.trees.predict(features := seen.features())
            return tree_detail if learned.line is None else learned.line.joined(
                features, tree_detail
            ), sigma
        assert learned.process is not None
        detail, sigma = learned.process.predict(seen.inputs().along(self.axes, self.origin))
        if learned.forest is not None:
            detail = (detail + learned.forest.predict(seen.features())) / 2
        return detail, sigma * learned.inflation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BatchFeatures:
    """A batch as the law of its pool and the regressors take it."""

    batch: ShapeBatch
    member: int
    num_units: int | None
    law: Vector
    """Log time by the law, ``(rows,)``."""
    shares: NDArray[np.float64]
    """Share of each of the law's columns in it, ``(rows, columns)``."""

    @staticmethod
    def of(batch: ShapeBatch, member: int, rates: Rates, num_units: int | None) -> _BatchFeatures:
        done = columns(batch, num_units)
        return _BatchFeatures(
            batch=batch,
            member=member,
            num_units=num_units,
            law=rates.log_time(done),
            shares=rates.shares(done),
        )

    def places(self) -> NDArray[np.float64]:
        """Return coordinates and log2 of the law's time, which may lie outside the range too."""
        return np.column_stack([coordinates(self.batch), self.law / np.log(2.0)])

    def inputs(self) -> Inputs:
        """Return coordinates, and features along which the law's own constants may be wrong."""
        features = [trend(self.batch, self.num_units), _SHARE_STEP * self.shares]
        return Inputs(
            coordinates=coordinates(self.batch),
            trend=np.column_stack(features),
            member=np.full(len(self.batch), self.member, dtype=np.int64),
        )

    def features(self) -> NDArray[np.float64]:
        """Return the features that trees split on, ``(rows, features)``."""
        batch = self.batch
        member = np.full(len(batch), float(self.member))
        feature_columns = [
            coordinates(batch),
            halvings(batch),
            trend(batch, self.num_units),
            member,
        ]
        return np.column_stack([self.law, self.shares, *feature_columns])


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
    """Fit the residuals of one member's samples from a model, ``(rows,)`` in log time, as a pool.

    ``rates`` are the law of that model, of which only the shares are used.
    """
    return _pool(_Rows.of({member: timed}, num_units), rates, residuals, num_units)


def _pool(rows: _Rows, rates: Rates, values: Vector, num_units: int | None) -> PoolModel:
    seen = [_BatchFeatures.of(batch, i, rates, num_units) for i, batch in enumerate(rows.batches)]
    inputs = stacked([one.inputs() for one in seen])
    axes, origin = _axes(inputs.coordinates)
    learned, held_out_residuals, held_out_sigma = _learn(
        rows, values, seen, inputs.along(axes, origin), is_overlapped=rates.is_overlapped
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
        held_out_residuals={m: held_out_residuals[rows.of_member(m)] for m in rows.members},
        held_out_sigma={m: held_out_sigma[rows.of_member(m)] for m in rows.members},
    )


def _form(kind: OperatorKind, num_units: int | None) -> Form:
    """Return how the parts of a kind's law combine; a GPU's products hide their bytes behind their
    FLOP."""
    if KINDS[kind].is_chain:
        return Form.CHAIN
    is_product = kind.is_linear or kind is OperatorKind.GROUPED_LINEAR
    return Form.OVERLAP if is_product and num_units else Form.SUM


def _learn(
    rows: _Rows,
    values: Vector,
    seen: Sequence[_BatchFeatures],
    inputs: Inputs,
    *,
    is_overlapped: bool,
) -> tuple[Regressors, Vector, Vector]:
    """Fit the residuals of the law with the regressor that suits the number of shapes.

    Returns the regressors, the held-out residual of each sample, and the model's deviation of it.
    ``is_overlapped`` is that of the law's rates.
    """
    each = rows.num_shapes / len(rows.members)
    process = forest = trees = line = None
    features = [one.features() for one in seen]
    if each >= _FEWEST_FOR_TREES:
        trees = fit_trees(np.concatenate(features), values, rows.weight, rows.shape)
        line = fit_line(np.concatenate(features), values) if is_overlapped else None
        held_out_residuals = trees.held_out_residuals
        typical = np.array(
            [robust_sigma(held_out_residuals[rows.of_member(m)]) for m in rows.members]
        )
        sigma_log = typical[rows.member]
    else:
        process = fit_gaussian(inputs, values, rows.weight)
        held_out_residuals, sigma_log = process.held_out_residuals, process.held_out_sigma
        if each >= _FEWEST_FOR_FOREST:
            forest = fit_forest(np.concatenate(features), values, rows.weight)
    inflation = _inflation(rows.num_shapes, rows.columns.amounts.shape[1])
    regressors = Regressors(
        process=process, forest=forest, trees=trees, line=line, inflation=inflation
    )
    return regressors, held_out_residuals, sigma_log


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Rows:
    """The samples of all members, concatenated."""

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
    """Return the root of samples over degrees of freedom, at most 2.

    >>> round(_inflation(8, 3), 3)
    1.265
    """
    return float(np.sqrt(num_shapes / max(num_shapes - num_constants, num_shapes / 4)))


def _axes(points: NDArray[np.float64]) -> tuple[NDArray[np.int64], Vector]:
    """Return the coordinates that vary and duplicate no other, and their mean."""
    middle = points.mean(axis=0)
    moved = np.round(points - middle, _DECIMALS)
    varying_axes: list[int] = []
    for axis in range(points.shape[1]):
        is_new = all(not np.array_equal(moved[:, axis], moved[:, other]) for other in varying_axes)
        if is_new and np.ptp(moved[:, axis]) > 0:
            varying_axes.append(axis)
    axes = np.array(varying_axes, dtype=np.int64)
    return axes, middle[axes]


def coordinates(batch: ShapeBatch) -> NDArray[np.float64]:
    """Return log2 of each size and of the element's bytes, ``(rows, sizes + 1)``."""
    return np.log2(np.column_stack([np.maximum(batch.sizes, 1.0), batch.element_nbytes]))


def halvings(batch: ShapeBatch) -> NDArray[np.float64]:
    """Return how often each size can be halved, at most 8, which determines its alignment,
    ``(rows, sizes)``.

    >>> from .batches import batch_of
    >>> from ..workload.operators import Operator, Phase
    >>> norm = Operator(kind=OperatorKind.NORM, phase=Phase.FORWARD, shape=(8, 6), element_nbytes=2)
    >>> halvings(batch_of([norm])).tolist()
    [[3.0, 1.0]]
    """
    whole = np.maximum(np.rint(batch.sizes), 1.0).astype(np.int64)
    return np.minimum(np.log2((whole & -whole).astype(np.float64)), _MOST_HALVINGS)


def trend(batch: ShapeBatch, num_units: int | None) -> NDArray[np.float64]:
    """Return features in which log time is about linear, ``(rows, features)``; none if not on a
    GPU."""
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
    """Return the log of whole waves over the waves that the blocks fill, due to the last wave's
    idle units.

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

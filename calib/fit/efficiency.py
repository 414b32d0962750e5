"""Operator times: the law over an efficiency that each kind shares with its family."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..workload.operators import Operator, Phase
from .ceilings import FittedLaw, Key
from .features import efficiency_features, log_sizes
from .laws import Family, family
from .regressors import Regressor, fit_regressor, weighted_median
from .training import Measured

# Shapes of its own at which a kind counts as much as its family.  Products share a rate, so that
# the pool helps up to 8 own shapes on the public A100 operators; pass counts of others do not.
_POOL_SHAPES = {
    Family.LINEAR: 3.0,
    Family.ATTENTION: 0.1,
    Family.MEMORY: 0.1,
    Family.OPTIMIZER: 0.1,
}
_PRIOR_KINDS = 0.5
"""Kinds that the prior (efficiency at the envelope of the products) counts for in a pool."""
_HALF_DETAIL_OCTAVES = 8.0
"""Distance from the support at which a regressor's detail counts half against the median.

A faster return is worse from small to large shapes on public A100 operators (``benchmarks/fit.py``
scores it): the largest shape seen says more than the median of all.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindModel:
    """One operator kind and phase."""

    regressor: Regressor
    center: float
    """Log efficiency of the kind, drawn towards its family's where it has few shapes."""
    lowest: NDArray[np.float64]
    highest: NDArray[np.float64]
    num_shapes: int
    num_rows: int

    def octaves_outside(self, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """Distance of each row of ``log_sizes`` from the box of measured shapes, in doublings."""
        below = np.maximum(self.lowest - sizes, 0.0)
        above = np.maximum(sizes - self.highest, 0.0)
        return np.linalg.norm(below + above, axis=1) / np.log(2.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """Times of operators of one kind and phase by the fitted efficiency."""

    log_time: NDArray[np.float64]
    octaves: NDArray[np.float64]
    """Doublings from the measured shapes; infinite where the kind was never measured."""
    key: Key | None
    """The kind and phase whose samples were used."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyModel:
    """All operator kinds of a machine."""

    law: FittedLaw
    kinds: Mapping[Key, KindModel]
    pools: Mapping[tuple[Family, Phase], float]
    """Log efficiency of a family in a phase, for kinds that were never measured."""

    def predict(self, key: Key, operators: Sequence[Operator]) -> Fitted:
        """Times of operators that all have the kind and phase ``key``."""
        used = next((k for k in _stand_ins(key) if k in self.kinds), None)
        law = self.law.log_time(used or key, operators)
        if used is None:
            efficiency = self.pools.get((family(key[0]), key[1]), 0.0)
            return Fitted(
                log_time=law - efficiency, key=None, octaves=np.full(len(operators), np.inf)
            )
        model = self.kinds[used]
        octaves = model.octaves_outside(log_sizes(operators))
        efficiency = np.full(len(operators), model.center)
        if model.regressor.detail is not None:
            detail = model.regressor.predict(efficiency_features(self.law, used, operators))
            efficiency += detail / (1.0 + octaves / _HALF_DETAIL_OCTAVES)
        return Fitted(log_time=law - efficiency, octaves=octaves, key=used)


def fit_efficiency(measured: Mapping[Operator, Measured], law: FittedLaw) -> EfficiencyModel:
    """Fit every kind and phase that was measured; the same samples give the same model."""
    groups: defaultdict[Key, list[Operator]] = defaultdict(list)
    for operator in sorted(measured, key=_order):
        groups[operator.kind, operator.phase].append(operator)
    regressors = {key: _fit_kind(key, group, measured, law) for key, group in groups.items()}
    pools = _pools({key: regressor.center for key, regressor in regressors.items()})
    kinds = {}
    for key, group in groups.items():
        sizes = log_sizes(group)
        own, pool = float(len(group)), _POOL_SHAPES[family(key[0])]
        center = own * regressors[key].center + pool * pools[family(key[0]), key[1]]
        kinds[key] = KindModel(
            regressor=regressors[key],
            center=center / (own + pool),
            lowest=sizes.min(axis=0),
            highest=sizes.max(axis=0),
            num_shapes=len(group),
            num_rows=sum(measured[o].num_rows for o in group),
        )
    return EfficiencyModel(law=law, kinds=kinds, pools=pools)


def pool_residuals(model: EfficiencyModel) -> dict[Key, float]:
    """How far a product kind lies from the pool of the others: its error if never measured."""
    centers = {
        k: m.regressor.center for k, m in model.kinds.items() if family(k[0]) is Family.LINEAR
    }
    out = {}
    for key, center in centers.items():
        others = {k: c for k, c in centers.items() if k != key}
        pool = _pools(others).get((Family.LINEAR, key[1]))
        if pool is not None:
            out[key] = center - pool
    return out


def _fit_kind(
    key: Key, group: Sequence[Operator], measured: Mapping[Operator, Measured], law: FittedLaw
) -> Regressor:
    times = np.array([measured[o].time_s for o in group])
    weight = np.array([measured[o].weight for o in group])
    return fit_regressor(
        efficiency_features(law, key, group), law.log_time(key, group) - np.log(times), weight
    )


def _pools(centers: Mapping[Key, float]) -> dict[tuple[Family, Phase], float]:
    members: defaultdict[tuple[Family, Phase], list[float]] = defaultdict(list)
    for (kind, phase), center in centers.items():
        members[family(kind), phase].append(center)
    pools = {}
    for name, values in members.items():
        found = np.array([*values, 0.0])
        counts = np.array([*np.ones(len(values)), _PRIOR_KINDS])
        pools[name] = weighted_median(found, counts)
    return pools


def _stand_ins(key: Key) -> list[Key]:
    """Where a kind and phase may take its efficiency from, best first."""
    kind, phase = key
    order = {
        Phase.FORWARD: (Phase.FORWARD, Phase.RECOMPUTE, Phase.BACKWARD),
        Phase.RECOMPUTE: (Phase.RECOMPUTE, Phase.FORWARD, Phase.BACKWARD),
        Phase.BACKWARD: (Phase.BACKWARD, Phase.FORWARD, Phase.RECOMPUTE),
        Phase.STEP: (Phase.STEP,),
    }
    return [(kind, other) for other in order[phase]]


def _order(operator: Operator) -> tuple[str, str, tuple[int, ...], int]:
    return operator.kind.value, operator.phase.value, operator.shape, operator.element_nbytes

"""All operators of one machine: fitted together, since they share its ceilings and its products'
efficiency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .batches import Batch, Timed
from .ceilings import FittedLaw, fit_law
from .costs import Cost
from .gates import Refusal, refuse
from .intervals import UNMEASURED_SIGMA_LOG, Z_90, Quantiles, fit_quantiles, fit_spreads
from .laws import Ceilings, columns, family
from .pools import PoolModel, fit_pool
from .priors import DevicePrior, device_prior

Vector = NDArray[np.float64]
_UNMEASURED_HALF_WIDTH = Z_90 * UNMEASURED_SIGMA_LOG
_FEWEST_TELLING = 4
"""Shapes of a pool below which leaving one out says nothing: the law has seen it."""
_ENOUGH_SHAPES = 8
"""Shapes of an operator from which its own residuals tell how wrong it may be."""
_LAUNCH_SIGMA_LOG = 1.0
_FLOP_SIGMA_LOG = 0.3
_BYTES_SIGMA_LOG = 0.9
"""How far the rates of a pool may lie from where all samples together put them."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """Natural logs of seconds, ``(rows,)`` each."""

    log_time: Vector
    low: Vector
    high: Vector
    """Ends of the 90 % interval of one measurement."""
    octaves: Vector
    """Doublings outside the measured range; 0 inside."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MachineModel:
    """Fitted models of the operators of one machine, by name."""

    law: FittedLaw
    prior: DevicePrior
    pools: Mapping[str, PoolModel]
    """The pool of each name."""
    quantiles: Quantiles
    thin_sigma_log: float
    """Deviation of an operator of which one shape is known, beside what its pool says."""
    refusals: tuple[Refusal, ...]
    """Rows that no model was fitted on."""
    shift: Mapping[Cost, float]
    """Log of this machine's seconds of a launch, FLOP and byte over those of the machine that the
    pools were fitted on; 0 where it is the same."""

    @property
    def ceilings(self) -> Ceilings:
        """Rates of the machine."""
        return self.law.ceilings

    def predict(self, name: str, batch: Batch) -> Prediction:
        """Times of a batch of the operator ``name``."""
        pool = self.pools[name]
        found = pool.predict(name, batch)
        thin = max(1.0 - pool.shapes_of[name] / _ENOUGH_SHAPES, 0.0)
        sigma = np.hypot(found.sigma_log, np.sqrt(thin) * self.thin_sigma_log)
        half = self.quantiles.half_width(name, sigma)
        log_time = found.log_time + self._moved(pool, batch)
        return Prediction(
            log_time=log_time, low=log_time - half, high=log_time + half, octaves=found.octaves
        )

    def predict_unmeasured(self, batch: Batch) -> Prediction:
        """Times of operators that no sample is of, from their family; octaves are infinite."""
        sought = (family(batch.kind), batch.phase) if batch.kind.is_linear else None
        like = next((n for n, found in self.law.families.items() if found == sought), None)
        if like is not None:
            pool = self.pools[like]
            log_time = pool.predict("", batch).log_time + self._moved(pool, batch)
        else:
            log_time = self.law.log_time(batch, scale=self.law.typical(batch))
        half = _UNMEASURED_HALF_WIDTH
        return Prediction(
            log_time=log_time,
            low=log_time - half,
            high=log_time + half,
            octaves=np.full(len(batch), np.inf),
        )

    def _moved(self, pool: PoolModel, batch: Batch) -> Vector:
        """What the law says of the change of machine, log, ``(rows,)``."""
        if not any(self.shift.values()):
            return np.zeros(len(batch))
        done = columns(batch, pool.num_units)
        shift = np.array([self.shift[c] for c in done.costs])
        there = replace(pool.rates, log_unit_s=pool.rates.log_unit_s + shift)
        return there.log_time(done) - pool.rates.log_time(done)


def fit_machine(groups: Mapping[str, Timed], *, device: str) -> MachineModel:
    """Fit the operators of one device; the same rows in any order give the same model.

    ``groups`` maps a name to rows of one kind and phase; ``device`` is the driver's name.
    """
    prior = device_prior(device)
    passed, refusals = refuse(groups, _peaks(groups, prior))
    groups = {name: _ordered(passed[name]) for name in sorted(passed)}
    law = fit_law(groups, prior)
    members: defaultdict[str, dict[str, Timed]] = defaultdict(dict)
    for name, timed in groups.items():
        members[_pool(name, timed.batch)][name] = timed
    pools = {}
    for found in members.values():
        pool = _fit(found, law, prior.num_units)
        pools.update(dict.fromkeys(found, pool))
    return MachineModel(
        law=law,
        prior=prior,
        pools=pools,
        quantiles=fit_quantiles(
            {
                n: pools[n].left_out[n] / pools[n].left_out_sigma[n]
                for n in groups
                if pools[n].num_shapes >= _FEWEST_TELLING
            }
        ),
        thin_sigma_log=_thin_sigma_log(pools, prior),
        shift=dict.fromkeys(Cost, 0.0),
        refusals=refusals,
    )


def _thin_sigma_log(pools: Mapping[str, PoolModel], prior: DevicePrior) -> float:
    """Left-out residuals of operators with few shapes, drawn to what the device's prior says."""
    found = [
        pool.left_out[name]
        for name, pool in sorted(pools.items())
        if pool.num_shapes > 1 and pool.shapes_of[name] < _ENOUGH_SHAPES
    ]
    return fit_spreads(
        {"": np.concatenate([np.empty(0), *found])}, prior_sigma_log=prior.error_sigma_log
    ).pooled


def _peaks(groups: Mapping[str, Timed], prior: DevicePrior) -> Ceilings | None:
    """Rates of the data sheet; None where the device or a common element size is not known."""
    sizes = {int(n) for timed in groups.values() for n in np.unique(timed.batch.element_nbytes)}
    if not prior.num_units or len(sizes) != 1:
        return None
    return prior.peaks_for(sizes.pop())


def transfer(model: MachineModel, *, ceilings: Ceilings) -> MachineModel:
    """The same efficiencies under the ceilings of another machine."""
    return replace(
        model,
        law=replace(model.law, ceilings=ceilings),
        shift={
            cost: float(np.log(ceilings.unit_s(cost) / model.ceilings.unit_s(cost)))
            + model.shift[cost]
            for cost in Cost
        },
    )


def _pool(name: str, batch: Batch) -> str:
    """Products of one phase share a pool; every other operator has its own."""
    return f"linear/{batch.phase.value}" if batch.kind.is_linear else name


def _fit(members: Mapping[str, Timed], law: FittedLaw, num_units: int) -> PoolModel:
    costs = columns(next(iter(members.values())).batch, num_units).costs
    sigma = {
        Cost.LAUNCH: _LAUNCH_SIGMA_LOG,
        Cost.FLOP: _FLOP_SIGMA_LOG,
        Cost.BYTES: _BYTES_SIGMA_LOG,
    }
    return fit_pool(
        members,
        start=np.median([law.log_units(name, costs) for name in members], axis=0),
        sigma=np.array([sigma[c] for c in costs]),
        num_units=num_units,
    )


def _ordered(timed: Timed) -> Timed:
    """Rows in an order that does not depend on how they came."""
    keys = (timed.weight, timed.time_s, timed.batch.element_nbytes, *timed.batch.sizes.T)
    return timed.take(np.lexsort(keys))

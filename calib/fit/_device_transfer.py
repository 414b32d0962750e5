"""Transfer a machine's models to another device, by data sheets and a few probes measured there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from ..regressors.robust import SAMPLE_SIGMA_LOG, robust_minimum
from ._pools import PoolModel, fit_residuals
from .batches import Timed
from .laws import Ceilings
from .machine import CARRIED_OPERATOR_SIGMA_LOG, MachineModel
from .operator_kinds import WorkKind
from .priors import device_prior

Vector = NDArray[np.float64]
_SHEET_SIGMA_LOG = {WorkKind.LAUNCH: 0.7, WorkKind.FLOP: 0.2, WorkKind.BYTES: 0.2}
"""Deviation of the ratio of two devices' rates from the ratio of their data sheets."""


def transfer_to_device(
    model: MachineModel, *, device: str, probes: Mapping[str, Timed] | None = None
) -> MachineModel:
    """Transfer the fitted efficiencies to another device.

    The ratios of its seconds per launch, FLOP and byte to those of the model's machine follow from
    the data sheets, corrected by ``probes``: a few rows measured there, under the model's names.
    Half of the regressors' correction to the law is transferred, since tiles and kernels partly
    differ between devices. Residuals of an operator's probes are fitted by the regressor that suits
    their number, and the interval is theirs; without probes it covers the error of rates and
    kernels.
    """
    there, here = device_prior(device), model.prior
    then, now = (p.ceilings_for(model.element_nbytes) for p in (here, there))
    sheet = {
        cost: model.shift[cost] + float(np.log(now.unit_s(cost) / then.unit_s(cost)))
        for cost in WorkKind
    }
    is_known = bool(there.num_units and here.num_units)
    free = dict.fromkeys(WorkKind, max(there.sigma_log, here.sigma_log))
    sigma = _SHEET_SIGMA_LOG if is_known else free
    known = {name: timed for name, timed in (probes or {}).items() if name in model.pools}
    with threadpool_limits(limits=1):
        shift, doubt = _probed(model, sheet, known, sigma)
        units = {c: model.ceilings.unit_s(c) * np.exp(shift[c] - model.shift[c]) for c in WorkKind}
        ceilings = Ceilings(
            flop_per_s=float(1 / units[WorkKind.FLOP]),
            bytes_per_s=float(1 / units[WorkKind.BYTES]),
            launch_s=float(units[WorkKind.LAUNCH]),
        )
        moved = replace(
            model,
            law=replace(model.law, ceilings=ceilings),
            prior=there,
            refusals=(),
            shift=shift,
            shift_sigma=doubt,
            is_moved=True,
            probed={},
        )
        return _corrected(moved, known)


def _corrected(moved: MachineModel, probes: Mapping[str, Timed]) -> MachineModel:
    """Return the moved model with each operator corrected by the residuals of its probes."""
    probed: dict[str, PoolModel] = {}
    for name, timed in sorted(probes.items()):
        residuals = np.log(timed.time_s) - moved.predict(name, timed.batch).log_time
        probed[name] = fit_residuals(
            name,
            timed,
            residuals,
            rates=moved.target_rates(name, timed.batch),
            num_units=moved.pools[name].num_units,
        )
    return replace(moved, probed=probed)


def _probed(
    model: MachineModel,
    sheet: Mapping[WorkKind, float],
    known: Mapping[str, Timed],
    sigma_log: Mapping[WorkKind, float],
) -> tuple[dict[WorkKind, float], dict[WorkKind, float]]:
    """Return the maximum-a-posteriori shifts of the three rates and their deviations; each probed
    operator has a constant error of its own."""
    center = np.concatenate([[sheet[c] for c in WorkKind], np.zeros(len(known))])
    spread = np.concatenate(
        [[sigma_log[c] for c in WorkKind], np.full(len(known), CARRIED_OPERATOR_SIGMA_LOG)]
    )

    def by_cost(theta: Vector) -> dict[WorkKind, float]:
        return dict(zip(WorkKind, theta.tolist(), strict=False))

    log_residuals = {
        name: np.log(timed.time_s)
        - model.transferable_log_time(model.pools[name].predict(name, timed.batch))
        for name, timed in known.items()
    }

    def residuals(theta: Vector) -> Vector:
        moved = replace(model, shift=by_cost(theta), is_moved=True)
        parts = [(theta - center) / spread]
        for i, (name, timed) in enumerate(known.items()):
            log_time = moved.machine_shift_log(name, timed.batch) + theta[len(WorkKind) + i]
            parts.append((log_residuals[name] - log_time) / SAMPLE_SIGMA_LOG)
        return np.concatenate(parts)

    def jacobian(theta: Vector) -> Vector:
        moved = replace(model, shift=by_cost(theta), is_moved=True)
        parts = [np.diag(1.0 / spread)]
        for i, (name, timed) in enumerate(known.items()):
            slopes = np.zeros((len(timed), len(theta)))
            slopes[:, : len(WorkKind)] = moved.slopes(name, timed.batch)
            slopes[:, len(WorkKind) + i] = 1.0
            parts.append(-slopes / SAMPLE_SIGMA_LOG)
        return np.vstack(parts)

    if not known:
        return by_cost(center), dict(sigma_log)
    solution = robust_minimum(residuals, jacobian, center, spread=spread)
    slopes = jacobian(solution)
    doubt = np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    return by_cost(solution), by_cost(doubt)

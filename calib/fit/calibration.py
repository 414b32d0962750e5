"""The calibration of a run: every sample in, the time of any operator or collective out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from ..samples.table import SampleTable
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator, OperatorKind, Phase
from .ceilings import FittedLaw, Key, fit_law
from .collectives import (
    CollectiveModel,
    Group,
    bus_factor,
    canonical,
    fit_collectives,
    group_of,
    ring_steps,
)
from .efficiency import EfficiencyModel, fit_efficiency, pool_residuals
from .estimates import Estimates, Source
from .intervals import UNMEASURED_SIGMA_LOG, Spreads, fit_spreads
from .laws import Ceilings, Family, family
from .priors import DevicePrior, device_prior
from .training import Measured, measured_collectives, measured_host, measured_operators

SCHEMA = 1
_HOST_LAUNCHES = 10.0
"""Launches that a host constant is taken for where it was never measured."""
_TOUCHING_OCTAVES = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted models of one machine; implements ``estimates.Estimator``."""

    device: str
    sha256: str
    """Hash of the samples it was fitted on."""
    efficiency: EfficiencyModel
    transfers: CollectiveModel
    measured: Mapping[Operator, Measured]
    measured_host: Mapping[Key, Measured]
    measured_transfers: Mapping[CollectiveCall, Measured]
    spreads: Spreads
    transfer_spreads: Spreads

    @property
    def ceilings(self) -> Ceilings:
        """Rates of one rank's machine."""
        return self.efficiency.law.ceilings

    def family(self, work: Operator | CollectiveCall) -> Family:
        """Whose error it shares: within a family errors add up, between families in quadrature."""
        return family(work.kind) if isinstance(work, Operator) else Family.COLLECTIVE

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Time of each operator on this machine."""
        answers = _Answers(len(operators))
        groups: defaultdict[Key, list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            found = self.measured.get(operator)
            if found is not None:
                answers.put(i, found.time_s, found.sigma_log, Source.MEASURED)
            else:
                groups[operator.kind, operator.phase].append(i)
        for key, rows in groups.items():
            if family(key[0]) is Family.HOST:
                self._put_host(answers, key, rows)
            else:
                self._put_fitted(answers, key, rows, [operators[i] for i in rows])
        return answers.estimates()

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Transfer time of each collective without waiting for late ranks; 0 for one rank alone."""
        answers = _Answers(len(calls))
        groups: defaultdict[Group, list[int]] = defaultdict(list)
        for i, call in enumerate(map(canonical, calls)):
            found = self.measured_transfers.get(call)
            if found is not None and not found.is_bound:
                answers.put(i, found.time_s, found.sigma_log, Source.MEASURED)
            elif call.num_ranks < 2:
                answers.put(i, 0.0, 0.0, Source.FITTED)
            else:
                groups[group_of(call)].append(i)
        for group, rows in groups.items():
            self._put_transfers(answers, group, rows, [calls[i].nbytes for i in rows])
        return answers.estimates()

    def summary(self) -> dict[str, Any]:
        """What was fitted, on how much, and how well, as a JSON value."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "sha256": self.sha256,
            "ceilings": {
                "flop_per_s": self.ceilings.flop_per_s,
                "bytes_per_s": self.ceilings.bytes_per_s,
                "launch_s": self.ceilings.launch_s,
            },
            "operators": [*self._kind_rows(), *self._host_rows()],
            "collectives": self._group_rows(),
        }

    def _put_host(self, answers: _Answers, key: Key, rows: list[int]) -> None:
        found = self.measured_host.get(key)
        if found is None and key == (OperatorKind.HOST_MICROBATCH, Phase.RECOMPUTE):
            found = self.measured_host.get((OperatorKind.HOST_MICROBATCH, Phase.FORWARD))
        for i in rows:
            if found is None:
                answers.put(
                    i, _HOST_LAUNCHES * self.ceilings.launch_s, UNMEASURED_SIGMA_LOG, Source.PRIOR
                )
            else:
                answers.put(i, found.time_s, found.sigma_log, Source.MEASURED)

    def _put_fitted(
        self, answers: _Answers, key: Key, rows: list[int], operators: list[Operator]
    ) -> None:
        fitted = self.efficiency.predict(key, operators)
        name = _name(fitted.key or key)
        sigma = self.spreads.sigma_log(name, fitted.octaves)
        is_other = fitted.key not in (key, (key[0], Phase.FORWARD), (key[0], Phase.RECOMPUTE))
        for i, time_s, sigma_log, octaves in zip(
            rows, np.exp(fitted.log_time), sigma, fitted.octaves, strict=True
        ):
            if fitted.key is None:
                source = Source.PRIOR
            elif octaves > _TOUCHING_OCTAVES or is_other:
                source = Source.EXTRAPOLATED
            else:
                source = Source.FITTED
            answers.put(i, float(time_s), float(sigma_log), source)

    def _put_transfers(
        self, answers: _Answers, group: Group, rows: list[int], nbytes: list[int]
    ) -> None:
        sizes = np.array(nbytes, dtype=np.float64)
        nearest = self.transfers.nearest(group)
        if nearest is None:
            link = self.transfers.machine
            for i, size in zip(rows, sizes, strict=True):
                answers.put(
                    i, link.time_s(group[0], group[2], size), 2 * UNMEASURED_SIGMA_LOG, Source.PRIOR
                )
            return
        model = self.transfers.groups[nearest]
        octaves = model.octaves_outside(sizes) + _octaves_between(group, nearest)
        logs = model.log_time(group, sizes)
        sigma = self.transfer_spreads.sigma_log(_group_name(nearest), octaves)
        for i, log_time, sigma_log, distance in zip(rows, logs, sigma, octaves, strict=True):
            source = Source.FITTED if distance <= _TOUCHING_OCTAVES else Source.EXTRAPOLATED
            answers.put(i, float(np.exp(log_time)), float(sigma_log), source)

    def _kind_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, model in self.efficiency.kinds.items():
            held_out = model.regressor.held_out
            rows.append(
                {
                    "kind": key[0].value,
                    "phase": key[1].value,
                    "num_rows": model.num_rows,
                    "num_shapes": model.num_shapes,
                    "model": model.regressor.name,
                    "efficiency_frac": self._median_efficiency_frac(key),
                    "left_out_error_frac": _error_frac(held_out),
                    "sigma_log": self.spreads.by_group.get(_name(key), self.spreads.pooled),
                    "source": Source.MEASURED.value,
                }
            )
        return rows

    def _median_efficiency_frac(self, key: Key) -> float:
        """Time at the bare ceilings over measured time, median over the shapes of a kind."""
        operators = [o for o in self.measured if (o.kind, o.phase) == key]
        law = FittedLaw(ceilings=self.ceilings).log_time(key, operators)
        times = np.log([self.measured[o].time_s for o in operators])
        return float(np.exp(np.median(law - times)))

    def _host_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": kind.value,
                "phase": phase.value,
                "num_rows": found.num_rows,
                "num_shapes": 1,
                "model": "constant",
                "time_s": found.time_s,
                "sigma_log": found.sigma_log,
                "source": Source.MEASURED.value,
            }
            for (kind, phase), found in self.measured_host.items()
        ]

    def _group_rows(self) -> list[dict[str, Any]]:
        rows = []
        for group, model in self.transfers.groups.items():
            collective, role, num_ranks = group
            rows.append(
                {
                    "collective": collective.value,
                    "role": role.value,
                    "num_ranks": num_ranks,
                    "num_rows": model.num_rows,
                    "num_sizes": len(model.log_nbytes),
                    "alpha_s": model.link.step_s * ring_steps(collective, num_ranks),
                    "bytes_per_s": model.link.bus_bytes_per_s / bus_factor(collective, num_ranks),
                    "left_out_error_frac": _error_frac(model.held_out),
                    "source": Source.MEASURED.value,
                }
            )
        return rows


class _Answers:
    """Estimates in the making, filled row by row."""

    def __init__(self, number: int) -> None:
        self._time_s: NDArray[np.float64] = np.zeros(number)
        self._sigma_log: NDArray[np.float64] = np.zeros(number)
        self._sources: list[Source] = [Source.PRIOR] * number

    def put(self, row: int, time_s: float, sigma_log: float, source: Source) -> None:
        self._time_s[row], self._sigma_log[row], self._sources[row] = time_s, sigma_log, source

    def estimates(self) -> Estimates:
        return Estimates(
            time_s=self._time_s, sigma_log=self._sigma_log, sources=tuple(self._sources)
        )


def calibrate(table: SampleTable, *, device: str) -> Calibration:
    """Fit all models on a table; the same rows give the same calibration in any order.

    ``device`` is the driver's name of the accelerator or ``cpu``; it picks the priors.  Raises
    ``CalibrationError`` where the table has no operator samples.
    """
    measured = measured_operators(table)
    if not measured:
        raise CalibrationError(
            f"no operator samples in {len(table.samples)} rows; record at least one clean hooked "
            f"step (more --calibrate-steps, fewer saves and evaluations inside the window)"
        )
    prior = device_prior(device)
    efficiency = fit_efficiency(measured, _law(measured, prior))
    measured_calls = measured_collectives(table)
    transfers = fit_collectives(measured_calls, prior.network)
    return Calibration(
        device=device,
        sha256=table.sha256,
        efficiency=efficiency,
        transfers=transfers,
        measured=measured,
        measured_host=measured_host(table),
        measured_transfers=measured_calls,
        spreads=fit_spreads(_left_out(efficiency), prior_sigma_log=prior.error_sigma_log),
        transfer_spreads=fit_spreads(
            {_group_name(g): m.held_out for g, m in transfers.groups.items()},
            prior_sigma_log=prior.error_sigma_log,
        ),
    )


def _law(measured: Mapping[Operator, Measured], prior: DevicePrior) -> FittedLaw:
    found = list(measured.values())
    return fit_law(
        list(measured),
        np.array([m.time_s for m in found]),
        np.array([m.weight for m in found]),
        prior,
    )


def _left_out(model: EfficiencyModel) -> dict[str, NDArray[np.float64]]:
    """Residuals per kind and phase; a product measured at one shape is held against the others."""
    residuals = {_name(key): kind.regressor.held_out for key, kind in model.kinds.items()}
    for key, residual in pool_residuals(model).items():
        if not len(residuals[_name(key)]):
            residuals[_name(key)] = np.array([residual])
    return residuals


def _octaves_between(group: Group, other: Group) -> float:
    """Distance of a stand-in: doublings of its size, and one for another collective or role."""
    sizes = abs(np.log2(group[2] / other[2]))
    return float(sizes) + (group[0] is not other[0]) + (group[1] is not other[1])


def _error_frac(residuals: NDArray[np.float64]) -> float | None:
    """Mean absolute relative error of left-out samples; None where none could be left out."""
    return float(np.mean(np.abs(np.expm1(residuals)))) if len(residuals) else None


def _name(key: Key) -> str:
    return f"{key[0].value}/{key[1].value}"


def _group_name(group: Group) -> str:
    return f"{group[0].value}/{group[1].value}/{group[2]}"

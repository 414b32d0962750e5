"""Calibration of a run: fitted on all its samples, it estimates any operator or collective."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from ..network.cluster import known_network, link_figures
from ..network.collective_times import CollectiveModel, Transfers, fit_collectives
from ..network.groups import Group, Measured, canonical, group_of
from ..records.cluster import Cluster
from ..regressors.estimate import Estimate
from ..regressors.robust import UNMEASURED_SIGMA_LOG
from ..workload.collectives import CollectiveCall
from ..workload.operators import Operator, OperatorKind, Phase
from ._device_transfer import transfer_to_device
from ._sharded_host import calls_guess, law_s, plain_optimizer_log, unit_guess, with_units
from .batches import Timed, batch_of
from .estimates import Estimates, Source
from .laws import Ceilings, OperatorFamily, family
from .machine import MachineModel, Prediction, fit_machine
from .priors import device_prior, is_processor

if TYPE_CHECKING:
    from ..samples.table import SampleTable

Floats = NDArray[np.float64]
Key = tuple[OperatorKind, Phase]
SCHEMA = 1
"""Version of the JSON that ``summary`` returns."""
_OVER_PLAIN = (OperatorKind.OPTIMIZER, Phase.STEP)
_OVER_SHARDS = (OperatorKind.SHARDED_OPTIMIZER, Phase.STEP)
_SHARDED_PAIR = {_OVER_PLAIN: _OVER_SHARDS, _OVER_SHARDS: _OVER_PLAIN}
"""Optimizers that stand in for each other, corrected by the law of the part in which they
differ."""
_HOST_LAUNCHES = 10.0
"""Launches assumed for a host constant that was never measured."""
_NUM_SUFFICIENT_SHAPES = 200
"""Shapes of an operator from which another machine's models add nothing: with as many probes, a
transferred model errs as much as one fitted to the probes."""
_ROWS_SIGMA_LOG: Mapping[OperatorFamily, float] = {
    OperatorFamily.LINEAR: 0.10,
    OperatorFamily.ATTENTION: 0.10,
    OperatorFamily.MEMORY: 0.06,
}
"""Deviation of an accelerator's operator at twice the rows of a measured one (tokens of a product,
samples of attention), as the models here predict it from that one alone: over the public tables of
GPUs 0.07, 0.10 and 0.06 in the median, 0.12, 0.11 and 0.08 in the upper quartile
(``benchmarks/RESULTS.md``). It grows with the root of the octaves."""
_TOUCHING_OCTAVES = 1e-6
"""Tolerance for rounding: a shape this close to the measured range counts as inside."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Fitted models of one machine; implements ``estimates.Estimator``."""

    device: str
    sha256: str
    """Hash of the samples it was fitted on."""
    machine: MachineModel
    transfers: CollectiveModel
    measured: Mapping[Operator, Measured]
    measured_host: Mapping[Key, Measured]
    measured_transfers: Mapping[CollectiveCall, Measured]
    like: MachineModel | None = None
    """Models of another machine, transferred to this one, for operators with few samples here."""
    is_elsewhere: bool = False
    """True if nothing was timed on this device: every estimate is at best extrapolated."""
    host_bound: Mapping[Key, Mapping[Operator, Measured]] = field(default_factory=dict)
    """Operators for which the device waited: their measured time is the host's."""

    @property
    def ceilings(self) -> Ceilings:
        """Rates of the machine of one rank."""
        return self.machine.ceilings

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Return the time of each operator on this machine."""
        known: list[int] = []
        groups: defaultdict[Key, list[int]] = defaultdict(list)
        for i, operator in enumerate(operators):
            if operator in self.measured:
                known.append(i)
            else:
                groups[operator.kind, operator.phase].append(i)
        parts = [(known, _as_measured([self.measured[operators[i]] for i in known]))]
        for key, rows in groups.items():
            if family(key[0]) is OperatorFamily.HOST:
                parts.append((rows, self._host(key, len(rows))))
            else:
                parts.append((rows, self._fitted(key, [operators[i] for i in rows])))
        estimates = Estimates.of_parts(len(operators), parts)
        return estimates.as_extrapolated() if self.is_elsewhere else estimates

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Return the transfer time of each collective, without waiting for late ranks; 0 for a
        single rank."""
        known: dict[int, Measured] = {}
        groups: defaultdict[Group, list[int]] = defaultdict(list)
        for i, call in enumerate(map(canonical, calls)):
            measured = self.measured_transfers.get(call)
            if measured is not None and not measured.is_bound:
                known[i] = measured
            elif call.num_ranks > 1:
                groups[group_of(call)].append(i)
        alone = [i for i, call in enumerate(calls) if call.num_ranks < 2 and i not in known]
        parts = [
            (list(known), _as_measured(list(known.values()))),
            (alone, Estimates.alike(np.zeros(len(alone)), 0.0, Source.FITTED)),
        ]
        for group, rows in groups.items():
            parts.append((rows, self._transfers(group, [calls[i].nbytes for i in rows])))
        estimates = Estimates.of_parts(len(calls), parts)
        return estimates.as_extrapolated() if self.is_elsewhere else estimates

    def summary(self) -> dict[str, Any]:
        """Return a JSON value: the fitted models, the number of their samples, and their errors."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "sha256": self.sha256,
            "ceilings": asdict(self.ceilings),
            "operators": [*self._kind_rows(), *self._host_rows()],
            "collectives": self._group_rows(),
            "network": {
                name: asdict(figure)
                for name, figure in link_figures(self.transfers.fitted_prior).items()
            },
        }

    def _host(self, key: Key, number: int) -> Estimates:
        measured = self.measured_host.get(key)
        if measured is None and key[0] is OperatorKind.SHARD_UNIT:
            unit = unit_guess(self.ceilings.launch_s)
            return Estimates.alike(np.full(number, unit.median), unit.sigma_log, Source.PRIOR)
        if measured is None and key == (OperatorKind.HOST_MICROBATCH, Phase.RECOMPUTE):
            measured = self.measured_host.get((OperatorKind.HOST_MICROBATCH, Phase.FORWARD))
        if measured is None:
            times = np.full(number, _HOST_LAUNCHES * self.ceilings.launch_s)
            return Estimates.alike(times, UNMEASURED_SIGMA_LOG, Source.PRIOR)
        times = np.full(number, measured.time_s)
        return Estimates.alike(times, measured.sigma_log, Source.MEASURED)

    def _fitted(self, key: Key, operators: list[Operator]) -> Estimates:
        """Estimate shapes that were not timed; see ``_after_launches`` if other shapes waited for
        the host."""
        waited = next((self.host_bound[k] for k in _stand_ins(key) if k in self.host_bound), None)
        if waited is None:
            return self._narrowed(key, operators, self._on_device(key, operators))
        bounds = [replace(one, phase=key[1]) for one in waited]
        estimates = self._on_device(key, [*operators, *bounds])
        host = _as_measured(list(waited.values()))
        return _after_launches(
            estimates, host, ahead_frac=self._ahead_frac, is_bound=not self.is_elsewhere
        )

    def _narrowed(self, key: Key, operators: list[Operator], fitted: Estimates) -> Estimates:
        """Return estimates no less certain than the operator's own time at other rows allows."""
        step_log = _ROWS_SIGMA_LOG.get(family(key[0]))
        if step_log is None or is_processor(self.device):
            return fitted
        known: defaultdict[tuple[int, ...], list[tuple[int, float]]] = defaultdict(list)
        for one, measured in self.measured.items():
            if one.shape and (one.kind, one.phase) in _stand_ins(key):
                like = (*one.shape[1:], one.element_nbytes)
                known[like].append((one.shape[0], measured.sigma_log))
        sigma_log = fitted.sigma_log.copy()
        is_rescaled = np.zeros(len(operators), dtype=np.bool_)
        for place, one in enumerate(operators):
            for rows, error_log in known[(*one.shape[1:], one.element_nbytes)]:
                octaves = abs(math.log2(one.shape[0] / rows))
                bound_log = math.hypot(error_log, step_log * math.sqrt(octaves))
                sigma_log[place] = min(sigma_log[place], bound_log)
                is_rescaled[place] = True
        return replace(fitted, sigma_log=sigma_log, is_rescaled=is_rescaled)

    @property
    def waiting_frac(self) -> float:
        """Share of the timed kinds and phases that waited for the host, 0 to 1."""
        return len(self.host_bound) / max(1, len(self._timed))

    @property
    def _timed(self) -> set[Key]:
        timed = {(one.kind, one.phase) for one in self.measured if one.phase is not Phase.STEP}
        return timed | self.host_bound.keys()

    @property
    def _ahead_frac(self) -> float:
        """Probability that the host is ahead of an untimed operator, from the share of those that
        waited here (rule of succession, Laplace 1814)."""
        timed = len(self._timed)
        return (timed - len(self.host_bound) + 1) / (timed + 2)

    def _on_device(self, key: Key, operators: list[Operator]) -> Estimates:
        """Estimate times on a device that never waits for the host."""
        if self.like is None and key in _SHARDED_PAIR:
            other = _SHARDED_PAIR[key]
            if _name(key) not in self.machine.pools and _name(other) in self.machine.pools:
                return self._over_shards(key, operators)
        batch = batch_of(operators)
        moved = self._like(key)
        if moved is not None:
            there = moved.predict(_name(key), batch)
            return Estimates.alike(np.exp(there.log_time), there.sigma_log, Source.EXTRAPOLATED)
        used = next((k for k in _stand_ins(key) if _name(k) in self.machine.pools), None)
        if used is None:
            prediction = self.machine.predict_unmeasured(batch)
        else:
            prediction = self.machine.predict(_name(used), replace(batch, phase=used[1]))
        return _estimates(prediction)

    def _over_shards(self, key: Key, operators: list[Operator]) -> Estimates:
        """Estimate optimizers over plain tensors from those over sharded ones, or the reverse."""
        launch_s = self.ceilings.launch_s
        if key[0] is OperatorKind.OPTIMIZER:
            log, sigma = plain_optimizer_log(self.measured, self.machine)
            times = math.exp(log) * np.array([law_s(one, self.machine) for one in operators])
            sigmas = np.full(len(operators), sigma)
        else:
            plain = [
                replace(one, kind=OperatorKind.OPTIMIZER, shape=one.shape[:1]) for one in operators
            ]
            known = self.operators(plain)
            calls = [calls_guess(one.shape[1], launch_s) for one in operators]
            added = np.array([guess.median for guess in calls])
            times = known.time_s + added
            open_log = np.array([guess.sigma_log for guess in calls])
            sigmas = np.hypot(known.time_s * known.sigma_log, added * open_log) / times
        return Estimates.alike(times, sigmas, Source.EXTRAPOLATED)

    def _like(self, key: Key) -> MachineModel | None:
        """Return the other machine's models if they include the operator and this machine has few
        shapes of it, else None."""
        name = _name(key)
        if self.like is None or name not in self.like.pools:
            return None
        pool = self.machine.pools.get(name)
        is_enough = pool is not None and pool.shapes_of[name] >= _NUM_SUFFICIENT_SHAPES
        return None if is_enough else self.like

    def _transfers(self, group: Group, nbytes: list[int]) -> Estimates:
        return _estimates(self.transfers.estimate(group, np.array(nbytes, dtype=np.float64)))

    def _kind_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, operators in _by_key(self.measured).items():
            name = _name(key)
            pool = self.machine.pools.get(name)
            sigmas = self._fitted(key, operators).sigma_log
            if pool is not None:
                sigmas = self.machine.predict(name, batch_of(operators)).sigma_log
            rows.append(
                {
                    "kind": key[0].value,
                    "phase": key[1].value,
                    "num_rows": sum(self.measured[o].num_rows for o in operators),
                    "num_shapes": len(operators),
                    "model": pool.model if pool is not None else "none: the device waited",
                    "efficiency_frac": self._median_efficiency_frac(operators),
                    "left_out_error_frac": _error_frac(pool.held_out_residuals[name])
                    if pool
                    else None,
                    "sigma_log": float(np.median(sigmas)),
                    "source": Source.MEASURED.value,
                }
            )
        return rows

    def _median_efficiency_frac(self, operators: Sequence[Operator]) -> float:
        """Return the time at the bare ceilings over the measured time, median over shapes."""
        law = self.machine.law.log_time(batch_of(operators))
        times = np.log([self.measured[o].time_s for o in operators])
        return float(np.exp(np.median(law - times)))

    def _host_rows(self) -> list[dict[str, Any]]:
        return [
            {
                "kind": kind.value,
                "phase": phase.value,
                "num_rows": measured.num_rows,
                "num_shapes": 1,
                "model": "constant",
                "time_s": measured.time_s,
                "sigma_log": measured.sigma_log,
                "source": Source.MEASURED.value,
            }
            for (kind, phase), measured in self.measured_host.items()
        ]

    def _group_rows(self) -> list[dict[str, Any]]:
        rows = []
        for group, model in self.transfers.groups.items():
            rows.append(
                {
                    "collective": group.collective.value,
                    "role": group.role.value,
                    "num_ranks": group.num_ranks,
                    "num_rows": model.num_rows,
                    "num_sizes": len(model.curve.log_nbytes),
                    "alpha_s": model.curve.law.fixed_s,
                    "bytes_per_s": 1.0 / model.curve.law.byte_s,
                    "left_out_error_frac": _error_frac(model.curve.held_out_errors),
                    "source": Source.MEASURED.value,
                }
            )
        return rows


def calibrate(table: SampleTable, *, device: str) -> Calibration:
    """Fit all models on a table; the same rows give the same calibration in any order.

    ``device`` is the driver's name of the accelerator or ``cpu``; it picks the priors. Raises
    ``CalibrationError`` if the table has no operator samples.
    """
    # A cached fit needs no table, and pandas is slow to import.
    from .measured_rows import measured_collectives, measured_host, measured_operators

    measured = measured_operators(table)
    if not measured:
        raise CalibrationError(
            f"no operator samples in {len(table.samples)} rows; record at least one clean hooked "
            f"step (more --calibrate-steps, fewer saves and evaluations inside the window)"
        )
    prior = device_prior(device)
    machine = fit_machine(_groups(measured), device=device, use_prior=True)
    measured_calls = measured_collectives(table)
    host = measured_host(table)
    if any(one.kind is OperatorKind.SHARDED_OPTIMIZER for one in measured):
        host = with_units(host, table.config(), machine.ceilings.launch_s)
    network = known_network(device, table.cluster())
    return Calibration(
        device=device,
        sha256=table.sha256,
        machine=machine,
        transfers=fit_collectives(measured_calls, network, prior_sigma_log=prior.error_sigma_log),
        measured=measured,
        measured_host=host,
        measured_transfers=measured_calls,
        host_bound={
            key: {o: measured[o] for o in operators if measured[o].is_host_bound}
            for key, operators in _by_key(measured).items()
            if any(measured[o].is_host_bound for o in operators)
        },
    )


def combine_with_other(calibration: Calibration, other: Calibration) -> Calibration:
    """Add another machine's models to a calibration of few samples: its operators, corrected by
    those samples, and its transfers if no comparable one was measured here.

    The two devices may differ: rates follow the data sheets and the samples. Raises
    ``CalibrationError`` if exactly one of them is a CPU.
    """
    _check_kinds(other.device, calibration.device)
    moved = transfer_to_device(
        other.machine, device=calibration.device, probes=_groups(calibration.measured)
    )
    return replace(
        calibration, like=moved, transfers=replace(calibration.transfers, like=other.transfers)
    )


def calibration_for_device(
    other: Calibration, device: str, cluster: Cluster | None = None
) -> Calibration:
    """Transfer a calibration to a device on which nothing was measured, by data sheets alone.

    The host's constants do not change.  Transfers start at the prior of the device and its
    ``cluster`` and deviate from it half as much as those of the other machine deviate from
    their own prior. Raises ``CalibrationError`` if exactly one of the two devices is a CPU.
    """
    _check_kinds(other.device, device)
    network = known_network(device, cluster or Cluster())
    alone = fit_collectives({}, network, prior_sigma_log=device_prior(device).error_sigma_log)
    return replace(
        other,
        device=device,
        machine=transfer_to_device(other.machine, device=device),
        transfers=replace(alone, like=other.transfers),
        measured={},
        measured_transfers={},
        is_elsewhere=True,
    )


def _check_kinds(measured: str, device: str) -> None:
    if is_processor(measured) is not is_processor(device):
        raise CalibrationError(
            f"times on {measured} do not apply to {device}, another kind of device; take a "
            "run on such a device"
        )


def _as_measured(measured: Sequence[Measured]) -> Estimates:
    return Estimates(
        time_s=np.array([one.time_s for one in measured]),
        sigma_log=np.array([one.sigma_log for one in measured]),
        sources=tuple(Source.PROBED if one.is_probe else Source.MEASURED for one in measured),
    )


def _estimates(predicted: Prediction | Transfers) -> Estimates:
    """Return the times, each with a source by its distance from the measured sizes."""
    return Estimates(
        time_s=np.exp(predicted.log_time),
        sigma_log=predicted.sigma_log,
        sources=tuple(
            Source.PRIOR
            if far == math.inf
            else (Source.EXTRAPOLATED if far > _TOUCHING_OCTAVES else Source.FITTED)
            for far in predicted.octaves.tolist()
        ),
    )


def _by_key(measured: Mapping[Operator, Measured]) -> dict[Key, list[Operator]]:
    """Group operators by kind and phase."""
    operators_by_key: defaultdict[Key, list[Operator]] = defaultdict(list)
    for operator in measured:
        operators_by_key[operator.kind, operator.phase].append(operator)
    return dict(operators_by_key)


def _groups(measured: Mapping[Operator, Measured]) -> dict[str, Timed]:
    """Return rows of the device's own time, by name; waiting for the host lowers their weight."""
    known = {operator: one for operator, one in measured.items() if one.device_s}
    return {
        _name(key): Timed(
            batch=batch_of(operators),
            time_s=np.array([known[o].device_s for o in operators]),
            weight=np.array([known[o].device_weight for o in operators]),
        )
        for key, operators in _by_key(known).items()
    }


def _after_launches(
    device: Estimates, host: Estimates, *, ahead_frac: float, is_bound: bool
) -> Estimates:
    """Combine estimates of a device that never waits with the host's launch times.

    The last entries of ``device`` are the operators of ``host``, whose times are the host's: with
    ``is_bound`` the device needs at most as long for each of them. The host is assumed to take as
    long for other shapes, and the longer time is returned. If the host is ahead, with probability
    ``ahead_frac``, any time between the two is equally likely.
    """
    number = len(device.sources) - len(host.sources)
    over_log = np.log(device.time_s[number:] / host.time_s) if is_bound else np.zeros(1)
    device_s = device.time_s[:number] * np.exp(-max(0.0, float(over_log.max())))
    device_log, host_s = device.sigma_log[:number], float(np.median(host.time_s))
    time_s = np.maximum(device_s, host_s)
    # Weight each sigma by the probability that its time is the longer one.
    is_device = np.array(
        [
            Estimate(median=host_s, unshared_sigma_log=sigma).below(one_s)
            for one_s, sigma in zip(device_s.tolist(), device_log.tolist(), strict=True)
        ]
    )
    # Mean square distance of a uniform distribution from its end: one third.
    open_log = np.log(time_s / device_s) * math.sqrt(ahead_frac / 3.0)
    parts = (is_device * device_log, (1.0 - is_device) * np.median(host.sigma_log), open_log)
    return Estimates(
        time_s=time_s,
        sigma_log=np.sqrt(sum(part**2 for part in parts)),
        sources=device.sources[:number],
    )


def _stand_ins(key: Key) -> list[Key]:
    """Return the kinds and phases that a key may take its times from, best first."""
    kind, phase = key
    other = {Phase.FORWARD: Phase.RECOMPUTE, Phase.RECOMPUTE: Phase.FORWARD}.get(phase)
    return [key] if other is None else [key, (kind, other)]


def _error_frac(residuals: NDArray[np.float64]) -> float | None:
    """Return the mean absolute relative error of held-out samples; None if there are none."""
    return float(np.mean(np.abs(np.expm1(residuals)))) if len(residuals) else None


def _name(key: Key) -> str:
    return f"{key[0].value}/{key[1].value}"

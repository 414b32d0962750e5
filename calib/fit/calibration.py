"""The calibration of a run: every sample in, the time of any operator or collective out."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from ..errors import CalibrationError
from ..network import (
    CollectiveModel,
    Group,
    Measured,
    canonical,
    fit_collectives,
    group_of,
    known_network,
    link_figures,
)
from ..records import Cluster
from ..regressors import UNMEASURED_SIGMA_LOG, Z_90
from ..workload import CollectiveCall, Operator, OperatorKind, Phase
from .batches import Timed, batch_of
from .estimates import Estimates, Source
from .laws import Ceilings, OperatorFamily, family
from .machine import MachineModel, fit_machine
from .priors import device_prior, is_processor
from .sharded_host import calls_guess, law_s, plain_optimizer_log, unit_guess, with_units
from .transferred import transfer

if TYPE_CHECKING:
    from ..samples import SampleTable

Floats = NDArray[np.float64]
Key = tuple[OperatorKind, Phase]
SCHEMA = 1
"""Of ``summary``."""
_OVER_PLAIN = (OperatorKind.OPTIMIZER, Phase.STEP)
_OVER_SHARDS = (OperatorKind.SHARDED_OPTIMIZER, Phase.STEP)
_SHARDED_PAIR = {_OVER_PLAIN: _OVER_SHARDS, _OVER_SHARDS: _OVER_PLAIN}
"""Optimizers that stand in for each other, each by the law of what the other lacks."""
_HOST_LAUNCHES = 10.0
"""Launches that a host constant is taken for where it was never measured."""
_SHAPES_OF_ITS_OWN = 200
"""Shapes of an operator from which another machine adds nothing: with as many probes a moved model
errs as one that is fitted to them."""
_LEAST_SIGMA_LOG = 1e-6
"""Keeps quotients finite."""
_TOUCHING_OCTAVES = 1e-6
"""Outside by rounding alone is inside."""


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
    weight_fracs: Mapping[OperatorKind, float] = field(default_factory=dict)
    """Share of the weight's gradient in a linear's backward phase, by kind, where it was traced."""
    like: MachineModel | None = None
    """Another machine's models, moved here: they answer for what few samples of this one are of."""
    is_elsewhere: bool = False
    """Nothing was timed on this device: what the samples say is at best extrapolated to it."""
    host_bound: Mapping[Key, Mapping[Operator, Measured]] = field(default_factory=dict)
    """Operators for which the device waited: what they took is the host's time."""

    @property
    def ceilings(self) -> Ceilings:
        """Rates of one rank's machine."""
        return self.machine.ceilings

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        """Time of each operator on this machine."""
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
        told = Estimates.of_parts(len(operators), parts)
        return told.carried() if self.is_elsewhere else told

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        """Transfer time of each collective without waiting for late ranks; 0 for one rank alone."""
        known: dict[int, Measured] = {}
        groups: defaultdict[Group, list[int]] = defaultdict(list)
        for i, call in enumerate(map(canonical, calls)):
            found = self.measured_transfers.get(call)
            if found is not None and not found.is_bound:
                known[i] = found
            elif call.num_ranks > 1:
                groups[group_of(call)].append(i)
        alone = [i for i, call in enumerate(calls) if call.num_ranks < 2 and i not in known]
        parts = [
            (list(known), _as_measured(list(known.values()))),
            (alone, _constant(len(alone), 0.0, 0.0, Source.FITTED)),
        ]
        for group, rows in groups.items():
            parts.append((rows, self._transfers(group, [calls[i].nbytes for i in rows])))
        told = Estimates.of_parts(len(calls), parts)
        return told.carried() if self.is_elsewhere else told

    def summary(self) -> dict[str, Any]:
        """What was fitted, on how much, and how well, as a JSON value."""
        return {
            "schema": SCHEMA,
            "device": self.device,
            "sha256": self.sha256,
            "ceilings": asdict(self.ceilings),
            "operators": [*self._kind_rows(), *self._host_rows()],
            "collectives": self._group_rows(),
            "network": {
                name: asdict(found) for name, found in link_figures(self.transfers.carrying).items()
            },
        }

    def _host(self, key: Key, number: int) -> Estimates:
        found = self.measured_host.get(key)
        if found is None and key[0] is OperatorKind.SHARD_UNIT:
            unit = unit_guess(self.ceilings.launch_s)
            return _constant(number, unit.time_s, unit.sigma_log, Source.PRIOR)
        if found is None and key == (OperatorKind.HOST_MICROBATCH, Phase.RECOMPUTE):
            found = self.measured_host.get((OperatorKind.HOST_MICROBATCH, Phase.FORWARD))
        if found is None:
            time_s = _HOST_LAUNCHES * self.ceilings.launch_s
            return _constant(number, time_s, UNMEASURED_SIGMA_LOG, Source.PRIOR)
        return _constant(number, found.time_s, found.sigma_log, Source.MEASURED)

    def _fitted(self, key: Key, operators: list[Operator]) -> Estimates:
        """Shapes that were not timed; ``_after_launches`` where others waited for the host."""
        waited = next((self.host_bound[k] for k in _stand_ins(key) if k in self.host_bound), None)
        if waited is None:
            return self._on_device(key, operators)
        bounds = [replace(one, phase=key[1]) for one in waited]
        found = self._on_device(key, [*operators, *bounds])
        host = _as_measured(list(waited.values()))
        return _after_launches(
            found, host, ahead_frac=self._ahead_frac, is_bound=not self.is_elsewhere
        )

    @property
    def waiting_frac(self) -> float:
        """Share of the kinds of operators and passes that waited for the host, 0 to 1."""
        return len(self.host_bound) / max(1, len(self._timed))

    @property
    def _timed(self) -> set[Key]:
        timed = {(one.kind, one.phase) for one in self.measured if one.phase is not Phase.STEP}
        return timed | self.host_bound.keys()

    @property
    def _ahead_frac(self) -> float:
        """How likely the host is ahead of an operator elsewhere, by how many waited here (the rule
        of succession, Laplace 1814)."""
        timed = len(self._timed)
        return (timed - len(self.host_bound) + 1) / (timed + 2)

    def _on_device(self, key: Key, operators: list[Operator]) -> Estimates:
        """Times on a device that need not wait for the host."""
        if self.like is None and key in _SHARDED_PAIR:
            other = _SHARDED_PAIR[key]
            if _name(key) not in self.machine.pools and _name(other) in self.machine.pools:
                return self._over_shards(key, operators)
        batch = batch_of(operators)
        moved = self._like(key)
        if moved is not None:
            found = moved.predict(_name(key), batch)
            return Estimates(
                time_s=np.exp(found.log_time),
                sigma_log=(found.high - found.low) / (2 * Z_90),
                sources=(Source.EXTRAPOLATED,) * len(operators),
            )
        used = next((k for k in _stand_ins(key) if _name(k) in self.machine.pools), None)
        if used is None:
            found = self.machine.predict_unmeasured(batch)
        else:
            found = self.machine.predict(_name(used), replace(batch, phase=used[1]))
        return Estimates(
            time_s=np.exp(found.log_time),
            sigma_log=(found.high - found.low) / (2 * Z_90),
            sources=_sources(found.octaves),
        )

    def _over_shards(self, key: Key, operators: list[Operator]) -> Estimates:
        """An optimizer over plain tensors by those over sharded ones, or the other way."""
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
            added = np.array([guess.time_s for guess in calls])
            times = known.time_s + added
            open_log = np.array([guess.sigma_log for guess in calls])
            sigmas = np.hypot(known.time_s * known.sigma_log, added * open_log) / times
        return Estimates(
            time_s=times, sigma_log=sigmas, sources=(Source.EXTRAPOLATED,) * len(operators)
        )

    def _like(self, key: Key) -> MachineModel | None:
        """The other machine's models where they know the operator and this one's know it less."""
        name = _name(key)
        if self.like is None or name not in self.like.pools:
            return None
        own = self.machine.pools.get(name)
        is_enough = own is not None and own.shapes_of[name] >= _SHAPES_OF_ITS_OWN
        return None if is_enough else self.like

    def _transfers(self, group: Group, nbytes: list[int]) -> Estimates:
        found = self.transfers.estimate(group, np.array(nbytes, dtype=np.float64))
        return Estimates(
            time_s=np.exp(found.log_time),
            sigma_log=found.sigma_log,
            sources=_sources(found.octaves),
        )

    def _kind_rows(self) -> list[dict[str, Any]]:
        rows = []
        for key, operators in _by_key(self.measured).items():
            name = _name(key)
            pool = self.machine.pools.get(name)
            widths = 2 * Z_90 * self._fitted(key, operators).sigma_log
            if pool is not None:
                found = self.machine.predict(name, batch_of(operators))
                widths = found.high - found.low
            rows.append(
                {
                    "kind": key[0].value,
                    "phase": key[1].value,
                    "num_rows": sum(self.measured[o].num_rows for o in operators),
                    "num_shapes": len(operators),
                    "model": pool.model if pool is not None else "none: the device waited",
                    "efficiency_frac": self._median_efficiency_frac(operators),
                    "left_out_error_frac": _error_frac(pool.left_out[name]) if pool else None,
                    "sigma_log": float(np.median(widths)) / (2 * Z_90),
                    "source": Source.MEASURED.value,
                }
            )
        return rows

    def _median_efficiency_frac(self, operators: Sequence[Operator]) -> float:
        """Time at the bare ceilings over measured time, median over shapes."""
        law = self.machine.law.log_time(batch_of(operators))
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
            rows.append(
                {
                    "collective": group.collective.value,
                    "role": group.role.value,
                    "num_ranks": group.num_ranks,
                    "num_rows": model.num_rows,
                    "num_sizes": len(model.curve.log_nbytes),
                    "alpha_s": model.curve.law.fixed_s,
                    "bytes_per_s": 1.0 / model.curve.law.byte_s,
                    "left_out_error_frac": _error_frac(model.curve.held_out),
                    "source": Source.MEASURED.value,
                }
            )
        return rows


def calibrate(table: SampleTable, *, device: str) -> Calibration:
    """Fit all models on a table; the same rows give the same calibration in any order.

    ``device`` is the driver's name of the accelerator or ``cpu``; it picks the priors.  Raises
    ``CalibrationError`` where the table has no operator samples.
    """
    # A cached fit answers without a table: pandas is slow to import.
    from ..samples import weight_fracs
    from .training import measured_collectives, measured_host, measured_operators

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
        weight_fracs=weight_fracs(table.traced),
        host_bound={
            key: {o: measured[o] for o in operators if measured[o].is_host_bound}
            for key, operators in _by_key(measured).items()
            if any(measured[o].is_host_bound for o in operators)
        },
    )


def carried_over(own: Calibration, other: Calibration) -> Calibration:
    """A calibration of few samples with another machine's operators, which they correct, and with
    its transfers where no comparable one was measured here.

    The two may be of different devices of a kind: rates follow the data sheets and the samples.
    Raises ``CalibrationError`` where one is a CPU and the other is none.
    """
    _check_kinds(other.device, own.device)
    moved = transfer(other.machine, device=own.device, probes=_groups(own.measured))
    return replace(own, like=moved, transfers=replace(own.transfers, like=other.transfers))


def on_device(other: Calibration, device: str, cluster: Cluster | None = None) -> Calibration:
    """What a calibration says of a device that nothing was measured on: by data sheets alone.

    The host's constants stay; transfers are those of the device's prior, with what is said of the
    ``cluster`` that it is in, half as far from it as those of the other machine are from its own.
    Raises ``CalibrationError`` where one is a CPU and the other is none.
    """
    _check_kinds(other.device, device)
    network = known_network(device, cluster or Cluster())
    alone = fit_collectives({}, network, prior_sigma_log=device_prior(device).error_sigma_log)
    return replace(
        other,
        device=device,
        machine=transfer(other.machine, device=device),
        transfers=replace(alone, like=other.transfers),
        measured={},
        measured_transfers={},
        is_elsewhere=True,
    )


def _check_kinds(measured: str, device: str) -> None:
    if is_processor(measured) is not is_processor(device):
        raise CalibrationError(
            f"times on {measured} say nothing of {device}, which is no device of its kind; take a "
            "run on such a device"
        )


def _as_measured(found: Sequence[Measured]) -> Estimates:
    return Estimates(
        time_s=np.array([one.time_s for one in found]),
        sigma_log=np.array([one.sigma_log for one in found]),
        sources=tuple(Source.PROBED if one.is_probe else Source.MEASURED for one in found),
    )


def _constant(number: int, time_s: float, sigma_log: float, source: Source) -> Estimates:
    return Estimates(
        time_s=np.full(number, time_s),
        sigma_log=np.full(number, sigma_log),
        sources=(source,) * number,
    )


def _sources(octaves: NDArray[np.float64]) -> tuple[Source, ...]:
    """By how far sizes lie beyond those that were measured."""
    return tuple(
        Source.PRIOR
        if far == math.inf
        else (Source.EXTRAPOLATED if far > _TOUCHING_OCTAVES else Source.FITTED)
        for far in octaves.tolist()
    )


def _by_key(measured: Mapping[Operator, Measured]) -> dict[Key, list[Operator]]:
    """Operators by kind and phase."""
    found: defaultdict[Key, list[Operator]] = defaultdict(list)
    for operator in measured:
        found[operator.kind, operator.phase].append(operator)
    return dict(found)


def _groups(measured: Mapping[Operator, Measured]) -> dict[str, Timed]:
    """Rows of the device's own time; what it waited of others takes from their weight."""
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
    found: Estimates, host: Estimates, *, ahead_frac: float, is_bound: bool
) -> Estimates:
    """Estimates of a device that need not wait, for one that may have to.

    The last of ``found`` are of the operators of ``host``, whose times are the host's: with
    ``is_bound`` the device takes no more for any of them.  The host takes as long for other shapes,
    and the longer of both is given.  Where the host is ahead, with a probability of ``ahead_frac``,
    anywhere between the two is as likely.
    """
    number = len(found.sources) - len(host.sources)
    over_log = np.log(found.time_s[number:] / host.time_s) if is_bound else np.zeros(1)
    device_s = found.time_s[:number] * np.exp(-max(0.0, float(over_log.max())))
    device_log, host_s = found.sigma_log[:number], float(np.median(host.time_s))
    time_s = np.maximum(device_s, host_s)
    # The doubt of either counts by how likely it is the longer one.
    behind = np.log(device_s / host_s) / (math.sqrt(2.0) * np.maximum(device_log, _LEAST_SIGMA_LOG))
    is_device = np.array([(1.0 + math.erf(value)) / 2.0 for value in behind.tolist()])
    # A third: mean square distance of an even spread from its end.
    open_log = np.log(time_s / device_s) * math.sqrt(ahead_frac / 3.0)
    parts = (is_device * device_log, (1.0 - is_device) * np.median(host.sigma_log), open_log)
    return Estimates(
        time_s=time_s,
        sigma_log=np.sqrt(sum(part**2 for part in parts)),
        sources=found.sources[:number],
    )


def _stand_ins(key: Key) -> list[Key]:
    """Where a kind and phase may take its times from, best first."""
    kind, phase = key
    other = {Phase.FORWARD: Phase.RECOMPUTE, Phase.RECOMPUTE: Phase.FORWARD}.get(phase)
    return [key] if other is None else [key, (kind, other)]


def _error_frac(residuals: NDArray[np.float64]) -> float | None:
    """Mean absolute relative error of left-out samples; None where none could be left out."""
    return float(np.mean(np.abs(np.expm1(residuals)))) if len(residuals) else None


def _name(key: Key) -> str:
    return f"{key[0].value}/{key[1].value}"

"""The host's time to launch the passes of a layer, from the operators that showed it.

The log of a launch time is the sum of a class of operator (its kind and pass; ratios of classes
belong to the program) and of a run (the rate of a host, which drifts), and scatter.  A device that
keeps up with its host shows every launch, a busy one only those before its queue was full; so the
classes, and if need be the rate, come from all runs of the machine.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..layers import BlockKind, block, launched_frac
from ..network import Measured
from ..regressors import Estimate, drawn_sigma_log
from ..timeline import Floats, Ints
from ..workload import Operator, OperatorKind, Phase, RunConfig

HOST_SCATTER_LOG = 0.19
"""Scatter of host-bound steps between launches of one command: 0.054, 0.068 and 0.078 s
(``benchmarks/RESULTS.md``), and of a class of operator between shapes."""
_WAITS_FRAC = 0.9
"""Share of waiting from which an operator's time is its host's."""
_ENDS = frozenset({OperatorKind.EMBEDDING, OperatorKind.LOGITS, OperatorKind.LOSS})
"""Operators outside layers: a host is slow in the first ones of a pass."""
_ROUNDS = 50
"""Sweeps over classes and runs; each halves the distance from the least squares or better."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchTime:
    """The host's time to launch one class of operator, as one run showed it."""

    kind: OperatorKind
    phase: Phase
    time_s: float
    sigma_log: float
    """Standard deviation of its logarithm between steps and shapes."""


def launch_times(measured: Mapping[Operator, Measured]) -> tuple[LaunchTime, ...]:
    """Return the launch times that a run's operators showed, in the order of their names.

    Tables from before launches were recorded have them where the device waited throughout.
    """
    known: defaultdict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for operator, one in measured.items():
        if operator.phase is Phase.STEP or operator.kind in _ENDS or one.is_probe:
            continue
        if one.host_s:
            known[operator.kind.value, operator.phase.value].append(
                (one.host_s, one.host_sigma_log)
            )
        elif one.host_bound_frac > _WAITS_FRAC:
            known[operator.kind.value, operator.phase.value].append((one.time_s, one.sigma_log))
    out = []
    for (kind, phase), pairs in sorted(known.items()):
        logs, sigmas = np.log([time_s for time_s, _ in pairs]), [sigma for _, sigma in pairs]
        out.append(
            LaunchTime(
                kind=OperatorKind(kind),
                phase=Phase(phase),
                time_s=math.exp(float(np.median(logs))),
                sigma_log=math.hypot(float(np.median(sigmas)), float(np.std(logs))),
            )
        )
    return tuple(out)


def layer_launches(
    config: RunConfig, run_times: Sequence[LaunchTime], others: Sequence[Sequence[LaunchTime]]
) -> Mapping[Phase, Estimate]:
    """Return the host's time for the launches of a layer of a running layout, by pass, on an x86
    host; a pass without any known operator is left out.

    ``run_times`` are this run's launch times, ``others`` those of other runs of its machine.
    Experts and graphs have none: the host's work differs there with the routing, or leaves no
    marks.
    """
    if config.uses_cuda_graphs or config.model.experts is not None:
        return {}
    law = _LaunchLaw.of(run_times, others)
    layer = block(config, BlockKind.LAYER)
    out = {}
    for phase, operators in ((Phase.FORWARD, layer.forward), (Phase.BACKWARD, layer.backward)):
        known = [
            (law.class_log[operator.kind, phase], count, law.class_sigma_log[operator.kind, phase])
            for operator, count in operators
            if (operator.kind, phase) in law.class_log
        ]
        if not known:
            continue
        times_s = np.array([count * math.exp(log) for log, count, _ in known])
        known_frac = sum(count for _, count, _ in known) / sum(count for _, count in operators)
        class_sigma = float(times_s @ [sigma for *_, sigma in known]) / float(times_s.sum())
        layer_s = float(times_s.sum()) / known_frac * math.exp(law.rate_log)
        # The floor refers to an x86 host; layouts on another host have a factor on it.
        out[phase] = Estimate(
            median=layer_s / launched_frac(config, BlockKind.LAYER),
            unshared_sigma_log=math.hypot(law.rate_sigma_log, class_sigma, 1.0 - known_frac),
        )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchLaw:
    """Launch times by class, and the rate of one run."""

    class_log: Mapping[tuple[OperatorKind, Phase], float]
    class_sigma_log: Mapping[tuple[OperatorKind, Phase], float]
    rate_log: float
    rate_sigma_log: float

    @staticmethod
    def of(run_times: Sequence[LaunchTime], others: Sequence[Sequence[LaunchTime]]) -> _LaunchLaw:
        fit = _Fit.of([run for run in (run_times, *others) if run])
        rates = fit.rates if len(fit.rates) > 1 else fit.rates[:0]
        between = drawn_sigma_log(rates, prior_sigma_log=HOST_SCATTER_LOG)
        rate, sigma = 0.0, between / math.sqrt(max(1, len(fit.rates)))
        if run_times:
            apart = fit.residuals[: len(run_times)]
            scatter = drawn_sigma_log(apart, prior_sigma_log=HOST_SCATTER_LOG)
            error = scatter / math.sqrt(len(run_times))
            rate = float(fit.rates[0]) * between**2 / (between**2 + error**2)
            sigma = between * error / math.hypot(between, error)
        return _LaunchLaw(
            class_log=dict(zip(fit.classes, fit.centers.tolist(), strict=True)),
            class_sigma_log=dict(zip(fit.classes, fit.spreads.tolist(), strict=True)),
            rate_log=rate,
            rate_sigma_log=sigma,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Fit:
    """Least squares of log launch times on classes and runs; rates have a mean of 0."""

    classes: tuple[tuple[OperatorKind, Phase], ...]
    centers: Floats
    """Log seconds of each class."""
    spreads: Floats
    """Deviation of each class within runs."""
    rates: Floats
    """Log rate of each run."""
    residuals: Floats
    """Shape (times,), in the order of the runs."""

    @staticmethod
    def of(runs: Sequence[Sequence[LaunchTime]]) -> _Fit:
        times = [one for run in runs for one in run]
        classes = {
            name: place
            for place, name in enumerate(dict.fromkeys((one.kind, one.phase) for one in times))
        }
        of_run = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        of_class = np.array([classes[one.kind, one.phase] for one in times], dtype=np.int64)
        logs = np.log([one.time_s for one in times])
        sigmas = np.array([one.sigma_log for one in times])
        weights = 1.0 / (sigmas**2 + HOST_SCATTER_LOG**2)
        rates, centers = np.zeros(len(runs)), np.zeros(len(classes))
        for _ in range(_ROUNDS if runs else 0):
            centers = _means(logs - rates[of_run], weights, of_class, len(classes))
            rates = _means(logs - centers[of_class], weights, of_run, len(runs))
            rates -= rates.mean()
        return _Fit(
            classes=tuple(classes),
            centers=centers,
            spreads=_means(sigmas, weights, of_class, len(classes)),
            rates=rates,
            residuals=logs - centers[of_class] - rates[of_run],
        )


def _means(values: Floats, weights: Floats, places: Ints, number: int) -> Floats:
    """Return the weighted mean of the values at each place."""
    sums = np.bincount(places, weights * values, number)
    return sums / np.bincount(places, weights, number)

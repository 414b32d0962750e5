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
from typing import TypeAlias

import numpy as np

from ..layers.blocks import BlockKind, block
from ..layers.launches import launched_frac
from ..network.groups import Measured
from ..regressors.estimate import Estimate
from ..regressors.robust import drawn_sigma_log
from ..timeline.items import Floats, Ints
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase

HOST_SCATTER_LOG = 0.19
"""Scatter of host-bound steps between launches of one command: 0.054, 0.068 and 0.078 s
(``benchmarks/RESULTS.md``), and of a class of operator between shapes."""
_WAITS_FRAC = 0.9
"""Share of waiting from which an operator's time is its host's."""
_ENDS = frozenset({OperatorKind.EMBEDDING, OperatorKind.LOGITS, OperatorKind.LOSS})
"""Operators outside layers: a host is slow in the first ones of a pass."""
_ROUNDS = 50
"""Sweeps over classes and runs; each halves the distance from the least squares or better."""


LaunchTimes: TypeAlias = Mapping[tuple[OperatorKind, Phase], Estimate]
"""The host's seconds to launch each class of operator, as one run showed them; a deviation is that
between steps and shapes."""


def launch_times(measured: Mapping[Operator, Measured]) -> LaunchTimes:
    """Return the launch times that a run's operators showed, in the order of their names.

    Tables from before launches were recorded have them where the device waited throughout.
    """
    known: defaultdict[tuple[str, str], list[Estimate]] = defaultdict(list)
    for operator, one in measured.items():
        if operator.phase is Phase.STEP or operator.kind in _ENDS or one.is_probe:
            continue
        host = one.host
        if host is None and one.host_bound_frac > _WAITS_FRAC:
            host = Estimate(median=one.time_s, unshared_sigma_log=one.sigma_log)
        if host is not None:
            known[operator.kind.value, operator.phase.value].append(host)
    out = {}
    for (kind, phase), times in sorted(known.items()):
        logs, sigmas = np.log([one.median for one in times]), [one.sigma_log for one in times]
        out[OperatorKind(kind), Phase(phase)] = Estimate(
            median=math.exp(float(np.median(logs))),
            unshared_sigma_log=math.hypot(float(np.median(sigmas)), float(np.std(logs))),
        )
    return out


def layer_launches(
    config: RunConfig, run_times: LaunchTimes, others: Sequence[LaunchTimes]
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
            (law.classes[operator.kind, phase], count)
            for operator, count in operators
            if (operator.kind, phase) in law.classes
        ]
        if not known:
            continue
        times_s = np.array([count * one.median for one, count in known])
        known_frac = sum(count for _, count in known) / sum(count for _, count in operators)
        class_sigma = float(times_s @ [one.sigma_log for one, _ in known]) / float(times_s.sum())
        layer_s = float(times_s.sum()) / known_frac * law.rate.median
        # The floor refers to an x86 host; layouts on another host have a factor on it.
        out[phase] = Estimate(
            median=layer_s / launched_frac(config, BlockKind.LAYER),
            unshared_sigma_log=math.hypot(law.rate.sigma_log, class_sigma, 1.0 - known_frac),
        )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchLaw:
    """Launch times by class, and the rate of one run."""

    classes: LaunchTimes
    rate: Estimate

    @staticmethod
    def of(run_times: LaunchTimes, others: Sequence[LaunchTimes]) -> _LaunchLaw:
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
            classes={
                name: Estimate(median=math.exp(log), unshared_sigma_log=spread)
                for name, log, spread in zip(
                    fit.classes, fit.centers.tolist(), fit.spreads.tolist(), strict=True
                )
            },
            rate=Estimate(median=math.exp(rate), unshared_sigma_log=sigma),
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
    def of(runs: Sequence[LaunchTimes]) -> _Fit:
        times = [one for run in runs for one in run.values()]
        names = [name for run in runs for name in run]
        classes = {name: place for place, name in enumerate(dict.fromkeys(names))}
        of_run = np.repeat(np.arange(len(runs)), [len(run) for run in runs])
        of_class = np.array([classes[name] for name in names], dtype=np.int64)
        logs = np.log([one.median for one in times])
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

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
from ..regressors import drawn_sigma_log
from ..workload import Operator, OperatorKind, Phase, RunConfig

HOST_SCATTER_LOG = 0.19
"""Scatter of host-bound steps between launches of one command: 0.054, 0.068 and 0.078 s
(``benchmarks/RESULTS.md``, "Choice among measured layouts")."""
_CLASS_SCATTER_LOG = 0.15
"""Deviation of a class's launch time between shapes and programs of one machine."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerLaunch:
    """The host's time for one pass of a layer, and the deviation of its logarithm in a launch."""

    time_s: float
    sigma_log: float


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
) -> Mapping[Phase, LayerLaunch]:
    """Return the launches of a layer of a running layout, by pass, on an x86 host; a pass without
    any known operator is left out.

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
        out[phase] = LayerLaunch(
            time_s=layer_s / launched_frac(config, BlockKind.LAYER),
            sigma_log=math.hypot(law.rate_sigma_log, class_sigma, 1.0 - known_frac),
        )
    return out


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaunchLaw:
    """Least squares of log launch times on classes and runs, with the rate of one run."""

    class_log: Mapping[tuple[OperatorKind, Phase], float]
    class_sigma_log: Mapping[tuple[OperatorKind, Phase], float]
    rate_log: float
    rate_sigma_log: float

    @staticmethod
    def of(run_times: Sequence[LaunchTime], others: Sequence[Sequence[LaunchTime]]) -> _LaunchLaw:
        runs = [run for run in (run_times, *others) if run]
        rows = [
            (place, (one.kind, one.phase), one) for place, run in enumerate(runs) for one in run
        ]
        classes = {name: place for place, name in enumerate(dict.fromkeys(n for _, n, _ in rows))}
        of_run = np.array([place for place, *_ in rows], dtype=np.int64)
        of_class = np.array([classes[name] for _, name, _ in rows], dtype=np.int64)
        logs = np.log([one.time_s for *_, one in rows])
        weights = 1.0 / np.array([one.sigma_log**2 + _CLASS_SCATTER_LOG**2 for *_, one in rows])
        rates, centers = np.zeros(len(runs)), np.zeros(len(classes))
        for _ in range(_ROUNDS):
            centers = _means(logs - rates[of_run], weights, of_class, len(classes))
            rates = _means(logs - centers[of_class], weights, of_run, len(runs))
            rates -= rates.mean() if len(runs) else 0.0
        apart = logs - centers[of_class] - rates[of_run]
        between = drawn_sigma_log(
            rates if len(runs) > 1 else rates[:0], prior_sigma_log=HOST_SCATTER_LOG
        )
        rate, sigma = 0.0, between / math.sqrt(max(1, len(runs)))
        if run_times:
            scatter = drawn_sigma_log(apart[of_run == 0], prior_sigma_log=_CLASS_SCATTER_LOG)
            error = scatter / math.sqrt(len(run_times))
            rate = float(rates[0]) * between**2 / (between**2 + error**2)
            sigma = between * error / math.hypot(between, error)
        spread = _means(
            np.array([one.sigma_log for *_, one in rows]), weights, of_class, len(classes)
        )
        return _LaunchLaw(
            class_log={name: float(centers[place]) for name, place in classes.items()},
            class_sigma_log={name: float(spread[place]) for name, place in classes.items()},
            rate_log=rate,
            rate_sigma_log=sigma,
        )


def _means(values: np.ndarray, weights: np.ndarray, places: np.ndarray, number: int) -> np.ndarray:
    sums = np.bincount(places, weights * values, number)
    return sums / np.maximum(np.bincount(places, weights, number), 1e-12)

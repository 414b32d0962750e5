"""Host time of sharding, separated from other host time, so that only sharded layouts pay for it.

Hooks time an optimizer as a whole, and the rest of a pass as a whole. Under FSDP each time has two
parts: work that every layout has, and the host's overhead for each sharded tensor and unit. The law
of the first and a prior of the second split the sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ..layers.stage_work import stage_operators
from ..network.groups import Measured
from ..regressors.estimate import Estimate
from ..workload.config import RunConfig
from ..workload.operators import Operator, OperatorKind, Phase
from .batches import batch_of
from .machine import MachineModel
from .operator_kinds import SHARD_UNIT_LAUNCHES, SHARDED_CALL_LAUNCHES

Key = tuple[OperatorKind, Phase]
SHARDED_SIGMA_LOG = 0.7
"""Deviation of the host's overhead per tensor or unit from the one measured processor: releases of
PyTorch before 2.9 dispatched a DTensor in Python, which took two to three times as long."""
PLAIN_SIGMA_LOG = 0.4
"""Deviation of an optimizer from the law of its launches and bytes at a machine's fitted rates."""
PLAIN_HOST_S = 0.3e-3
"""Host time of a pass that was never measured without shards, and its deviation: those of the step
model's own constant (``steps/_scales.py``)."""
PLAIN_HOST_SIGMA_LOG = 1.0
_GRID = np.linspace(-6.0, 6.0, 2401)
"""Log factors on the grid: ten deviations of the narrower prior, in steps of half a percent."""


def split_measured(total_s: float, one: Estimate, other: Estimate) -> tuple[Estimate, Estimate]:
    """Split a measured sum into its two parts of largest posterior, with their remaining deviation.

    Among pairs that add up to the sum, choose the nearest to both medians, in deviations of their
    logarithms; the less certain part moves more.

    >>> tight, loose = (Estimate(median=1.0, unshared_sigma_log=sigma) for sigma in (0.01, 1.0))
    >>> [round(part.median, 2) for part in split_measured(5.0, tight, loose)]
    [1.0, 4.0]
    """
    log_one = np.log(one.median) + one.sigma_log * _GRID
    log_one = log_one[np.exp(log_one) < total_s]
    if not log_one.size:
        half = total_s / 2
        return replace(one, median=half), replace(other, median=half)
    first = np.exp(log_one)
    second = total_s - first
    away = ((log_one - np.log(one.median)) / one.sigma_log) ** 2
    away += ((np.log(second) - np.log(other.median)) / other.sigma_log) ** 2
    weight = np.exp(-(away - away.min()) / 2)
    best = int(np.argmin(away))
    return tuple(  # type: ignore[return-value]
        Estimate(median=float(part[best]), unshared_sigma_log=_deviation(np.log(part), weight))
        for part in (first, second)
    )


def _deviation(values: np.ndarray, weight: np.ndarray) -> float:
    mean = np.average(values, weights=weight)
    return float(np.sqrt(np.average((values - mean) ** 2, weights=weight)))


def with_units(
    host: Mapping[Key, Measured], config: RunConfig, launch_s: float
) -> dict[Key, Measured]:
    """Split the host's constants of an FSDP run into those of a pass and of a unit; unchanged
    without units."""
    constants, unit = dict(host), unit_guess(launch_s)
    work = stage_operators(config, 0)
    num_chunks = len(config.chunks_of(0))
    for phase, counts in ((Phase.FORWARD, work.forward), (Phase.BACKWARD, work.backward)):
        key = (OperatorKind.HOST_MICROBATCH, phase)
        units = sum(count for one, count in counts if one.kind is OperatorKind.SHARD_UNIT)
        if not units or key not in constants:
            continue
        total, each = constants[key], units / num_chunks
        plain, sharded = split_measured(
            total.time_s,
            Estimate(median=PLAIN_HOST_S, unshared_sigma_log=PLAIN_HOST_SIGMA_LOG),
            replace(unit, median=each * unit.median),
        )
        constants[key] = _measured_part(total, plain)
        constants[OperatorKind.SHARD_UNIT, phase] = _measured_part(
            total, replace(sharded, median=sharded.median / each)
        )
    return constants


def unit_guess(launch_s: float) -> Estimate:
    """Return the prior of one pass of a unit."""
    return Estimate(median=SHARD_UNIT_LAUNCHES * launch_s, unshared_sigma_log=SHARDED_SIGMA_LOG)


def calls_guess(calls: float, launch_s: float) -> Estimate:
    """Return the prior of the additional time of ``calls`` calls on sharded tensors over plain
    ones."""
    return Estimate(
        median=calls * SHARDED_CALL_LAUNCHES * launch_s, unshared_sigma_log=SHARDED_SIGMA_LOG
    )


def plain_optimizer_log(
    measured: Mapping[Operator, Measured], machine: MachineModel
) -> tuple[float, float]:
    """Return the log of a plain optimizer's time over its law, and its deviation, from measured
    optimizers over sharded tensors less the prior of their calls."""
    log_sigma_pairs = [
        _over_law(operator, one.time_s, machine)
        for operator, one in measured.items()
        if operator.kind is OperatorKind.SHARDED_OPTIMIZER
    ]
    if not log_sigma_pairs:
        return 0.0, PLAIN_SIGMA_LOG
    logs, sigmas = zip(*log_sigma_pairs, strict=True)
    return float(np.median(logs)), max(sigmas)


def law_s(operator: Operator, machine: MachineModel) -> float:
    """Return the seconds of an optimizer over plain tensors at the fitted rates, without a factor
    of its own."""
    plain = replace(operator, kind=OperatorKind.OPTIMIZER, shape=operator.shape[:1])
    return math.exp(machine.law.log_time(batch_of([plain]))[0])


def _over_law(operator: Operator, total_s: float, machine: MachineModel) -> tuple[float, float]:
    usual_s = law_s(operator, machine)
    plain, _ = split_measured(
        total_s,
        Estimate(median=usual_s, unshared_sigma_log=PLAIN_SIGMA_LOG),
        calls_guess(operator.shape[1], machine.ceilings.launch_s),
    )
    return math.log(plain.median / usual_s), plain.sigma_log


def _measured_part(total: Measured, part: Estimate) -> Measured:
    return replace(total, time_s=part.median, sigma_log=math.hypot(total.sigma_log, part.sigma_log))

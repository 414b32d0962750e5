"""A small GPT, layouts of it, and an estimator whose answers are a formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
from planted_steps import steps_of
from tiny_shape import run_of

from forerun.calib.advice.planning import Plan, plan
from forerun.calib.fit.estimates import Estimates, Source
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.forecast.forecasts import forecast
from forerun.calib.search.results import MemoryBudget
from forerun.calib.workload.collectives import CollectiveCall
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase


@dataclass
class Planted:
    """Times by formula: a launch plus work; single operators and collectives can be set."""

    launch_s: float = 1e-5
    flop_per_s: float = 1e10
    bytes_per_s: float = 1e9
    latency_s: float = 1e-5
    sigma_log: float = 0.05
    transfer_sigma_log: float = 0.1
    source: Source = Source.FITTED
    kinds: dict[OperatorKind, float] = field(default_factory=dict)
    num_calls: int = 0

    def operators(self, operators: Sequence[Operator]) -> Estimates:
        self.num_calls += 1
        return self._estimates([self.operator_s(o) for o in operators], self.sigma_log)

    def collectives(self, calls: Sequence[CollectiveCall]) -> Estimates:
        self.num_calls += 1
        return self._estimates([self.collective_s(c) for c in calls], self.transfer_sigma_log)

    def operator_s(self, operator: Operator) -> float:
        if operator.kind in self.kinds:
            return self.kinds[operator.kind]
        double = 2 if operator.phase is Phase.BACKWARD else 1
        return self.launch_s + double * prod(operator.shape) / self.flop_per_s

    def collective_s(self, call: CollectiveCall) -> float:
        return self.latency_s + call.nbytes / self.bytes_per_s

    def _estimates(self, times: list[float], sigma_log: float) -> Estimates:
        return Estimates(
            time_s=np.array(times),
            sigma_log=np.full(len(times), sigma_log),
            sources=(self.source,) * len(times),
        )


@pytest.fixture
def planted() -> Callable[..., Planted]:
    """Makes an estimator with the given constants."""
    return Planted


@pytest.fixture
def layout() -> Callable[..., RunConfig]:
    """Makes a config: degrees by name, ``model=`` changes to the shape, others to the run."""
    return run_of


NOW_UNIX_S = 1_700_000_000.0


@pytest.fixture
def steady() -> Callable[..., Forecast]:
    """A forecast of a run with steps of ``step_s`` that scatter by 1 %."""

    def make(*, step_s: float = 1.0, steps_total: int = 10_000, **more: Any) -> Forecast:
        random = np.random.default_rng(1)
        times = step_s * (1 + 0.01 * random.standard_normal(20))
        return forecast(
            now_unix_s=NOW_UNIX_S,
            steps_done=30,
            steps_total=steps_total,
            elapsed_s=60.0,
            step_times_s=times,
            **more,
        )

    return make


@pytest.fixture
def planned() -> Callable[..., Plan]:
    """A plan for a slow layout (small micro-batches over tp) on eight ranks."""

    def make(*, measured_frac: float | None = 1.0, **more: Any) -> Plan:
        """``measured_frac``: the measured step over the modelled one; None: none is known."""
        settings = {
            n: tuple(value) if isinstance(value, list) else value for n, value in more.items()
        }
        return _planned(measured_frac, **settings)

    return make


@cache
def _planned(measured_frac: float | None, **more: Any) -> Plan:
    """The same plan for all who ask the same."""
    config = run_of(tp=4, dp=2, micro=1)
    budget = MemoryBudget(
        capacity_nbytes=more.pop("memory_capacity_nbytes", 10**13),
        offset_nbytes=more.pop("memory_offset_nbytes", None),
    )
    estimate_s = steps_of(Planted()).estimate(config).time_s
    measured_s = None if measured_frac is None else measured_frac * estimate_s
    return plan(config, steps_of(Planted(), config, measured_s), budget=budget, **more)

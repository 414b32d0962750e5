"""Forecasts, plans and decisions to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from planted_steps import steps_of

from forerun.calib.advice.plan import Plan, plan
from forerun.calib.forecast.forecast import Forecast, forecast
from forerun.calib.workload.config import RunConfig

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
def planned(layout: Callable[..., RunConfig], planted: Callable[..., Any]) -> Callable[..., Plan]:
    """A plan for a slow layout (small micro-batches over tp) on eight ranks."""

    def make(*, measured_frac: float | None = 1.0, **more: Any) -> Plan:
        """``measured_frac``: the measured step over the modelled one; None: none is known."""
        config = layout(tp=4, dp=2, micro=1)
        more.setdefault("memory_capacity_nbytes", 10**13)
        own_s = steps_of(planted()).estimate(config).time_s
        measured_s = None if measured_frac is None else measured_frac * own_s
        return plan(config, steps_of(planted(), config, measured_s), **more)

    return make

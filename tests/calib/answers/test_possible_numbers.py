"""No answer says what cannot be: however short, noisy or thinly recorded the steps were."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import overhead
from forerun.calib.errors import CalibrationError, check_ascending
from forerun.calib.forecast.batch_ratios import PredictedStep
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.run_options import Goals

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
TABLE = build_table(read_run(GOLDEN))
SIGNED = ("net_s", "over_s")
"""Differences, whose sign has a meaning."""
TOO_SHORT = "is too short to tell its parts from hooks and noise"


def scaled(frame: pd.DataFrame, factor: float) -> pd.DataFrame:
    return frame.assign(**{name: frame[name] * factor for name in frame if name.endswith("_s")})


def recorded(
    *,
    scale: float = 1.0,
    operators: float = 1.0,
    hooks: float = 0.0,
    noise_log: float = 0.0,
    sampled_frac: float = 1.0,
    is_described: bool = True,
    seed: int = 0,
) -> SampleTable:
    """Return the run with its times multiplied: of all, of operators alone, of hooked steps by
    ``hooks`` more; with noise from step to step, and a share of its operators."""
    draw = np.random.default_rng(seed)
    steps = scaled(TABLE.steps, scale)
    factors = np.exp(noise_log * draw.standard_normal(len(steps))) * (
        1 + hooks * steps["is_hooked"]
    )
    samples = scaled(TABLE.samples, scale * operators)
    is_sampled = (draw.random(len(samples)) < sampled_frac) | (samples["kind"] == "linear_fc1")
    runs = TABLE.runs if is_described else TABLE.runs.assign(config="")
    return replace(
        TABLE,
        runs=runs,
        steps=steps.assign(time_s=steps["time_s"] * factors),
        samples=samples[is_sampled],
        phases=scaled(TABLE.phases, scale),
        skew=scaled(TABLE.skew, scale),
    )


def answer(table: SampleTable) -> Answer:
    now_unix_s = float(table.runs["started_unix_s"].min() + table.steps["time_s"].sum()) + 60.0
    request = Request(
        now_unix_s=now_unix_s,
        last_step=11,
        step_times_s=tuple(table.steps["time_s"].tolist()[3:]),
        goals=Goals(deadline_unix_s=now_unix_s + 1.0, budget_hours=0.1),
    )
    return analyse(table, request)


def impossible(value: Any, key: str = "") -> Iterator[str]:
    """Yield each number of a JSON value that cannot be, with its key."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from impossible(part, name)
            high = value.get(name.replace("low", "high")) if "low" in name else None
            stem = re.sub("low_|_low", "", name)
            middle = value.get(stem, value.get("step_time_s") if stem.endswith("_s") else part)
            if high is not None and not part - 1e-9 <= middle <= high + 1e-9:
                yield f"{name}: {part} to {high} around {middle}"
    elif isinstance(value, list | tuple):
        for part in value:
            yield from impossible(part, key)
    elif isinstance(value, int | float):
        is_chance = "probability" in key or key == "confidence"
        if (
            not math.isfinite(value)
            or (key.endswith("_s") and key not in SIGNED and value < 0)
            or (is_chance and not 0 <= value <= 1)
            or (key.startswith("time_frac") and value < -1)
            or (key == "gain_frac" and value > 1)
        ):
            yield f"{key}: {value}"


def check(result: Answer) -> None:
    assert not list(impossible(result.to_json()))
    text = "\n".join(result.transcript)
    assert not re.search(r"(?<![\w.])-\d", text)
    assert all(
        float(one) <= 100 for one in re.findall(r"([\d.]+(?:e-\d+)?) % (?:less|chance)", text)
    )


def test_a_run_whose_hooked_steps_are_twice_as_long_has_a_positive_model() -> None:
    """The hooks' share was subtracted from the sum of few operators."""
    result = answer(recorded(operators=0.3, hooks=1.0))
    check(result)
    modelled = result.known
    assert 0 < modelled.step.low_s <= modelled.step.time_s <= modelled.step.high_s
    parts_s = sum(modelled.model_forecast.running_estimate.parts_s.values()) + modelled.waiting_s
    assert parts_s - modelled.perturbation_s == pytest.approx(modelled.step.time_s)
    assert TOO_SHORT in result.transcript[-1] and "model " not in result.transcript[-1]
    assert "record longer steps" in result.transcript[-1]


@pytest.mark.slow
@given(
    scale=st.floats(-5.0, 0.5).map(lambda log: 10**log),
    operators=st.floats(0.1, 10.0),
    hooks=st.sampled_from([0.0, 0.1, 1.0, 5.0]),
    noise_log=st.sampled_from([0.0, 0.05, 0.5, 1.5]),
    sampled_frac=st.floats(0.05, 1.0),
    is_described=st.booleans(),
    seed=st.integers(0, 99),
)
@settings(max_examples=25, deadline=None)
def test_no_drawn_run_has_an_impossible_number(**drawn: Any) -> None:
    check(answer(recorded(**drawn)))


@given(
    bare_s=st.lists(st.floats(1e-6, 1e-2), min_size=4, max_size=12),
    hooks_frac=st.floats(0.0, 3.0),
)
@settings(deadline=None)
def test_the_cost_of_hooks_is_inside_its_interval(bare_s: list[float], hooks_frac: float) -> None:
    times = [time_s * (1 + hooks_frac * (place % 2)) for place, time_s in enumerate(bare_s)]
    cost = overhead(times, [bool(place % 2) for place in range(len(times))])
    assert -1 <= cost.low_frac <= cost.overhead_frac <= cost.high_frac


def test_what_cannot_be_is_refused_with_what_to_record() -> None:
    with pytest.raises(CalibrationError, match=r"0 <= -0.01055 <= -0.00263 .*; record more steps"):
        PredictedStep(time_s=-2.63e-3, low_s=-10.55e-3, high_s=9.33e-3)
    with pytest.raises(CalibrationError, match=r"of a stop: 0 <= 1.5 <= 1 is impossible"):
        check_ascending("probability of a stop", 0.0, 1.5, 1.0)
    check_ascending("unknown", 0.0, None, math.nan, 1.0)

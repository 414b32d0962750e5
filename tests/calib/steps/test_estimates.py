from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import GPU, LAYOUTS, OVERLAP, estimate_many, estimate_step

from forerun.calib.fit.estimates import Source
from forerun.calib.layers.stage_work import collective_uses, stage_operators
from forerun.calib.regressors.robust import Z_90
from forerun.calib.steps.estimate import StepEstimate
from forerun.calib.steps.model import ERROR_INFLATION
from forerun.calib.timeline.evaluation import exposed_time, window_time
from forerun.calib.timeline.items import Part
from forerun.calib.timeline.programs import TaskKind
from forerun.calib.workload.collectives import GroupRole, Placement
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.operators import OperatorKind

Layout = Callable[..., RunConfig]
REL = 1e-9


def stage_seconds(config: RunConfig, estimator: Any, stage: int) -> float:
    """One micro-batch on a stage and what follows the pipeline, summed by hand."""
    ops = stage_operators(config, stage)
    m = config.num_microbatches
    passes = sum(n * estimator.operator_s(o) for o, n in (*ops.forward, *ops.backward))
    passes += sum(n * estimator.operator_s(o) for o, n in ops.recompute)
    after = sum(n * estimator.operator_s(o) for o, n in ops.step)
    for use in collective_uses(config, stage=stage):
        if use.call.role is GroupRole.PP:
            continue
        time_s = use.count * estimator.collective_s(use.call)
        if use.placement.is_per_microbatch:
            passes += time_s
        else:
            after += time_s
    return m * passes + after


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tp": 2},
        {"dp": 4},
        {"tp": 2, "dp": 2, "par": {"is_sequence_parallel": True}},
        {"dp": 2, "par": OVERLAP},
        {"recompute": Recompute.FULL},
        {"recompute": Recompute.SELECTIVE},
    ],
)
def test_without_a_pipeline_the_step_is_the_sum_of_its_parts_on_a_cpu(
    layout: Layout, planted: Callable[..., Any], settings: dict[str, Any]
) -> None:
    config, estimator = layout(**settings), planted()
    result = estimate_step(config, estimator)
    assert result.time_s == pytest.approx(stage_seconds(config, estimator, 0), rel=REL)
    assert result.parts_s[Part.BUBBLE] == pytest.approx(0, abs=REL)


def test_an_even_pipeline_follows_the_closed_form(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """With edge operators, transfers and updates free: (m + p - 1)(f + b)."""
    free = dict.fromkeys(
        (
            OperatorKind.EMBEDDING,
            OperatorKind.LOGITS,
            OperatorKind.LOSS,
            OperatorKind.NORM,
            OperatorKind.OPTIMIZER,
            OperatorKind.HOST_STEP,
        ),
        0.0,
    )
    estimator = planted(kinds=free, latency_s=0.0, bytes_per_s=math.inf)
    config = layout(pp=4)
    layer = stage_operators(config, 1)
    pass_s = sum(n * estimator.operator_s(o) for o, n in (*layer.forward, *layer.backward))
    expected = (config.num_microbatches + 3) * pass_s
    assert estimate_step(config, estimator).time_s == pytest.approx(expected, rel=REL)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=LAYOUTS)
def test_the_parts_of_the_critical_stage_add_up(
    layout: Layout, planted: Callable[..., Any], chosen: dict[str, Any]
) -> None:
    result = estimate_step(layout(**chosen), planted())
    assert sum(result.parts_s.values()) == pytest.approx(result.time_s, rel=REL)
    assert min(result.parts_s.values()) >= 0
    assert result.low_s < result.time_s < result.high_s
    assert sum(result.source_frac.values()) == pytest.approx(1)


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(chosen=LAYOUTS, factor=st.floats(0.2, 5.0))
def test_a_machine_that_is_slower_by_a_factor_has_steps_longer_by_it(
    layout: Layout, planted: Callable[..., Any], chosen: dict[str, Any], factor: float
) -> None:
    config = layout(**chosen)
    slow = planted(
        launch_s=1e-5 * factor,
        flop_per_s=1e10 / factor,
        latency_s=1e-5 * factor,
        bytes_per_s=1e9 / factor,
    )
    base, scaled = estimate_step(config, planted()), estimate_step(config, slow)
    assert scaled.time_s == pytest.approx(factor * base.time_s, rel=1e-6)


def of_families(estimate: StepEstimate) -> dict[str, float]:
    """Errors of the models of operators and transfers, without Student's inflation."""
    return {
        name.removeprefix("family "): log / ERROR_INFLATION
        for name, log in estimate.error_log.items()
        if name.startswith("family ")
    }


def test_errors_add_up_within_a_family_and_in_quadrature_across(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """One sigma for all: each family moves the log by its share of the time, nearly."""
    sigma = 1e-4
    estimator = planted(sigma_log=sigma, transfer_sigma_log=sigma)
    result = estimate_step(layout(tp=2, dp=2), estimator)
    families = of_families(result)
    assert sum(families.values()) == pytest.approx(sigma, rel=1e-3)
    squares = sum(log**2 for log in result.error_log.values()) + result.unshared_sigma_log**2
    assert result.sigma_log == pytest.approx(math.sqrt(squares), rel=REL)
    assert result.high_s == pytest.approx(
        result.time_s * math.exp(Z_90 * result.sigma_log), rel=REL
    )
    assert {"linear", "attention", "memory", "host", "tp", "dp"} <= set(families)


@pytest.mark.slow
def test_the_stated_error_is_what_simulated_errors_give(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Monte Carlo over shared errors of the families, on a pipeline with transfers."""
    config = layout(tp=2, pp=4)
    result = estimate_step(config, planted())
    random = np.random.default_rng(4)
    logs = []
    for _ in range(300):
        draw = random.standard_normal(2)
        noisy = planted(
            launch_s=1e-5 * math.exp(0.05 * draw[0]),
            flop_per_s=1e10 * math.exp(-0.05 * draw[0]),
            latency_s=1e-5 * math.exp(0.1 * draw[1]),
            bytes_per_s=1e9 * math.exp(-0.1 * draw[1]),
        )
        logs.append(math.log(estimate_step(config, noisy).time_s / result.time_s))
    families = of_families(result)
    operators = sum(
        families.get(n, 0.0) for n in ("linear", "attention", "memory", "host", "optimizer")
    )
    transfers = sum(families.get(n, 0.0) for n in ("tp", "pp", "embedding"))
    assert np.std(logs) == pytest.approx(math.hypot(operators, transfers), rel=0.15)


def test_many_layouts_share_two_calls_and_equal_single_ones(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    configs = [layout(), layout(tp=2, pp=2), layout(tp=1, pp=2, dp=2), layout(tp=2, pp=2, micro=4)]
    estimator = planted()
    many = estimate_many(configs, estimator)
    assert estimator.num_calls == 2
    for config, result in zip(configs, many, strict=True):
        alone = estimate_step(config, planted())
        assert result.config == config
        assert result.time_s == pytest.approx(alone.time_s, rel=REL)
        assert result.sigma_log == pytest.approx(alone.sigma_log, rel=REL)
        assert dict(result.parts_s) == pytest.approx(dict(alone.parts_s), rel=REL, abs=1e-12)


def test_nothing_hides_on_a_cpu_but_on_a_device(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    wide = {"hidden_size": 2048, "ffn_hidden_size": 8192, "kv_channels": 512}

    def step_s(device: str, par: dict[str, bool]) -> float:
        config = layout(dp=2, par=par, device=device, model=wide)
        return estimate_step(config, planted()).time_s

    on_cpu = layout(dp=2, par=OVERLAP, model=wide)
    summed = stage_seconds(on_cpu, planted(), 0)
    assert step_s("cpu", OVERLAP) == pytest.approx(summed, rel=REL)
    assert step_s(GPU, OVERLAP) < step_s(GPU, {"is_optimizer_distributed": True}) * (1 - REL)


@pytest.mark.parametrize(("number", "contention", "expected"), [(4, 1.0, 2.0), (1, 1.3, 2.0)])
def test_exposed_time_is_the_last_bucket_where_the_rest_fits(
    number: int, contention: float, expected: float
) -> None:
    value = exposed(number, 2.0, 100.0, contention)
    assert value == pytest.approx(expected)


def test_side_by_side_six_seconds_of_transfers_cost_contention_more() -> None:
    assert exposed(4, 2.0, 100.0, 1.3) == pytest.approx(2.0 + 0.3 * 6.0)


@given(
    n=st.integers(1, 8),
    each=st.floats(0.01, 10),
    work=st.floats(0.0, 50),
    contention=st.floats(1.0, 2.0),
)
def test_exposed_time_never_exceeds_the_transfer(
    n: int, each: float, work: float, contention: float
) -> None:
    assert each * (1 - REL) <= exposed(n, each, work, contention) <= n * each * (1 + REL)


def exposed(number: int, each: float, work: float, contention: float) -> float:
    total, last, one = np.array([number * each]), np.array([each]), np.array([work])
    window = window_time(one, np.array([float(number)]))
    return float(exposed_time(total, last, window, contention)[0])


def test_sources_are_shares_of_time(layout: Layout, planted: Callable[..., Any]) -> None:
    result: StepEstimate = estimate_step(layout(tp=2), planted(source=Source.MEASURED))
    assert result.source_frac[Source.MEASURED] == pytest.approx(1)
    names = {c.name for c in result.contributions}
    assert {"linear_qkv", "all_reduce:tp", "optimizer"} <= names
    total = sum(c.time_s for c in result.contributions)
    assert total == pytest.approx(result.time_s, rel=REL)


@pytest.mark.parametrize("vp", [2, 4])
def test_interleaving_divides_the_bubble(
    layout: Layout, planted: Callable[..., Any], vp: int
) -> None:
    """With edges, transfers and updates free the bubble is (p - 1)(f + b) / v."""
    free = dict.fromkeys(
        (
            OperatorKind.EMBEDDING,
            OperatorKind.LOGITS,
            OperatorKind.LOSS,
            OperatorKind.NORM,
            OperatorKind.OPTIMIZER,
            OperatorKind.HOST_MICROBATCH,
            OperatorKind.HOST_STEP,
        ),
        0.0,
    )
    estimator = planted(kinds=free, latency_s=0.0, bytes_per_s=math.inf)
    config = layout(pp=4, par={"vp": vp}, device="cpu", model={"num_layers": 16})
    work = stage_operators(config, 1)
    pass_s = sum(n * estimator.operator_s(o) for o, n in (*work.forward, *work.backward))
    bubble_s = estimate_step(config, estimator).parts_s[Part.BUBBLE]
    assert bubble_s == pytest.approx(3 * pass_s / vp, rel=REL)


def test_the_gather_ahead_is_placed_before_the_first_forward(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    result = estimate_step(layout(dp=2, par=OVERLAP, device=GPU), planted())
    first = min(span.start_s for span in result.spans if span.kind is TaskKind.FORWARD)
    gather = [
        u for u in collective_uses(result.config, stage=0) if u.placement is Placement.PARAM_GATHER
    ]
    assert first == pytest.approx(sum(planted().collective_s(u.call) for u in gather))

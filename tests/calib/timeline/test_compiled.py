from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import estimate_step, median_times

from forerun.calib.errors import ConfigError
from forerun.calib.layers.stage_work import stage_operators
from forerun.calib.search.cells import cells_of
from forerun.calib.timeline.compiled import compile_layouts
from forerun.calib.timeline.evaluation import evaluate, simulate_each, simulate_long, step_times
from forerun.calib.timeline.graph import pipeline_costs
from forerun.calib.timeline.items import Item
from forerun.calib.timeline.overlap import exposed_part
from forerun.calib.timeline.programs import Pipeline
from forerun.calib.timeline.simulation import simulate
from forerun.calib.workload.collectives import Collective
from forerun.calib.workload.config import Experts, Fp8Recipe, Precision, RunConfig
from forerun.calib.workload.operators import Operator, OperatorKind, Phase

Layout = Callable[..., RunConfig]
GPU = "NVIDIA H100 80GB HBM3"
REL = 1e-9
EXPERTS = Experts(num_experts=4, top_k=2, ffn_hidden_size=64, layer_pattern=(False, True) * 4)


def many(layout: Layout) -> list[RunConfig]:
    par = {"is_sequence_parallel": True, "is_optimizer_distributed": True}
    config = layout(tp=2, dp=2, device=GPU, model={"num_layers": 8}, par=par)
    return [*cells_of(config, 4).plain.configs()]


def test_layouts_together_take_what_each_takes_alone(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    configs, estimator = many(layout), planted()
    together = median_times(configs, estimator)
    alone = [estimate_step(config, estimator).time_s for config in configs]
    assert together == pytest.approx(alone, rel=REL)


def test_layouts_share_their_blocks_and_keep_their_order(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    configs, estimator = many(layout), planted()
    compiled = compile_layouts(configs)
    # Alone each has an embedding, layers and a head.
    assert len(compiled.blocks) < 2 * len(configs)
    assert len(set(compiled.items)) == len(compiled.items)
    forward, backward = median_times(configs, estimator), median_times(configs[::-1], estimator)
    assert forward == pytest.approx(backward[::-1], rel=REL)


def test_columns_are_alternatives_of_their_own(layout: Layout, planted: Callable[..., Any]) -> None:
    compiled, factors = compile_layouts(many(layout)), np.array([1.0, 2.0, 0.5])
    times_s = np.random.default_rng(0).uniform(1e-5, 1e-3, len(compiled.items))
    values = step_times(
        compiled, evaluate(compiled, times_s[:, np.newaxis] * factors, contention=1.3)
    )
    assert values == pytest.approx(values[:, :1] * factors, rel=REL)


def test_every_item_that_is_slower_slows_the_step_or_nothing(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    par = {"is_optimizer_distributed": True, "overlaps_grad_reduce": True}
    config = layout(tp=2, pp=2, dp=2, device=GPU, par=par)
    compiled = compile_layouts([config])
    times_s = np.full(len(compiled.items), 1e-3)
    slower = times_s[:, np.newaxis] + 1e-3 * np.eye(len(times_s))
    base = step_times(compiled, evaluate(compiled, times_s[:, np.newaxis], contention=1.0))
    values = step_times(compiled, evaluate(compiled, slower, contention=1.0))
    assert np.all(values >= base * (1 - REL))


def test_expert_layers_are_blocks_of_their_own(layout: Layout, planted: Callable[..., Any]) -> None:
    model = {"num_layers": 8, "experts": EXPERTS}
    dense = layout(dp=4, device=GPU, model={"num_layers": 8})
    sparse = [layout(dp=4, device=GPU, model=model, par={"ep": ep}) for ep in (1, 2, 4)]
    times = median_times([dense, *sparse], planted())
    assert len(set(times.round(12))) == len(times)


def test_cpu_and_accelerator_do_not_mix(layout: Layout) -> None:
    with pytest.raises(ConfigError, match="compile them apart"):
        compile_layouts([layout(), layout(device=GPU)])


@given(st.floats(0, 10), st.floats(0, 10), st.floats(1, 2))
def test_a_transfer_beside_work_is_never_slower_than_after_it(
    transfer: float, work: float, contention: float
) -> None:
    value = float(exposed_part(np.array([transfer]), np.array([work]), contention)[0])
    assert max(0.0, transfer - work) * (1 - REL) <= value + 1e-12
    assert value <= transfer * (1 + REL)


@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_long_pipelines_of_even_stages_continue_exactly(data: st.DataObject) -> None:
    stages, vp = data.draw(st.sampled_from([2, 3, 4])), data.draw(st.sampled_from([1, 2]))
    groups, rest = data.draw(st.integers(1, 20)), data.draw(st.integers(0, 3))
    number = groups * stages + (rest if vp == 1 else 0)
    forward, hop = data.draw(st.floats(0.1, 2)), data.draw(st.floats(0, 0.5))
    costs = pipeline_costs(
        [forward] * stages * vp,
        [2 * forward] * stages * vp,
        activation_s=hop,
        gradient_s=hop,
        num_virtual_stages=vp,
    )
    pipeline = Pipeline(num_stages=stages, num_microbatches=number, num_virtual_stages=vp)
    exact = simulate(costs, pipeline)
    simulation = simulate_long([(costs, pipeline)])[0]
    assert simulation.makespan_s == pytest.approx(exact.makespan_s, rel=0.02)
    assert simulation.compute_s == pytest.approx(exact.compute_s, rel=REL)


def test_equal_pipelines_side_by_side_are_those_alone() -> None:
    rng = np.random.default_rng(1)
    pipeline = Pipeline(num_stages=4, num_microbatches=8)
    other = Pipeline(num_stages=4, num_microbatches=9)
    runs = [
        (pipeline_costs(rng.random((4, n)), 2 + rng.random((4, n))), shape)
        for n, shape in ((1, pipeline), (3, other), (2, pipeline))
    ]
    for (costs, shape), simulation in zip(runs, simulate_each(runs), strict=True):
        assert simulation.end_s == pytest.approx(simulate(costs, shape).end_s, rel=REL)


def step_of(config: RunConfig, times_s: Callable[[Item], float]) -> float:
    compiled = compile_layouts([config])
    column = np.array([[times_s(item)] for item in compiled.items])
    return float(step_times(compiled, evaluate(compiled, column, contention=1.0))[0, 0])


@given(
    num=st.integers(2, 12), limit=st.integers(0, 12), late=st.floats(0.01, 1), wide=st.floats(1, 3)
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_deferred_gradients_of_the_output_table_fill_the_end_of_the_last_stage(
    layout: Layout, num: int, limit: int, late: float, wide: float
) -> None:
    """Two stages: the output's two products on one, then ``late`` on the other, and no more."""

    def times_s(item: Item) -> float:
        if not isinstance(item, Operator) or item.phase is not Phase.BACKWARD:
            return 0.0
        return {OperatorKind.LOGITS: 2 * wide, OperatorKind.EMBEDDING: late}.get(item.kind, 0.0)

    plain = layout(pp=2, device=GPU, samples=2 * num)
    assert plain.num_microbatches == num
    deferred = replace(plain, defers_head_gradients=True, head_deferral_limit=limit)
    waiting = deferred.num_deferred_heads
    assert waiting == (min(num, limit) or num)
    products_s = 2 * wide * num
    assert step_of(plain, times_s) == pytest.approx(products_s + late)
    expected_s = max(products_s, products_s - waiting * wide + late)
    assert step_of(deferred, times_s) == pytest.approx(expected_s)


def test_layers_in_16_bits_beside_such_in_8_are_those_at_either_end(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Each end has its stage; what is between is shared with the plain layout in 8 bits."""
    model = {"num_layers": 8}
    common = {"device": GPU, "precision": Precision.BF16, "model": model, "pp": 4}
    narrow = layout(fp8=Fp8Recipe.TENSORWISE, **common)
    wide = replace(narrow, wide_layers=(1, 2))
    for stage, num_wide in enumerate((1, 0, 0, 2)):
        result = {True: 0, False: 0}
        for operator, count in stage_operators(wide, stage).forward:
            if operator.kind is OperatorKind.LINEAR_FC1:
                result[operator.is_wide] += count
        assert result == {True: num_wide, False: 2 - num_wide}
    # For products as small as these, casts cost more than 8 bits save.
    ends_s = sorted(median_times([one], planted())[0] for one in (layout(**common), narrow))
    assert ends_s[0] < median_times([wide], planted())[0] < ends_s[1]


@given(first=st.integers(0, 4), last=st.integers(0, 4), slow=st.floats(1, 4))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_such_layers_have_times_of_their_own(
    layout: Layout, first: int, last: int, slow: float
) -> None:
    def times_s(item: Item) -> float:
        is_first = isinstance(item, Operator) and item.kind is OperatorKind.LINEAR_FC1
        if not is_first or item.phase is not Phase.FORWARD:
            return 0.0
        return slow if item.is_wide else 1.0

    narrow = layout(
        fp8=Fp8Recipe.MXFP8, device=GPU, precision=Precision.BF16, model={"num_layers": 8}
    )
    config = replace(narrow, wide_layers=(first, last))
    num_wide = first + last
    expected_s = narrow.num_microbatches * (8 + (slow - 1) * num_wide)
    assert step_of(config, times_s) == pytest.approx(expected_s)


@given(update=st.floats(0.1, 3), gather=st.floats(0.1, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_first_gather_runs_beside_the_update_of_other_chunks(
    layout: Layout, update: float, gather: float
) -> None:
    def times_s(item: Item) -> float:
        if isinstance(item, Operator):
            return update if item.kind is OperatorKind.OPTIMIZER else 0.0
        return gather if item.collective is Collective.ALL_GATHER else 0.0

    par = {"vp": 2, "is_optimizer_distributed": True, "overlaps_param_gather": True}
    model = {"num_layers": 8}
    plain, overlapped = (
        layout(
            pp=2, dp=2, device=GPU, model=model, par=par | {"gathers_beside_update": is_overlapped}
        )
        for is_overlapped in (False, True)
    )
    exposed_s = step_of(plain, times_s) - update
    assert exposed_s > 0
    assert step_of(overlapped, times_s) == pytest.approx(update + max(0, exposed_s - update / 2))

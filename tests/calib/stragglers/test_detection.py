"""A planted straggler is named with what it costs, and nobody is where all are alike."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from event_driven_pipeline import EventDriven
from planted_stragglers import (
    BACKWARD_S,
    FORWARD_S,
    NUM_MICROBATCHES,
    WORK_S,
    recorded,
    summarised,
    table_of,
)

from forerun.calib.drift.stragglers import (
    RankPlaces,
    StragglerKind,
    StragglerReport,
    excess_s,
    find_stragglers,
    step_floor_s,
    waiting_report,
)
from forerun.calib.records.cluster import Cluster, SeenNode
from forerun.calib.samples.rank_compute import newest_rank_compute
from forerun.calib.timeline.graph import pipeline_costs
from forerun.calib.timeline.programs import Pipeline
from forerun.calib.workload.config import Parallelism

PASSES_S = FORWARD_S + BACKWARD_S
LAYOUTS = {
    "dp4": Parallelism(dp=4),
    "tp2": Parallelism(tp=2),
    "tp2 dp2": Parallelism(tp=2, dp=2),
    "pp2 dp2": Parallelism(pp=2, dp=2),
    "tp2 pp2, cp2": Parallelism(tp=2, pp=2, cp=2),
    "pp4": Parallelism(pp=4),
    "dp8": Parallelism(dp=8),
}
CPU_SIGMA_LOG = 0.12
"""Own noise of a rank's steps, as the recipe's runs on two busy cores had it."""
GPU_SIGMA_LOG = 0.01
NUM_DRAWS = 6


def named(report: StragglerReport) -> list[tuple[int, ...]]:
    return [slow.ranks for slow in report.slow]


@pytest.mark.slow
@pytest.mark.parametrize("sigma_log", [CPU_SIGMA_LOG, GPU_SIGMA_LOG])
def test_the_planted_rank_is_named_and_in_steady_runs_nobody(sigma_log: float) -> None:
    excess, draw = max(5 * sigma_log, 0.1), np.random.default_rng(0)
    num_named = num_false = 0
    for name in ("dp4", "tp2 dp2", "pp2 dp2", "pp4"):
        layout = LAYOUTS[name]
        for _ in range(NUM_DRAWS):
            rank = int(draw.integers(layout.num_ranks))
            slow = recorded(layout, draw, sigma_log=sigma_log, slower={rank: excess})
            num_named += named(find_stragglers(slow, WORK_S)) == [(rank,)]
            steady = recorded(layout, draw, sigma_log=sigma_log)
            num_false += bool(find_stragglers(steady, WORK_S).slow)
    assert num_named >= 0.95 * 4 * NUM_DRAWS and num_false <= 0.05 * 4 * NUM_DRAWS


def test_windows_of_few_steps_tell_together_what_one_cannot() -> None:
    """Two ranks and four noisy steps a window, as a short run on busy cores has them."""
    draw, layout = np.random.default_rng(12), LAYOUTS["tp2"]
    few = {"sigma_log": CPU_SIGMA_LOG, "num_steps": 4, "slower": {1: 0.2}}
    one, eight = (
        sum(
            named(find_stragglers(recorded(layout, draw, num_windows=number, **few), WORK_S))
            == [(1,)]
            for _ in range(10)
        )
        for number in (1, 8)
    )
    assert one <= 5 and eight >= 9


def test_who_was_slow_and_is_not_any_more_is_not_named() -> None:
    draw, layout = np.random.default_rng(13), LAYOUTS["dp4"]
    few = {"sigma_log": GPU_SIGMA_LOG, "num_steps": 4, "num_windows": 8, "slower": {1: 0.3}}
    was = recorded(layout, draw, slower_in=range(7), **few)
    assert find_stragglers(was, WORK_S).slow == ()
    became = recorded(layout, draw, slower_in={7}, **few)
    (straggler,) = find_stragglers(became, WORK_S).slow
    assert straggler.ranks == (1,) and straggler.excess_s == pytest.approx(0.3 * PASSES_S, rel=0.1)


def test_a_rank_that_the_newest_window_lacks_is_left_out() -> None:
    draw, layout = np.random.default_rng(14), LAYOUTS["dp4"]
    few = {
        "sigma_log": CPU_SIGMA_LOG,
        "num_steps": 4,
        "num_windows": 8,
        "slower": {1: 0.25, 3: 9.0},
    }
    table = recorded(layout, draw, **few)
    rows = table.phases
    table = replace(table, phases=rows[(rows["window"] < 7) | (rows["rank"] != 3)])
    (one, eight) = (newest_rank_compute(table, num_windows=number) for number in (1, 8))
    assert one is not None and eight is not None
    assert one.ranks.tolist() == eight.ranks.tolist() == [0, 1, 2]
    assert (one.num_newest, eight.num_newest, len(eight.work_s)) == (4, 4, 32)
    report = find_stragglers(table, WORK_S)
    assert (named(report), report.num_ranks) == ([(1,)], 3)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_the_planted_rank_costs_is_what_the_step_gains_without_it(name: str) -> None:
    layout, excess = LAYOUTS[name], 0.2
    draw = np.random.default_rng(1)
    table = recorded(layout, draw, sigma_log=0.002, num_steps=20, slower={1: excess})
    (straggler,) = find_stragglers(table, WORK_S).slow
    assert (straggler.ranks, straggler.kind) == ((1,), StragglerKind.COMPUTE)
    assert straggler.excess_s == pytest.approx(excess * PASSES_S, rel=0.05)
    # In warm-up and cool-down a slow first stage hides in the slack of the others.
    hidden = 1.0 if layout.pp == 1 else 1 - (layout.pp - 1) / NUM_MICROBATCHES
    assert hidden * 0.95 <= straggler.cost_s / (excess * PASSES_S) <= 1.05
    assert straggler.low_s <= straggler.cost_s <= straggler.high_s


def test_a_rank_that_only_waits_for_the_origin_is_not_blamed() -> None:
    table = recorded(LAYOUTS["pp2 dp2"], np.random.default_rng(3), sigma_log=0.01, slower={2: 0.3})
    (straggler,) = find_stragglers(table, WORK_S).slow
    assert (straggler.ranks, straggler.stage) == ((2,), 1)


@pytest.mark.parametrize(
    ("part", "kind"),
    [("compute", StragglerKind.COMPUTE), ("data", StragglerKind.DATA), ("gap", StragglerKind.HOST)],
)
def test_the_kind_is_where_the_time_goes(part: str, kind: StragglerKind) -> None:
    draw = np.random.default_rng(4)
    table = recorded(LAYOUTS["dp4"], draw, sigma_log=0.01, slower={3: 0.2}, part=part)
    (straggler,) = find_stragglers(table, WORK_S).slow
    assert (straggler.ranks, straggler.kind) == ((3,), kind)


def test_all_ranks_of_a_node_are_a_host_and_cost_what_they_cost_together() -> None:
    layout = Parallelism(dp=8, ranks_per_node=2)
    draw = np.random.default_rng(5)
    table = recorded(layout, draw, sigma_log=0.005, slower={4: 0.2, 5: 0.2})
    report = waiting_report(table, WORK_S)
    assert {slow.ranks: slow.kind for slow in report.slow.slow} == {
        (4,): StragglerKind.HOST,
        (5,): StragglerKind.HOST,
    }
    # Either of them alone gains nothing, since the other one is as slow.
    assert all(slow.cost_s < 0.1 * PASSES_S for slow in report.slow.slow)
    assert report.slow.cost_s == pytest.approx(0.2 * PASSES_S, rel=0.1)
    assert report.line.startswith("slow: ranks 4, 5 (stage 0) · each step 0.1")
    assert report.line.endswith("cause: host")


def test_a_slow_host_of_a_rack_is_a_host() -> None:
    """The layout counts the rack as one node; its hosts of two ranks still fail one by one."""
    layout = Parallelism(dp=8, ranks_per_node=72)
    draw = np.random.default_rng(5)
    table = recorded(layout, draw, sigma_log=0.005, slower={4: 0.2, 5: 0.2})
    cluster = Cluster(seen=(SeenNode(num_ranks=8, num_local_ranks=2),))
    seen = replace(table, runs=table.runs.assign(cluster=json.dumps(cluster.to_json())))
    for result, kind in ((table, StragglerKind.COMPUTE), (seen, StragglerKind.HOST)):
        slow = find_stragglers(result, WORK_S).slow
        assert {one.ranks: one.kind for one in slow} == {(4,): kind, (5,): kind}


def test_one_of_16384_ranks_is_found_by_summaries_alone() -> None:
    layout = Parallelism(tp=4, pp=4, dp=1024, ranks_per_node=8)
    draw = np.random.default_rng(6)
    planted, steady = (
        find_stragglers(summarised(layout, draw, sigma_log=0.01, slower=slower), WORK_S)
        for slower in ({9001: 0.1}, {})
    )
    (straggler,) = planted.slow
    assert straggler.ranks == (9001,) and straggler.stage == 9001 // (4 * 1024)
    assert straggler.excess_s == pytest.approx(0.1 * PASSES_S, rel=0.4)
    assert 0 < straggler.cost_s <= straggler.excess_s
    assert steady.slow == () and steady.reason == "no rank stands out in 1 sample of each rank"
    assert steady.num_ranks == layout.num_ranks


def test_too_little_is_said_so() -> None:
    few = summarised(Parallelism(dp=2), np.random.default_rng(7), sigma_log=0.01, slower={1: 0.5})
    assert find_stragglers(few, WORK_S) == StragglerReport(
        num_ranks=2,
        reason="1 sample of each rank: too few to compare few ranks; record more steps",
    )
    nothing = find_stragglers(table_of(Parallelism(dp=2)), WORK_S)
    assert nothing.reason == "fewer than two ranks recorded their work"


def test_a_group_with_a_slow_link_is_named_once_and_its_exposed_part_is_the_cost() -> None:
    rows = [
        {
            **{"kind": "all_reduce", "role": "tp", "num_ranks": 2, "nbytes": 1024, "num_steps": 10},
            **{"ranks": f"{2 * group},{2 * group + 1}", "count": 320, "spread_log": 0.05},
            "time_s": 2e-3 if group == 2 else 1e-3,
            "exposed_s": 1.5e-3 if group == 2 else 1e-3,
        }
        for group in range(4)
    ]
    layout = Parallelism(tp=2, dp=4)
    steady = recorded(layout, np.random.default_rng(8), sigma_log=0.001)
    table = table_of(layout, links=pd.DataFrame(rows), phases=steady.phases, steps=steady.steps)
    (straggler,) = find_stragglers(table, WORK_S).slow
    assert (straggler.ranks, straggler.role, straggler.kind) == ((4, 5), "tp", StragglerKind.LINK)
    assert straggler.excess_s == pytest.approx(32 * 1e-3)
    assert straggler.cost_s == pytest.approx(32 * 0.5e-3)
    line = waiting_report(table, WORK_S).line
    assert line == (
        "slow: tp group of ranks 4, 5 · each step 16.00 ms longer (1.7 %) · cause: link"
    )


@pytest.mark.parametrize(("slow_stage", "gain"), [(0, 4.5), (1, 5.4), (3, 7.2)])
def test_a_slow_stage_costs_what_the_event_driven_pipeline_says(
    slow_stage: int, gain: float
) -> None:
    stages, microbatches = 4, 8
    pipeline = Pipeline(num_stages=stages, num_microbatches=microbatches)
    layout = RankPlaces(
        stages=np.arange(stages), replicas=np.zeros(stages, dtype=np.int64), pipeline=pipeline
    )
    share = np.ones((2, stages))
    share[1, slow_stage] = 1.3
    values = step_floor_s(3.0 * microbatches * share, np.zeros((2, stages)), layout)
    costs = pipeline_costs(share.T, 2 * share.T)
    wanted = [max(EventDriven(pipeline, costs, column).end_s) for column in (0, 1)]
    assert values == pytest.approx(wanted)
    # The first stage's delay is partly absorbed: the later ones have slack in the warm-up.
    assert values[1] - values[0] == pytest.approx(gain)


def test_the_excess_is_over_the_median_of_the_others() -> None:
    values = np.random.default_rng(9).normal(size=(3, 11))
    stages = np.array([0, 0, 1, 0, 1, 1, 1, 0, 2, 0, 1])
    result = excess_s(values, stages)
    for place, stage in enumerate(stages):
        others = [p for p in np.flatnonzero(stages == stage) if p != place]
        wanted = values[:, place] - np.median(values[:, others], axis=1) if others else np.zeros(3)
        assert result[:, place] == pytest.approx(wanted)

"""Causes of a change between two windows are named; without a change nobody is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
import pytest
from planted_drifts import TRANSFER_S, groups_of, window
from planted_stragglers import WORK_S, summarised

from forerun.calib.drift.attribution import Cause, CauseKind, find_causes, find_group_causes
from forerun.calib.drift.monitor import Drift, DriftKind, drift_causes, transfer_causes
from forerun.calib.samples.columns import normalise
from forerun.calib.samples.table import SampleTable
from forerun.calib.workload.config import Parallelism

LAYOUTS = {
    "dp2": Parallelism(dp=2),
    "tp2 dp2": Parallelism(tp=2, dp=2),
}
SIGMAS_LOG = {"gpu": 0.01, "busy cpu": 0.03}
NUM_DRAWS = 2
STEP_S = WORK_S + 2 * TRANSFER_S


@cache
def steady(layout: Parallelism, seed: int, sigma_log: float) -> SampleTable:
    return window(layout, np.random.default_rng(seed), sigma_log=sigma_log)


def attributed(
    layout: Parallelism,
    seed: int,
    sigma_log: float,
    *,
    slower: Mapping[int, float] | None = None,
    part: str = "compute",
    slower_groups: Mapping[tuple[str, str], float] | None = None,
    is_recovery: bool = False,
    change_s: float = 0.13,
) -> Cause:
    usual = steady(layout, seed, sigma_log)
    draw = np.random.default_rng(1000 + seed)
    changed = window(
        layout, draw, sigma_log=sigma_log, slower=slower, part=part, slower_groups=slower_groups
    )
    if is_recovery:
        return find_causes(changed, usual, change_s=-change_s, step_s=STEP_S + change_s)[0]
    return find_causes(usual, changed, change_s=change_s, step_s=STEP_S)[0]


@pytest.mark.slow
@pytest.mark.parametrize("noise", SIGMAS_LOG)
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("is_recovery", [False, True])
def test_each_planted_cause_is_named(name: str, noise: str, is_recovery: bool) -> None:
    layout, right, total = LAYOUTS[name], 0, 0
    group = list(groups_of(layout))[-1]
    every = range(layout.num_ranks)
    for seed in range(NUM_DRAWS):
        rank = seed % layout.num_ranks
        direction = {"is_recovery": is_recovery}
        sigma_log = SIGMAS_LOG[noise]
        one = attributed(layout, seed, sigma_log, slower={rank: 0.15}, **direction)
        right += (one.kind, one.ranks) == (CauseKind.RANK, (rank,))
        alike = attributed(layout, seed, sigma_log, slower=dict.fromkeys(every, 0.15), **direction)
        right += (alike.kind, alike.ranks) == (CauseKind.CLOCKS, ())
        slower_groups = {group: 2.0}
        link = attributed(layout, seed, sigma_log, slower_groups=slower_groups, **direction)
        right += (link.kind, link.role) == (CauseKind.GROUP, group[0])
        stalls = dict.fromkeys(every, 0.15)
        data = attributed(layout, seed, sigma_log, slower=stalls, part="data", **direction)
        right += data.kind is CauseKind.DATA
        gaps = attributed(layout, seed, sigma_log, slower={rank: 0.15}, part="gap", **direction)
        right += (gaps.kind, gaps.ranks) == (CauseKind.DATA, (rank,))
        total += 5
    assert right >= 0.9 * total


@pytest.mark.parametrize("noise", SIGMAS_LOG)
@pytest.mark.parametrize("name", LAYOUTS)
def test_noise_names_nobody(name: str, noise: str) -> None:
    for seed in range(2 * NUM_DRAWS):
        cause = attributed(LAYOUTS[name], 50 + seed, SIGMAS_LOG[noise])
        assert cause.kind is CauseKind.UNKNOWN
        assert cause.reason


@pytest.mark.parametrize("noise", SIGMAS_LOG)
def test_a_group_that_hides_behind_compute_is_found_by_its_own_transfers(noise: str) -> None:
    layout, right = Parallelism(tp=2, dp=4), 0
    for seed in range(NUM_DRAWS):
        draw = np.random.default_rng(seed)
        usual = window(layout, draw, sigma_log=SIGMAS_LOG[noise])
        repeated = window(layout, draw, sigma_log=SIGMAS_LOG[noise])
        slower = window(
            layout, draw, sigma_log=SIGMAS_LOG[noise], slower_groups={("tp", "2,3"): 0.3}
        )
        assert find_group_causes(usual, repeated, step_s=0.5) == ()
        causes = find_group_causes(usual, slower, step_s=0.5)
        right += [(c.role, c.ranks) for c in causes] == [("tp", (2, 3))]
        every = dict.fromkeys([g for g in groups_of(layout) if g[0] == "dp"], 0.5)
        role = window(layout, draw, sigma_log=SIGMAS_LOG[noise], slower_groups=every)
        (cause,) = find_group_causes(usual, role, step_s=0.5)
        assert cause.ranks == tuple(range(8))
    assert right == NUM_DRAWS


def test_one_summary_per_window_of_many_ranks_tells_the_rank_apart() -> None:
    layout, draw = Parallelism(dp=64), np.random.default_rng(0)
    usual = summarised(layout, draw, sigma_log=0.01)
    slower = summarised(layout, draw, sigma_log=0.01, slower={17: 0.15})
    (cause,) = find_causes(usual, slower, change_s=0.13, step_s=WORK_S)
    assert (cause.kind, cause.ranks) == (CauseKind.RANK, (17,))
    few = Parallelism(dp=2)
    usual, slower = (summarised(few, draw, sigma_log=0.01, slower=who) for who in (None, {1: 0.15}))
    assert find_causes(usual, slower, change_s=0.13, step_s=WORK_S)[0].kind is CauseKind.UNKNOWN


def test_a_cause_that_explains_little_of_the_change_is_none() -> None:
    cause = attributed(LAYOUTS["tp2 dp2"], 1, 0.01, slower={2: 0.15}, change_s=1.0)
    assert cause.kind is CauseKind.UNKNOWN


def test_a_cause_in_words() -> None:
    cause = attributed(LAYOUTS["tp2 dp2"], 1, 0.01, slower={2: 0.15})
    assert cause.text.startswith("straggling rank: rank 2: own compute 0.")
    assert cause.to_json()["kind"] == "straggling rank"


def test_the_window_after_a_drift_is_held_against_the_last_one_before() -> None:
    draw, layout = np.random.default_rng(3), LAYOUTS["dp2"]
    parts = [
        window(layout, draw, sigma_log=0.01, slower=who, number=number)
        for number, who in enumerate((None, None, {1: 0.15}))
    ]
    ends = pd.DataFrame(
        {"run_id": "planted", "window": [0, 1, 2], "first_step": [0, 100, 230]}
    ).assign(last_step=lambda rows: rows["first_step"] + 9, rank=0)
    table = replace(SampleTable.concat(parts), windows=normalise("windows", ends))
    drift = Drift(
        kind=DriftKind.SLOWER, iteration=212, since_iteration=201,
        before_s=STEP_S, after_s=STEP_S + 0.13, probability=1.0,
    )  # fmt: skip
    (cause,) = drift_causes(table, drift, 2)
    assert (cause.kind, cause.ranks) == (CauseKind.RANK, (1,))
    assert drift_causes(table, drift, 1) == ()
    assert transfer_causes(table, [1, 2], STEP_S) == ()

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from forerun.calib.timeline.schedules import TaskKind
from forerun.calib.timeline.simulate import joined, pipeline_costs, simulate, spans

Floats = NDArray[np.float64]
REL = 1e-9
"""Sums of a few thousand floats in different orders."""


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, Floats, Floats, Floats, Floats]:
    """Micro-batches, forward, backward, and the two directions of each boundary."""
    stages, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    times = st.floats(0.01, 10.0)

    def row(number: int) -> Floats:
        return np.array(draw(st.lists(times, min_size=number, max_size=number)))

    edges = stages - 1
    return microbatches, row(stages), row(stages), row(edges), row(edges)


@given(p=st.integers(1, 10), m=st.integers(1, 40), f=st.integers(1, 9), b=st.integers(1, 9))
def test_equal_stages_follow_the_closed_form(p: int, m: int, f: int, b: int) -> None:
    found = simulate(pipeline_costs([float(f)] * p, [float(b)] * p), m)
    assert found.makespan_s.tolist() == [(m + p - 1) * (f + b)]


def test_two_stages_with_transfers_match_a_hand_count() -> None:
    """f 2, b 3, transfer 1 over two stages and two micro-batches, written out task by task.

    Stage 0: f0 0-2, x 2-3, f1 3-5; stage 1: f0 3-5, b0 5-8; both: g0 and a1 8-9; stage 0: b0 9-12;
    stage 1: f1 9-11, b1 11-14; both: g1 14-15; stage 0: b1 15-18.
    """
    costs = pipeline_costs([2.0, 2.0], [3.0, 3.0], activation_s=1.0, gradient_s=1.0)
    found = simulate(costs, 2)
    assert found.end_s[:, 0].tolist() == [18.0, 15.0]
    assert found.transfer_s[:, 0].tolist() == [3.0, 3.0]
    assert found.compute_s[:, 0].tolist() == [10.0, 10.0]
    assert found.idle_s[:, 0].tolist() == [5.0, 5.0]


def test_a_slow_stage_sets_the_pace() -> None:
    """One slow stage, free transfers: fill, m slow passes, drain."""
    m, slow = 50, 7.0
    costs = pipeline_costs([1.0, slow, 1.0], [1.0, slow, 1.0])
    assert simulate(costs, m).makespan_s[0] == 1 + m * 2 * slow + 1


@settings(max_examples=150)
@given(case=cases())
def test_makespan_is_bounded_by_chain_and_by_busiest_stage(
    case: tuple[int, Floats, Floats, Floats, Floats],
) -> None:
    m, forward, backward, down, up = case
    found = simulate(pipeline_costs(forward, backward, activation_s=down, gradient_s=up), m)
    makespan = found.makespan_s[0]
    chain = forward.sum() + backward.sum() + down.sum() + up.sum()
    assert makespan >= chain * (1 - REL)
    assert makespan >= (found.compute_s + found.transfer_s).max() * (1 - REL)
    serial = m * (forward.sum() + backward.sum() + down.sum() + up.sum())
    assert makespan <= serial * (1 + REL)


@settings(max_examples=100)
@given(case=cases())
def test_spans_fill_each_stage_without_overlap(
    case: tuple[int, Floats, Floats, Floats, Floats],
) -> None:
    m, forward, backward, down, up = case
    costs = pipeline_costs(forward, backward, activation_s=down, gradient_s=up)
    found = simulate(costs, m)
    for stage in range(len(forward)):
        own = [s for s in spans(costs, m) if s.stage == stage]
        busy = sum(s.end_s - s.start_s for s in own)
        idle = found.idle_s[stage, 0]
        assert busy + idle == pytest.approx(found.makespan_s[0], rel=REL)
        assert idle >= -REL * found.makespan_s[0]
        ordered = sorted(own, key=lambda s: (s.start_s, s.end_s))
        for before, after in pairwise(ordered):
            assert after.start_s >= before.end_s - REL * found.makespan_s[0]
        assert sum(s.kind is TaskKind.FORWARD for s in own) == m


@settings(max_examples=60)
@given(case=cases(), factor=st.floats(0.1, 10.0))
def test_scaling_all_times_scales_the_makespan(
    case: tuple[int, Floats, Floats, Floats, Floats], factor: float
) -> None:
    m, *rows = case
    base, scaled = (
        simulate(pipeline_costs(k * f, k * b, activation_s=k * d, gradient_s=k * u), m)
        for k in (1.0, factor)
        for f, b, d, u in [rows]
    )
    assert scaled.makespan_s[0] == pytest.approx(factor * base.makespan_s[0], rel=REL)


@settings(max_examples=60)
@given(case=cases(), data=st.data())
def test_a_slower_part_never_makes_the_step_faster(
    case: tuple[int, Floats, Floats, Floats, Floats], data: st.DataObject
) -> None:
    m, *rows = case
    which = data.draw(st.sampled_from([i for i, row in enumerate(rows) if row.size]))
    place = data.draw(st.integers(0, rows[which].size - 1))
    slower = [row.copy() for row in rows]
    slower[which][place] += data.draw(st.floats(0.0, 5.0))
    base, changed = (
        simulate(pipeline_costs(f, b, activation_s=d, gradient_s=u), m)
        for f, b, d, u in (rows, slower)
    )
    assert changed.makespan_s[0] >= base.makespan_s[0] * (1 - REL)


@given(case=cases(), other=st.floats(0.5, 2.0))
def test_alternatives_side_by_side_do_not_touch_each_other(
    case: tuple[int, Floats, Floats, Floats, Floats], other: float
) -> None:
    m, f, b, d, u = case
    one = pipeline_costs(f, b, activation_s=d, gradient_s=u)
    two = pipeline_costs(other * f, b, activation_s=d, gradient_s=u)
    both = simulate(joined([one, two]), m)
    for index, costs in enumerate((one, two)):
        alone = simulate(costs, m)
        part = both.columns(index, index + 1)
        assert part.end_s.tolist() == alone.end_s.tolist()
        assert part.transfer_s.tolist() == alone.transfer_s.tolist()


def test_a_late_start_delays_one_stage_only() -> None:
    costs = pipeline_costs([1.0], [2.0], start_s=[5.0])
    assert simulate(costs, 3).makespan_s[0] == 5 + 9

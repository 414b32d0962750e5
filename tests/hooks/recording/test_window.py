"""Which steps are hooked."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.hooks.recording.window import NUM_WARMUP_STEPS, WindowPlan, samples

STEPS = st.integers(min_value=1, max_value=60)
EVERY = st.integers(min_value=0, max_value=200)


def test_warm_up_steps_are_never_hooked_and_belong_to_the_first_window() -> None:
    plan = WindowPlan(steps=20)
    first = [plan.at(i) for i in range(NUM_WARMUP_STEPS)]
    assert all(p.is_warmup and not p.is_hooked and p.window == 0 for p in first)
    assert not plan.at(NUM_WARMUP_STEPS).is_warmup


def test_in_whole_blocks_hooked_and_bare_steps_are_as_many_and_have_one_mean_place() -> None:
    plan = WindowPlan(steps=20)
    places = {True: [], False: []}
    for i in range(NUM_WARMUP_STEPS, NUM_WARMUP_STEPS + 20):
        places[plan.at(i).is_hooked].append(i)
    assert len(places[True]) == len(places[False]) == 10
    assert sum(places[True]) == sum(places[False])


def test_without_every_nothing_is_hooked_after_the_window() -> None:
    plan = WindowPlan(steps=8)
    assert all(plan.at(i).window is None for i in range(NUM_WARMUP_STEPS + 8, 2000))


def test_every_opens_windows_of_half_the_length() -> None:
    plan = WindowPlan(steps=20, every=100)
    second = [i for i in range(500) if plan.at(i).window == 1]
    assert second == list(range(100, 110))
    assert plan.at(100).is_hooked


def test_zero_steps_hook_nothing() -> None:
    assert all(WindowPlan(steps=0).at(i).window is None for i in range(50))


@given(steps=STEPS, every=EVERY)
def test_windows_are_contiguous_numbered_in_order_and_end_once(steps: int, every: int) -> None:
    plan = WindowPlan(steps=steps, every=every)
    plans = [plan.at(i) for i in range(600)]
    numbers = [p.window for p in plans if p.window is not None]
    assert numbers == sorted(numbers)
    for window in set(numbers):
        inside = [i for i, p in enumerate(plans) if p.window == window]
        assert inside == list(range(inside[0], inside[-1] + 1))
        ends = [i for i in inside if plans[i].is_last]
        assert ends == [inside[-1]] or inside[-1] == len(plans) - 1


@given(steps=STEPS, every=EVERY, index=st.integers(min_value=0, max_value=5000))
def test_outside_windows_no_step_is_hooked(steps: int, every: int, index: int) -> None:
    plan = WindowPlan(steps=steps, every=every).at(index)
    assert plan.window is not None or not (plan.is_hooked or plan.is_last)


@pytest.mark.parametrize("num_warmup", [3, 7])
@pytest.mark.parametrize("num_traced", [1, 2])
def test_traced_steps_close_the_first_window_and_are_neither_hooked_nor_bare(
    num_warmup, num_traced
):
    plan = WindowPlan(steps=8, every=50, num_warmup=num_warmup, num_traced=num_traced)
    plain = WindowPlan(steps=8, every=50, num_warmup=num_warmup)
    end = num_warmup + 8
    assert [plan.at(i).is_hooked for i in range(end)] == [plain.at(i).is_hooked for i in range(end)]
    assert [i for i in range(200) if plan.at(i).is_traced] == [*range(end, end + num_traced)]
    assert [i for i in range(40) if plan.at(i).is_last] == [end + num_traced - 1]
    assert not any(plan.at(i).is_hooked for i in range(end, 50))
    assert plan.at(end + num_traced).window is None


@given(
    steps=STEPS,
    every=EVERY,
    requested=st.lists(st.integers(min_value=0, max_value=250), max_size=4).map(sorted),
)
def test_what_is_agreed_on_later_changes_no_step_before(
    steps: int, every: int, requested: list[int]
) -> None:
    plan, known = WindowPlan(steps=steps, every=every), []
    for index in range(300):
        if index in requested:
            plan = plan.opened_at(index)
        known.append(plan.at(index))
    assert known == [plan.at(i) for i in range(300)]
    numbers = [p.window for p in known if p.window is not None]
    assert numbers == sorted(numbers)
    for opening in plan.ordered:
        inside = [i for i, p in enumerate(known) if p.window == known[opening].window]
        assert inside == list(range(opening, opening + plan.reopened_steps))
        assert known[opening].is_hooked and known[inside[-1]].is_last
        assert sum(known[i].is_hooked for i in inside) <= plan.num_hooked


@pytest.mark.parametrize("every", [1, 2, 4, 8])
@pytest.mark.parametrize("stride", [2, 4, 8])
def test_all_micro_batches_have_their_turn_in_thinned_windows_too(every: int, stride: int) -> None:
    order = tuple(range(stride))
    turns = [max(samples(order, number)) for number in range(0, 16 * stride * every, every)]
    counts = [turns.count(number) for number in order]
    assert min(counts) >= 0.5 * max(counts)

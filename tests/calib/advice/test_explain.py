"""Why one layout is faster than another: sums that hold, planted reasons that are named."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from every_layout import every_layout
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import steps_of

from forerun.calib.advice.axes import differing_axes, with_axes_of
from forerun.calib.advice.explanation import Difference, Explanation, explain, walk
from forerun.calib.advice.planning import plan
from forerun.calib.errors import ConfigError
from forerun.calib.regressors.robust import Z_90
from forerun.calib.search.results import MemoryBudget
from forerun.calib.timeline.terms import Term
from forerun.calib.workload.choices import AXES, axis_value
from forerun.calib.workload.config import Recompute, RunConfig
from forerun.calib.workload.operators import OperatorKind

Layout = Callable[..., RunConfig]
REL = 1e-9
CHOICES = st.fixed_dictionaries(
    {
        "tp": st.sampled_from([1, 2, 4]),
        "pp": st.sampled_from([1, 2, 4]),
        "micro": st.sampled_from([1, 2]),
        "recompute": st.sampled_from(Recompute),
        "is_optimizer_distributed": st.booleans(),
    }
)


def of_eight(layout: Layout, chosen: dict[str, Any]) -> RunConfig | None:
    values = dict(chosen)
    par = {"is_optimizer_distributed": values.pop("is_optimizer_distributed")}
    dp, rest = divmod(8, values["tp"] * values["pp"])
    return layout(dp=dp, par=par, samples=32, **values) if dp and not rest else None


def difference(explanation: Explanation) -> Difference:
    assert explanation.difference is not None
    return explanation.difference


def by_term(step_difference: Difference) -> dict[Term, float]:
    return {term.term: term.time_s for term in step_difference.terms}


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(one=CHOICES, other=CHOICES)
def test_terms_add_up_to_the_difference_and_so_do_the_changes_of_the_walk(
    layout: Layout, planted: Callable[..., Any], one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = of_eight(layout, one), of_eight(layout, other)
    if first is None or second is None:
        return
    steps = steps_of(planted(), layout(dp=8, samples=32), 1.0)
    result = difference(explain(first, second, steps))
    expected_s = steps.estimate(first).time_s - steps.estimate(second).time_s
    scale = pytest.approx(expected_s, rel=REL, abs=1e-12)
    assert result.time_s == scale
    assert sum(term.time_s for term in result.terms) == scale
    assert sum(change.change_s for change in result.walk.changes) == scale
    for side in (result.one, result.other):
        assert sum(t.time_s for t in side.terms) == pytest.approx(side.estimate.time_s, rel=REL)
    mine, its = ({t.term: t.time_s for t in side.terms} for side in (result.one, result.other))
    for term, time_s in by_term(result).items():  # as the columns A, B and A - B have them
        assert time_s == pytest.approx(mine.get(term, 0.0) - its.get(term, 0.0), rel=REL, abs=1e-12)
    assert result.low_s <= result.time_s <= result.high_s
    assert all(t.low_s <= t.time_s <= t.high_s for t in result.terms)
    json.dumps(explain(first, second, steps).to_json(), allow_nan=False)


def test_where_transfers_cost_nothing_but_tp_the_transfers_of_tp_decide(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """The same machine with slow links: all that tp 4 loses against dp 4 is its transfers."""
    slow = steps_of(planted(launch_s=0.0, bytes_per_s=1e6))
    result = difference(explain(layout(tp=4, samples=32), layout(dp=4, samples=32), slow))
    terms = by_term(result)
    assert max(terms, key=lambda term: terms[term]) is Term.TP
    assert "slower" in result.sentence and "mainly by TP transfers +" in result.sentence


def test_a_pipeline_loses_its_bubble(layout: Layout, planted: Callable[..., Any]) -> None:
    """(pp - 1) / m of the work of a stage where nothing but layers costs."""
    kinds = OperatorKind
    free = dict.fromkeys(
        (
            *(kinds.EMBEDDING, kinds.LOGITS, kinds.LOSS, kinds.NORM, kinds.OPTIMIZER),
            *(kinds.HOST_STEP, kinds.HOST_MICROBATCH),
        ),
        0.0,
    )
    steps = steps_of(planted(kinds=free, latency_s=0.0, bytes_per_s=math.inf))
    pipeline, replicas = layout(pp=4, samples=32), layout(dp=4, samples=32)
    result = difference(explain(pipeline, replicas, steps))
    expected_s = 3 / pipeline.num_microbatches * result.other.estimate.time_s
    assert result.time_s == pytest.approx(expected_s, rel=1e-4)
    assert by_term(result)[Term.BUBBLE] == pytest.approx(expected_s, rel=1e-4)
    assert "PP bubble +" in result.sentence


def test_what_both_share_has_cancelled(layout: Layout, planted: Callable[..., Any]) -> None:
    """Operators of both are 5 % off together: work is the same, so its difference is certain."""
    steps = steps_of(planted(sigma_log=0.05, transfer_sigma_log=0.0))
    shards = {"is_optimizer_distributed": True}
    result = difference(explain(layout(dp=2), layout(dp=2, par=shards), steps))
    (mlp,) = (term for term in result.terms if term.term is Term.MLP)
    (alone,) = (term for term in result.one.terms if term.term is Term.MLP)
    assert alone.high_s - alone.low_s > 0.1 * alone.time_s
    # Slopes are finite differences: what they leave of a width that cancels is their rounding.
    assert mlp.high_s - mlp.low_s < 1e-5 * (alone.high_s - alone.low_s)


def test_the_interval_is_that_of_a_plan(layout: Layout, planted: Callable[..., Any]) -> None:
    one, other = layout(tp=2), layout(pp=2)
    steps = steps_of(planted())
    result = difference(explain(one, other, steps))
    mine, its = steps.estimates([one, other])
    spread = math.exp(Z_90 * mine.over(its).sigma_log)
    assert result.low_s == pytest.approx(mine.time_s / spread - its.time_s)
    assert result.high_s == pytest.approx(mine.time_s * spread - its.time_s)
    assert result.is_distinguishable == (result.low_s > 0 or result.high_s < 0)


def test_layouts_that_cannot_be_told_apart_are_not_called_faster(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    steps = steps_of(planted(sigma_log=0.3, transfer_sigma_log=0.8))
    explanation = explain(layout(dp=2, micro=4), layout(dp=2, micro=8), steps)
    text = explanation.sentence
    assert ("indistinguishable" in text) != ("faster" in text or "slower" in text)
    assert ("indistinguishable" in text) != difference(explanation).is_distinguishable
    same = explain(layout(dp=2), layout(dp=2), steps)
    assert "take the same time" in same.sentence and not difference(same).walk.changes


def test_choices_of_another_layout_make_it(layout: Layout) -> None:
    one = layout(tp=2, dp=2, micro=2, recompute=Recompute.FULL)
    for other in every_layout(layout(dp=4), 4):
        axes = differing_axes(one, other)
        assert with_axes_of(one, other, axes) == other
        assert axes or other == one
        assert [axis for axis in AXES if axis_value(one, axis) != axis_value(other, axis)] == list(
            axes
        )


def test_a_choice_that_does_not_fit_is_refused(layout: Layout) -> None:
    one, other = layout(dp=2), layout(pp=4, samples=16)
    with pytest.raises(ConfigError, match="2 ranks do not split over tp 1 x cp 1 x pp 4"):
        with_axes_of(one, other, ("pp",))


def changed_axes(changes: Sequence[Any]) -> list[tuple[str, ...]]:
    return [change.axes for change in changes]


def test_each_choice_is_one_step_in_the_order_of_the_axes(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    start = layout(dp=8, micro=1, samples=32)
    end = layout(tp=2, pp=2, dp=2, micro=2, samples=32, recompute=Recompute.FULL)
    steps = steps_of(planted())
    result = walk(start, end, steps)
    assert changed_axes(result.changes) == [("tp",), ("pp",), ("mbs",), ("recompute",)]
    assert result.changes[-1].step_time_s == pytest.approx(steps.estimate(end).time_s)
    assert changed_axes(result.alone) == changed_axes(result.changes)
    first = result.changes[0]
    assert first.change_s == pytest.approx(result.alone[0].change_s)
    assert first.text == "tp 1 -> 2" and first.label == "TP2 DP4 mbs1"
    assert not result.impossible


def test_another_order_is_taken_where_the_first_cannot_run(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Eight ranks of tp 4 x pp 2: pp 4 waits until tp has made room."""
    result = walk(layout(pp=4, dp=2), layout(tp=4, pp=2), steps_of(planted()))
    assert changed_axes(result.changes) == [("pp",), ("tp",)]
    assert result.impossible == ("tp",)


def test_choices_that_only_run_together_are_one_step(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """Two samples do not go over dp 4, which pp 1 alone would be; nor 16 ranks on four."""
    start, end = layout(pp=4, micro=1, samples=2), layout(tp=4, micro=1, samples=2)
    result = walk(start, end, steps_of(planted()))
    assert changed_axes(result.changes) == [("tp", "pp")]
    assert result.changes[0].label == "TP4 mbs1"
    assert result.impossible == ("tp", "pp") and not result.alone


def test_rows_of_a_plan_are_explained_as_they_are_planned(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=4, dp=2, micro=1)
    steps = steps_of(planted(), config, 0.1)
    best = plan(config, steps, budget=MemoryBudget(capacity_nbytes=10**13)).candidates[0]
    result = difference(explain(best.config, config, steps))
    assert result.one.estimate.time_s == pytest.approx(best.step_time_s, rel=REL)
    assert result.time_s / result.other.estimate.time_s == pytest.approx(best.time_frac, rel=REL)

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from every_layout import best_of_every, every_layout, row
from planted_steps import estimate_many, estimate_step, steps_of

from forerun.calib.advice.planning import Candidate, Plan, compare, plan
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.arguments.short_names import LayoutConstraint
from forerun.calib.errors import ConfigError
from forerun.calib.memory.peak import Verdict, memory
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.regressors.robust import Z_90
from forerun.calib.search.results import NUM_LACKING, TOP, Effort, MemoryBudget
from forerun.calib.workload.choices import layout_label
from forerun.calib.workload.config import Recompute, RunConfig, Sharding

Layout = Callable[..., RunConfig]


@pytest.mark.slow
def test_the_best_rows_stand_before_some_that_do_not_fit(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """All of a small space are looked at: the twenty best of it, each row once, and five more."""
    config, steps = layout(tp=4, micro=1), steps_of(planted())
    capacity = sorted(memory(one).total_nbytes for one in every_layout(config, 4))[500]
    result = plan(config, steps, budget=MemoryBudget(capacity_nbytes=int(capacity)))
    budget = MemoryBudget(capacity_nbytes=int(capacity))
    expected = best_of_every(config, steps, 4, budget, TOP)
    fitting = [c for c in result.candidates if c.verdict is not Verdict.DOES_NOT_FIT]
    times = [c.step_time_s for c in fitting]
    assert times == pytest.approx([time_s for time_s, _ in expected], rel=1e-8)
    rows = [row(c.config) for c in fitting]
    assert len(set(rows)) == len(rows) == TOP
    lacking = result.candidates[len(fitting) :]
    assert 0 < len(lacking) <= NUM_LACKING
    assert all(c.verdict is Verdict.DOES_NOT_FIT for c in lacking)


def test_all_layouts_are_counted_of_each_number_of_ranks(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    result = plan(layout(tp=2, dp=2), steps_of(planted()), num_ranks=[2, 4])
    for number in (2, 4):
        tried = result.tried[number]
        assert tried.num_layouts == len(every_layout(layout(tp=2, dp=2), number))
        assert not tried.not_tried
    assert result.num_layouts == sum(one.num_layouts for one in result.tried.values())
    value = result.to_json()
    assert value["num_layouts"] == result.num_layouts
    assert [one["num_ranks"] for one in value["search"]] == [2, 4]


@pytest.mark.parametrize(
    "text", ["recompute=none", "sharding=none|optimizer,pp=1", "dp=2", "tp=2,recompute=mlp|full"]
)
def test_only_what_is_asked_for_is_counted(
    text: str, layout: Layout, planted: Callable[..., Any]
) -> None:
    config, keep = layout(tp=2, dp=2), LayoutConstraint.parse(text)
    result = plan(config, steps_of(planted()), keep=keep)
    wanted = sum(map(keep.allows, every_layout(config, 4)))
    assert result.num_layouts == result.to_json()["search"][0]["num_layouts"] == wanted > 0
    assert f"{wanted:,} layouts, " in result.tried[4].text


def test_a_search_that_is_stopped_is_told_as_stopped(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    effort = Effort(is_stopped=lambda: True)
    result = plan(layout(tp=2, dp=2), steps_of(planted()), effort=effort)
    (tried,) = result.tried.values()
    assert tried.not_tried == tried.num_layouts
    assert result.to_json()["search"][0]["not_tried"] == tried.not_tried


def test_candidates_are_ranked_and_scaled_to_the_measured_step(
    planned: Callable[..., Plan],
) -> None:
    plan = planned(measured_frac=1.2)
    running_s = 1.2 * planned(measured_frac=None).running.step_time_s
    times = [c.step_time_s for c in plan.candidates]
    assert times == sorted(times)
    assert plan.running.step_time_s == pytest.approx(running_s)
    assert plan.running.time_frac == 0
    for candidate in plan.candidates:
        assert candidate.step_time_s == pytest.approx(running_s * (1 + candidate.time_frac))
        assert candidate.ratio.low < candidate.ratio.median < candidate.ratio.high
        assert candidate.low_s < candidate.step_time_s < candidate.high_s


def test_a_bias_that_all_layouts_share_changes_no_ratio(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2, dp=2)
    slow = planted(launch_s=2e-5, flop_per_s=0.5e10, latency_s=2e-5, bytes_per_s=0.5e9)
    one, two = (plan(config, steps_of(e)) for e in (planted(), slow))
    for a, b in zip(one.candidates, two.candidates, strict=True):
        assert a.label == b.label
        assert a.time_frac == pytest.approx(b.time_frac, abs=1e-6)


def test_shared_errors_cancel_before_they_are_squared(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    configs = [layout(dp=2), layout(dp=2, recompute=Recompute.SELECTIVE), layout(tp=2)]
    base, recomputed, across = estimate_many(configs, planted())
    assert base.over(base).sigma_log == 0
    assert base.over(recomputed).sigma_log < 0.7 * base.sigma_log
    assert base.over(across).sigma_log > base.over(recomputed).sigma_log


def test_the_best_layout_fits_and_is_faster(planned: Callable[..., Plan]) -> None:
    free = planned()
    assert free.best is not None and free.best == free.candidates[0]
    needed = free.best.memory.total_nbytes
    tight = planned(memory_capacity_nbytes=needed - 1)
    assert tight.best is None or tight.best.memory.total_nbytes < needed
    # Splits that fit in no variant come last.
    little = min(c.memory.total_nbytes for c in free.candidates)
    tight = planned(memory_capacity_nbytes=little // 2)
    over = [c.verdict is Verdict.DOES_NOT_FIT for c in tight.candidates]
    assert over == sorted(over) and any(over) and not all(over)


def test_nothing_is_offered_that_cannot_be_followed(planned: Callable[..., Plan]) -> None:
    plan = planned()
    assert plan.best is not None
    running = plan.running.config
    # Nothing fits: the layout that lacks the least memory is named.
    tight = planned(memory_capacity_nbytes=1)
    assert tight.best is None
    least = min(tight.candidates, key=lambda c: c.memory.total_nbytes)
    assert tight.nearest_miss == f"nearest is {least.label}: it does not fit in memory"
    # All are slower.
    late = [replace(c, ratio=Estimate(median=1.01)) for c in plan.candidates]
    slower = replace(plan, candidates=tuple(late))
    assert slower.best is None and slower.nearest_miss.endswith("it is not faster")
    # A host whose degrees are the user's own code is asked for another batch alone.
    hosted = replace(running, framework="transformers 5.1")
    plan_of = replace(plan, running=replace(plan.running, config=hosted))
    hosted_candidates = tuple(
        replace(c, config=replace(c.config, framework=hosted.framework)) for c in plan.candidates
    )
    offered = replace(plan_of, candidates=hosted_candidates).best
    assert offered is None or offered.config.parallelism == running.parallelism
    alone = tuple(c for c in hosted_candidates if c.config.parallelism != running.parallelism)
    missed = replace(plan_of, candidates=alone)
    assert missed.best is None
    assert missed.nearest_miss.endswith("transformers sets it; set it in the code")


def test_nothing_is_offered_that_megatron_would_refuse(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    """While the batch grows in steps of 4, Megatron wants micro-batch x dp to divide each."""
    config = layout(tp=4, dp=2, micro=1)
    ramp = replace(config, cadence=replace(config.cadence, rampup_batch_size=(4, 4, 1000)))
    result = plan(ramp, steps_of(planted()), budget=MemoryBudget(capacity_nbytes=10**13))
    assert result.best is not None and result.best != result.candidates[0]
    shares = [c.config.batch.micro_batch_size * c.config.parallelism.dp for c in result.candidates]
    obstacles = [result.obstacle(c) for c in result.candidates]
    for share, obstacle in zip(shares, obstacles, strict=True):
        assert ("--rampup-batch-size" in obstacle) == (4 % share != 0)
    assert shares[result.candidates.index(result.best)] in (1, 2, 4)


def test_what_the_running_layout_does_too_is_no_obstacle(planned: Callable[..., Plan]) -> None:
    plan = planned()
    assert plan.best is not None

    def refused(candidate: Candidate) -> Candidate:
        return replace(candidate, config=replace(candidate.config, offload_modules=("attn_proj",)))

    one = refused(plan.best)
    assert "attn_proj needs core_attn" in plan.obstacle(one)
    assert replace(plan, running=refused(plan.running)).obstacle(one) == ""


def test_a_measured_offset_is_in_every_estimate(planned: Callable[..., Plan]) -> None:
    plan = planned(memory_offset_nbytes=1000)
    for candidate in plan.candidates:
        bare = memory(candidate.config).total_nbytes
        assert candidate.memory.total_nbytes == bare + 1000


def test_options_of_a_candidate_give_its_layout(planned: Callable[..., Plan]) -> None:
    plan = planned()
    for candidate in plan.candidates:
        assert apply_options(plan.running.config, candidate.options) == candidate.config


def test_other_numbers_of_ranks_are_ranked_together(planned: Callable[..., Plan]) -> None:
    plan = planned(num_ranks=[4, 16])
    assert {c.config.parallelism.num_ranks for c in plan.candidates} == {4, 16}


def test_without_a_measured_step_the_model_stands_alone(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2, dp=2)
    alone, estimate = plan(config, steps_of(planted())), estimate_step(config, planted())
    assert alone.running.step_time_s == pytest.approx(estimate.time_s)
    assert alone.running.high_s == pytest.approx(estimate.high_s)
    fastest = alone.candidates[0]
    assert math.log(fastest.high_s / fastest.step_time_s) > Z_90 * fastest.ratio.sigma_log


def test_given_layouts_are_compared_in_their_order(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2, dp=2)
    steps = steps_of(planted(), config, 2.0)
    ranked = {c.config: c for c in plan(config, steps).candidates}
    best, *_, last = ranked
    others = [last, config, best, layout(pp=4)]
    candidates = compare(config, others, steps)
    assert [c.config for c in candidates] == others
    assert candidates[1].step_time_s == pytest.approx(2.0)
    assert candidates[1].ratio.sigma_log == 0.0
    for place in (0, 2):
        ranked_s = ranked[others[place]].step_time_s
        assert candidates[place].step_time_s == pytest.approx(ranked_s)


def test_labels_name_what_differs_from_one(layout: Layout) -> None:
    config = layout(tp=4, pp=2, recompute=Recompute.FULL)
    assert layout_label(config) == "TP4 PP2 mbs2 full"
    assert layout_label(layout(dp=2)) == "DP2 mbs2"
    par: dict[str, Any] = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}
    assert layout_label(layout(dp=4, par=par)) == "DP4 FSDP mbs2"
    hybrid = {**par, "num_optimizer_instances": 2}
    assert layout_label(layout(dp=4, par=hybrid)) == "DP4 HSDP mbs2"


def test_a_plan_under_fsdp_says_how_likely_each_fits(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    par = {"is_optimizer_distributed": True, "sharding": Sharding.WEIGHTS}
    config = layout(dp=4, samples=32, par=par)
    capacity = memory(config).total_nbytes
    result = plan(config, steps_of(planted()), budget=MemoryBudget(capacity_nbytes=capacity))
    assert len(result.candidates) > 4
    for one in result.candidates:
        assert one.fit_probability is not None
        assert (one.fit_probability >= 0.9) == (one.verdict is Verdict.FITS)
        assert (one.fit_probability < 0.5) == (one.verdict is Verdict.DOES_NOT_FIT)
        assert one.to_json()["fit_probability"] == one.fit_probability
    (open_,) = compare(config, [config], steps_of(planted()))
    assert open_.fit_probability is None


def test_worth_measuring_are_the_fastest_that_may_be_faster_and_are_not_known(
    planned: Callable[..., Plan],
) -> None:
    plan = planned()
    named = plan.worth_measuring
    able = [c for c in plan.candidates if c.ratio.low < 1 and c.ratio.sigma_log >= 0.02]
    assert 0 < len(named) <= 3 and all(one in able for one in named)
    assert [c.step_time_s for c in named] == sorted(c.step_time_s for c in able)[: len(named)]
    late = Estimate(median=1.05, unshared_sigma_log=0.02)
    surely_slower = [replace(c, ratio=late) for c in plan.candidates]
    assert replace(plan, candidates=tuple(surely_slower)).worth_measuring == ()
    known = replace(named[0], ratio=Estimate(median=named[0].ratio.median))
    rest = tuple(known if c is named[0] else c for c in plan.candidates)
    assert known not in replace(plan, candidates=rest).worth_measuring
    # Nothing runs that does the same work: the fastest, whatever nobody knows of their ratios.
    nan = Estimate(median=math.nan, unshared_sigma_log=math.nan)
    alone = replace(plan, candidates=tuple(replace(c, ratio=nan) for c in plan.candidates))
    assert len(alone.worth_measuring) == 3


def test_no_ranks_are_refused(layout: Layout, planted: Callable[..., Any]) -> None:
    with pytest.raises(ConfigError, match="gpus -1 is below 1"):
        plan(layout(), steps_of(planted()), num_ranks=-1)

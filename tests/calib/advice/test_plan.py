from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from planted_steps import estimate_many, estimate_step, steps_of

from forerun.calib.advice.plan import Plan, compare, enumerate_layouts, layout_label, plan
from forerun.calib.arguments.megatron_args import apply_options
from forerun.calib.errors import ConfigError
from forerun.calib.memory.peak import Verdict, memory
from forerun.calib.regressors.intervals import Z_90
from forerun.calib.steps.design import most_informative
from forerun.calib.steps.estimate import paired_sigma_log
from forerun.calib.workload.config import Recompute, RunConfig, Sharding

Layout = Callable[..., RunConfig]


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(num_ranks=st.sampled_from([1, 2, 4, 6, 8, 16]), samples=st.sampled_from([8, 12, 16]))
def test_every_layout_runs_the_same_batch_on_the_ranks(
    layout: Layout, num_ranks: int, samples: int
) -> None:
    found = enumerate_layouts(layout(samples=samples, micro=1), num_ranks)
    assert len(set(found)) == len(found)
    for config in found:
        par = config.parallelism
        assert par.num_ranks == num_ranks
        share = config.num_microbatches * config.batch.micro_batch_size * par.dp
        assert share == samples


def test_no_layout_that_could_run_is_missing(layout: Layout) -> None:
    """All pairs of degrees and micro-batches, asked one by one whether they are accepted."""
    expected = set()
    degrees = itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
    for (tp, pp, dp, vp), micro in itertools.product(degrees, range(1, 17)):
        for recompute in Recompute:
            if tp * pp * dp != 4:
                continue
            try:
                par = {"vp": vp}
                expected.add(layout(tp=tp, pp=pp, dp=dp, micro=micro, recompute=recompute, par=par))
            except ConfigError:
                continue
    assert set(enumerate_layouts(layout(dp=4), 4)) == expected


def test_layers_that_do_not_split_evenly_still_have_pipelines(layout: Layout) -> None:
    config = layout(dp=4, model={"num_layers": 7})
    found = {c.parallelism.chunk_layers for c in enumerate_layouts(config, 4)}
    assert found == {(), (4, 3), (2, 2, 2, 1)}


def test_settings_are_kept_where_they_apply(layout: Layout) -> None:
    config = layout(
        tp=2,
        dp=2,
        recompute=Recompute.FULL,
        recompute_num_layers=2,
        par={"is_sequence_parallel": True, "is_optimizer_distributed": True},
    )
    for found in enumerate_layouts(config, 4):
        assert found.parallelism.is_sequence_parallel == (found.parallelism.tp > 1)
        assert found.parallelism.is_optimizer_distributed
        is_kept = found.recompute is Recompute.FULL and found.chunk_layers[0] >= 2
        assert found.recompute_num_layers == (2 if is_kept else 0)


def test_candidates_are_ranked_and_scaled_to_the_measured_step(
    planned: Callable[..., Plan],
) -> None:
    found = planned(measured_frac=1.2)
    own_s = 1.2 * planned(measured_frac=None).own.step_time_s
    times = [c.step_time_s for c in found.candidates]
    assert times == sorted(times)
    assert found.own.step_time_s == pytest.approx(own_s)
    assert found.own.time_frac == 0
    for candidate in found.candidates:
        assert candidate.step_time_s == pytest.approx(own_s * (1 + candidate.time_frac))
        assert candidate.time_frac_low < candidate.time_frac < candidate.time_frac_high
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
    own, recomputed, across = estimate_many(configs, planted())
    assert paired_sigma_log(own, own) == 0
    assert paired_sigma_log(own, recomputed) < 0.7 * own.sigma_log
    assert paired_sigma_log(own, across) > paired_sigma_log(own, recomputed)


def test_the_best_layout_fits_and_is_faster(planned: Callable[..., Plan]) -> None:
    free = planned()
    assert free.best is not None and free.best == free.candidates[0]
    needed = free.best.memory.total_nbytes
    tight = planned(memory_capacity_nbytes=needed - 1)
    assert tight.best is None or tight.best.memory.total_nbytes < needed
    over = [c.verdict is Verdict.DOES_NOT_FIT for c in tight.candidates]
    assert over == sorted(over) and any(over)


def test_nothing_is_offered_that_cannot_be_followed(planned: Callable[..., Plan]) -> None:
    found = planned()
    assert found.best is not None
    own = found.own.config
    # Nothing fits: the layout that lacks the least memory is named.
    tight = planned(memory_capacity_nbytes=1)
    assert tight.best is None
    least = min(tight.candidates, key=lambda c: c.memory.total_nbytes)
    assert tight.nearest_miss == f"nearest is {least.label}: it does not fit in memory"
    # All are slower.
    slower = replace(found, candidates=tuple(c for c in found.candidates if c.time_frac >= 0))
    assert slower.best is None and slower.nearest_miss.endswith("it is not faster")
    # A host whose degrees are the user's own code is asked for another batch alone.
    hosted = replace(own, framework="transformers 5.1")
    plan_of = replace(found, own=replace(found.own, config=hosted))
    hosted_candidates = tuple(
        replace(c, config=replace(c.config, framework=hosted.framework)) for c in found.candidates
    )
    offered = replace(plan_of, candidates=hosted_candidates).best
    assert offered is None or offered.config.parallelism == own.parallelism
    alone = tuple(c for c in hosted_candidates if c.config.parallelism != own.parallelism)
    missed = replace(plan_of, candidates=alone)
    assert missed.best is None
    assert missed.nearest_miss.endswith("transformers cannot be asked for it by options")


def test_a_measured_offset_is_in_every_estimate(planned: Callable[..., Plan]) -> None:
    found = planned(memory_offset_nbytes=1000)
    for candidate in found.candidates:
        bare = memory(candidate.config).total_nbytes
        assert candidate.memory.total_nbytes == bare + 1000


def test_options_of_a_candidate_give_its_layout(planned: Callable[..., Plan]) -> None:
    found = planned()
    for candidate in found.candidates:
        assert apply_options(found.own.config, candidate.options) == candidate.config


def test_other_numbers_of_ranks_are_ranked_together(planned: Callable[..., Plan]) -> None:
    found = planned(num_ranks=[4, 16])
    assert {c.config.parallelism.num_ranks for c in found.candidates} == {4, 16}


def test_without_a_measured_step_the_model_stands_alone(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2, dp=2)
    alone, own = plan(config, steps_of(planted())), estimate_step(config, planted())
    assert alone.own.step_time_s == pytest.approx(own.time_s)
    assert alone.own.high_s == pytest.approx(own.high_s)
    fastest = alone.candidates[0]
    assert math.log(fastest.high_s / fastest.step_time_s) > Z_90 * fastest.log_ratio_sigma


def test_given_layouts_are_compared_in_their_order(
    layout: Layout, planted: Callable[..., Any]
) -> None:
    config = layout(tp=2, dp=2)
    others = [layout(dp=4), config, layout(pp=4)]
    steps = steps_of(planted(), config, 2.0)
    found = compare(config, others, steps)
    assert [c.config for c in found] == others
    assert found[1].step_time_s == pytest.approx(2.0)
    assert found[1].log_ratio_sigma == 0.0
    ranked = {c.config: c for c in plan(config, steps).candidates}
    assert ranked[others[0]].step_time_s == pytest.approx(found[0].step_time_s)


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
    found = plan(config, steps_of(planted()), memory_capacity_nbytes=capacity)
    assert len(found.candidates) > 4
    for one in found.candidates:
        assert one.fit_probability is not None
        assert (one.fit_probability >= 0.9) == (one.verdict is Verdict.FITS)
        assert (one.fit_probability < 0.5) == (one.verdict is Verdict.DOES_NOT_FIT)
        assert one.to_json()["fit_probability"] == one.fit_probability
    (open_,) = compare(config, [config], steps_of(planted()))
    assert open_.fit_probability is None


def test_the_most_telling_layouts_differ_in_what_they_would_tell() -> None:
    """Two layouts off by the same family tell the same: only one of them is asked for."""
    slopes = [{"tp": 0.1}, {"tp": 0.12}, {"pp": 0.05}, {"linear": 0.001}]
    assert most_informative(slopes, 3) == [1, 2]
    assert most_informative([], 2) == []


def test_json_is_complete_and_plain(planned: Callable[..., Plan]) -> None:
    found = planned(memory_capacity_nbytes=2**30)
    value = json.loads(json.dumps(found.to_json()))
    assert value["schema"] == 1
    assert value["best"] == found.candidates[0].label
    assert RunConfig.from_json(value["config"]) == found.own.config
    assert len(value["candidates"]) == len(found.candidates)


def test_no_ranks_are_refused(layout: Layout) -> None:
    with pytest.raises(ConfigError, match="0 ranks are none"):
        enumerate_layouts(layout(), 0)

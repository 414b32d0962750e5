from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from json_schema import check

from forerun.calib.advice.decision import (
    Action,
    Decision,
    Rule,
    decide,
    saving_probability,
)
from forerun.calib.advice.planning import Candidate, Plan
from forerun.calib.forecast._remaining_time import RemainingTime
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.memory.peak import Verdict
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.steps.model import MISFIT
from forerun.calib.workload.config import Cadence, CheckpointForm
from forerun.calib.workload.run_options import Goals
from forerun.launch.verbs.arguments import file_schema

Steady = Callable[..., Forecast]
Planned = Callable[..., Plan]
HOST = ["pretrain_gpt.py", "--tensor-model-parallel-size", "4", "--micro-batch-size", "1"]


def best_of(plan: Plan) -> Candidate:
    assert plan.best is not None
    return plan.best


def test_a_stop_needs_two_windows_in_a_row(steady: Steady, planned: Planned) -> None:
    limits = Goals(restart_cost_s=60.0)
    ask = {"forecast": steady(), "plan": planned(), "host_argv": HOST}
    first = decide(limits, **ask)
    assert (first.action, first.rules_met) == (Action.CONTINUE, {Rule.RESTART})
    second = decide(limits, previously_met=first.rules_met, **ask)
    assert second.action is Action.STOP
    calm = decide(Goals(restart_cost_s=1e9), **ask)
    third = decide(limits, previously_met=calm.rules_met, **ask)
    assert third.action is Action.CONTINUE


def test_the_advised_command_is_the_users_own_with_the_layout(
    steady: Steady, planned: Planned
) -> None:
    plan = planned()
    best = best_of(plan).config
    decision = decide(Goals(restart_cost_s=60.0), forecast=steady(), plan=plan, host_argv=HOST)
    assert decision.command[0] == "pretrain_gpt.py"
    place = decision.command.index("--micro-batch-size")
    assert decision.command[place + 1] == str(best.batch.micro_batch_size)
    calm = decide(Goals(restart_cost_s=1e9), forecast=steady(), plan=plan, host_argv=HOST)
    assert calm.command == ()


@pytest.mark.parametrize("capacity_nbytes", [None, 1])
def test_a_restart_into_a_layout_that_may_not_fit_is_not_advised(
    steady: Steady, planned: Planned, capacity_nbytes: int | None
) -> None:
    plan = planned(memory_capacity_nbytes=capacity_nbytes)
    decision = decide(Goals(restart_cost_s=60.0), forecast=steady(), plan=plan, host_argv=HOST)
    assert not decision.rules_met and decision.command == ()


def test_the_fastest_layout_that_surely_fits_is_the_one_that_is_asked_about(
    steady: Steady, planned: Planned
) -> None:
    roomy = planned()
    needs = [c.memory.total_nbytes for c in roomy.candidates if c.time_frac < 0]
    assert needs[0] > min(needs)
    plan = planned(memory_capacity_nbytes=int(1.01 * needs[0]))
    decision = decide(Goals(restart_cost_s=60.0), forecast=steady(), plan=plan, host_argv=HOST)
    assert plan.best is not None and plan.best.verdict is Verdict.TIGHT
    assert decision.candidate is not None and decision.candidate.verdict is Verdict.FITS
    assert decision.rules_met == {Rule.RESTART}


def test_a_restart_that_costs_more_than_it_saves_is_not_advised(
    steady: Steady, planned: Planned
) -> None:
    decision = decide(Goals(restart_cost_s=1e9), forecast=steady(), plan=planned())
    (reason,) = decision.reasons
    assert decision.action is Action.CONTINUE
    assert reason.probability == 0
    assert "but a restart costs" in reason.text and reason.numbers["net_s"] < 0


def gaining(candidate: Candidate) -> Candidate:
    """The layout with a gain of 10 %, and a deviation of 0.05 in the log."""
    return replace(candidate, ratio=Estimate(median=0.9, unshared_sigma_log=0.05))


def test_the_probability_of_saving_is_that_of_a_simulation(
    steady: Steady, planned: Planned
) -> None:
    """Monte Carlo with the same two distributions; 0.01 is three standard errors of 40,000."""
    run = steady()
    run = replace(run, remaining_time=RemainingTime.normal(run.remaining_s, 400.0))
    candidate = gaining(best_of(planned()))
    random = np.random.default_rng(2)
    remaining_s = run.remaining_s + 400.0 * random.standard_normal(40_000)
    ratio = 0.9 * np.exp(0.05 * random.standard_normal(40_000))
    for cost_s in (0.0, 500.0, 1000.0, 2000.0):
        simulated = float(np.mean(remaining_s - ratio * remaining_s > cost_s))
        assert saving_probability(run, candidate, cost_s) == pytest.approx(simulated, abs=0.01)


def test_without_checkpoints_a_restart_repeats_what_was_trained(
    steady: Steady, planned: Planned
) -> None:
    plan = planned()
    unsaved = Cadence(checkpoint_form=CheckpointForm.NONE)
    running = replace(plan.running, config=replace(plan.running.config, cadence=unsaved))
    run = replace(steady(), elapsed_s=1e6)
    ask = {"forecast": run, "host_argv": HOST}
    saved = decide(Goals(restart_cost_s=60.0), plan=plan, **ask)
    lost = decide(Goals(restart_cost_s=60.0), plan=replace(plan, running=running), **ask)
    assert saved.rules_met == {Rule.RESTART} and not lost.rules_met
    assert lost.reasons[0].numbers["restart_cost_s"] == 60.0 + 1e6
    assert "without --save it begins anew" in lost.reasons[0].text


def test_a_closer_end_makes_a_restart_less_worth(steady: Steady, planned: Planned) -> None:
    candidate = gaining(best_of(planned()))
    chances = [
        saving_probability(steady(steps_total=n), candidate, 300.0)
        for n in (100, 1_000, 4_000, 10_000, 100_000)
    ]
    assert chances == sorted(chances)
    assert chances[0] == 0


def test_lateness_is_the_tail_of_the_finish(steady: Steady) -> None:
    run = steady()
    ends_unix_s = [run.finish_p50_unix_s, run.finish_p95_unix_s]
    chances = [lateness(run, end_unix_s) for end_unix_s in ends_unix_s]
    assert chances == pytest.approx([0.5, 0.05])
    exact = replace(run, remaining_time=RemainingTime.normal(run.remaining_s, 0.0))
    assert lateness(exact, run.finish_p50_unix_s - 1) == 1
    assert lateness(exact, run.finish_p50_unix_s + 1) == 0


def lateness(run: Forecast, deadline_unix_s: float) -> float | None:
    decision = decide(Goals(deadline_unix_s=deadline_unix_s), forecast=run, plan=None)
    return next(one.probability for one in decision.reasons if one.rule is Rule.DEADLINE)


def test_a_deadline_that_cannot_be_met_stops_without_a_plan(steady: Steady) -> None:
    run = steady()
    limits = Goals(restart_cost_s=60.0, deadline_unix_s=run.now_unix_s + run.remaining_s / 2)
    first = decide(limits, forecast=run, plan=None)
    assert first.action is Action.ABSTAIN
    second = decide(limits, forecast=run, plan=None, previously_met=first.rules_met)
    assert second.action is Action.STOP
    (reason,) = [r for r in second.reasons if r.is_met]
    assert reason.rule is Rule.DEADLINE
    assert "after the deadline" in reason.text


def test_a_budget_counts_from_the_start_of_the_run(steady: Steady, planned: Planned) -> None:
    run = steady()
    wide = Goals(restart_cost_s=1e9, budget_hours=1.2 * run.total_s / 3600.0)
    tight = Goals(restart_cost_s=1e9, budget_hours=0.8 * run.total_s / 3600.0)
    met = [decide(x, forecast=run, plan=planned()).rules_met for x in (wide, tight)]
    assert met == [frozenset(), frozenset({Rule.BUDGET})]


@pytest.mark.parametrize("coverage_frac", [0.5, 0.89])
def test_hooks_that_missed_too_much_make_it_abstain(
    steady: Steady, planned: Planned, coverage_frac: float
) -> None:
    decision = decide(
        Goals(restart_cost_s=60.0), forecast=steady(), plan=planned(), coverage_frac=coverage_frac
    )
    assert decision.action is Action.ABSTAIN
    assert "record another window" in decision.reasons[0].text
    assert decision.command == ()


def test_where_graphs_hide_operators_another_window_is_no_remedy(
    steady: Steady, planned: Planned
) -> None:
    silent = "inside a CUDA graph: the whole iteration, step time only"
    decision = decide(
        Goals(restart_cost_s=60.0),
        forecast=steady(),
        plan=planned(),
        coverage_frac=0.1,
        silent=silent,
    )
    assert decision.action is Action.ABSTAIN
    assert decision.reasons[0].text.endswith(f"{silent}; record a few steps without")


def test_too_few_measured_steps_make_it_abstain(steady: Steady, planned: Planned) -> None:
    few = replace(steady(), num_samples=3)
    decision = decide(Goals(restart_cost_s=60.0), forecast=few, plan=planned())
    assert decision.action is Action.ABSTAIN
    assert "record at least 5 clean" in decision.reasons[0].text


def test_confidence_moves_the_threshold(steady: Steady, planned: Planned) -> None:
    plan = planned()
    candidate = gaining(best_of(plan))
    plan = replace(plan, candidates=(candidate,))
    chance = saving_probability(steady(), candidate, 300.0)
    assert 0.5 < chance < 1.0
    for confidence, is_met in ((chance - 0.01, True), (min(1.0, chance + 0.01), False)):
        limits = Goals(restart_cost_s=300.0, confidence=confidence)
        decision = decide(limits, forecast=steady(), plan=plan)
        assert (Rule.RESTART in decision.rules_met) == is_met


def test_no_better_layout_means_going_on(steady: Steady, planned: Planned) -> None:
    plan = replace(planned(), candidates=())
    decision = decide(Goals(restart_cost_s=60.0), forecast=steady(), plan=plan)
    assert decision.action is Action.CONTINUE
    assert decision.reasons[0].text == "no other layout is faster and fits"


def test_json_holds_reasons_numbers_and_command(steady: Steady, planned: Planned) -> None:
    decision: Decision = decide(
        Goals(restart_cost_s=60.0), forecast=steady(), plan=planned(), host_argv=HOST
    )
    value = json.loads(json.dumps(decision.to_json()))
    assert value["schema"] == 2 and value["command_absent"] == ""
    assert value["action"] == "continue"
    assert value["command"][0] == "pretrain_gpt.py"
    numbers = value["reasons"][0]["numbers"]
    assert math.isclose(numbers["saved_s"], -numbers["remaining_s"] * numbers["expected_time_frac"])
    assert math.isclose(numbers["net_s"], numbers["saved_s"] - numbers["restart_cost_s"])


def test_a_faster_layout_has_a_command_or_the_reason_why_it_has_none(
    steady: Steady, planned: Planned
) -> None:
    for cost_s, host in ((60.0, HOST), (1e9, HOST), (60.0, ())):
        decision = decide(
            Goals(restart_cost_s=cost_s), forecast=steady(), plan=planned(), host_argv=host
        )
        value = decision.to_json()
        assert value["candidate"] is not None
        assert (value["command"] is None) == bool(value["command_absent"])


@pytest.mark.parametrize("misfit_log", [0.0, -0.4])
@pytest.mark.parametrize("coverage_frac", [None, 0.5])
@pytest.mark.parametrize("num_samples", [3, 20])
@pytest.mark.parametrize("has_plan", [False, True])
@pytest.mark.parametrize("has_limits", [False, True])
def test_every_number_of_a_reason_is_in_the_published_schema(
    steady: Steady,
    planned: Planned,
    misfit_log: float,
    coverage_frac: float | None,
    num_samples: int,
    has_plan: bool,
    has_limits: bool,
) -> None:
    run = replace(steady(), num_samples=num_samples)
    limits = {"deadline_unix_s": run.now_unix_s + 60.0, "budget_hours": 0.01} if has_limits else {}
    best = best_of(planned())
    errors_log = {**best.ratio.error_log, MISFIT: misfit_log}
    doubtful = replace(best, ratio=replace(best.ratio, error_log=errors_log))
    plan = replace(planned(), misfit_log=misfit_log, candidates=(doubtful,))
    advice = decide(
        Goals(restart_cost_s=60.0, **limits),
        forecast=run,
        plan=plan if has_plan else None,
        coverage_frac=coverage_frac,
    )
    assert advice.reasons
    schema = file_schema("decision")
    for reason in advice.reasons:
        check(reason.to_json(), {"$ref": "#/$defs/reason", "$defs": schema["$defs"]})
    if misfit_log and has_plan and num_samples > 3:
        assert any("misfit_log" in reason.numbers for reason in advice.reasons)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from forerun.calib.advice.decision import decide
from forerun.calib.advice.plan import Plan
from forerun.calib.answers.run_measurements import HookSummary, Overhead
from forerun.calib.answers.transcript import transcript_lines, utc_moment
from forerun.calib.forecast.batch_ratios import PredictedStep
from forerun.calib.forecast.finish import TimeLeft
from forerun.calib.forecast.forecast import Forecast
from forerun.calib.memory.peak import MemoryEstimate, Verdict
from forerun.calib.workload.run_options import Goals

Steady = Callable[..., Forecast]
Planned = Callable[..., Plan]
GIB = 1024**3


def test_the_five_lines(steady: Steady, planned: Planned) -> None:
    plan = planned(memory_capacity_nbytes=80 * GIB)
    own = replace(plan.own, config=replace(plan.own.config, device="NVIDIA A100"))
    memory = MemoryEstimate(
        stage=0,
        weights_nbytes=71 * GIB,
        grads_nbytes=0,
        optimizer_nbytes=0,
        activations_nbytes=0,
        logits_nbytes=0,
    )
    best = replace(
        plan.candidates[0],
        memory=memory,
        verdict=Verdict.FITS,
        time_frac=-0.11,
        time_frac_low=-0.15,
        time_frac_high=-0.06,
        log_ratio_sigma=0.03,
    )
    plan = replace(plan, own=own, candidates=(best,))
    run = replace(
        steady(),
        finish_p50_unix_s=1_700_143_800.0,
        finish_p95_unix_s=1_700_153_100.0,
        total_s=148_320.0,
        remaining_s=10_000.0,
        left=TimeLeft.normal(10_000.0, 100.0),
        energy_j=8.28e8,
    )
    decision = decide(Goals(restart_cost_s=900.0), forecast=run, plan=plan)
    lines = transcript_lines(
        hooks=HookSummary(num_fired=214, num_installed=214, num_operator_kinds=9, num_groups=1),
        overhead=Overhead(
            overhead_frac=0.004, low_frac=0.001, high_frac=0.007, num_hooked=3, num_bare=3
        ),
        measured_s=1.842,
        modelled=PredictedStep(time_s=1.861, low_s=1.80, high_s=1.93),
        forecast=run,
        plan=plan,
        decision=decision,
        time_limit_s=172_800.0,
    )
    assert lines == [
        "[forerun] hooks: 214/214 fired · 9 operator kinds · 1 group · overhead 0.4 % "
        "(90 %: 0.1 to 0.7; A/B over 6 steps)",
        "[forerun] step 1.842 s measured · 1.861 s modelled (90 %: 1.800 s to 1.930 s) · "
        "unexplained 1.0 %",
        "[forerun] finish Thu 14:10 UTC (P50) … Thu 16:45 UTC (P95) · 41.2 h · 0.23 MWh · "
        "Slurm limit 48.0 h: ok",
        f"[forerun] faster on the same GPUs: {best.label} · -11 % (-6 … -15) · memory 71 of 80 GiB",
        f"[forerun] decision: continue ({decision.reasons[0].text})",
    ]
    assert decision.reasons[0].text.startswith("restart would save 3.3 min, P = ")


def test_what_is_unknown_is_left_out(steady: Steady) -> None:
    assert transcript_lines() == []
    (line,) = transcript_lines(forecast=steady())
    run = steady()
    assert line.startswith(f"[forerun] finish {utc_moment(run.finish_p50_unix_s)} (P50)")
    assert "MWh" not in line and "Slurm" not in line
    assert transcript_lines(measured_s=1.0) == ["[forerun] step 1.000 s measured"]


def test_a_limit_that_is_too_short_is_said(steady: Steady) -> None:
    run = steady()
    words = [
        transcript_lines(forecast=run, time_limit_s=limit)[0].rsplit(": ", 1)[1]
        for limit in (run.total_s * 2, run.total_s + 1, run.total_s / 2)
    ]
    assert words[:2] == ["ok", "at risk"]
    # At a steady speed half of the whole time is half of the steps.
    half = run.steps_done + run.steps_left * (run.total_s / 2 - run.elapsed_s) / run.remaining_s
    share = half / (run.steps_done + run.steps_left)
    assert words[2] == f"{share * 100:.0f} % done at the limit"


def test_a_cpu_run_names_ranks_and_memory_without_a_capacity(planned: Planned) -> None:
    (line,) = transcript_lines(plan=planned(memory_capacity_nbytes=None))
    assert line.startswith("[forerun] faster on the same ranks: ")
    assert line.rsplit(" · ", 1)[1].startswith("memory ")
    assert " of " not in line.rsplit(" · ", 1)[1]
    other = planned(num_ranks=16)
    assert "faster on 16 ranks: " in transcript_lines(plan=other)[0]
    none = replace(planned(), candidates=())
    assert transcript_lines(plan=none) == ["[forerun] nothing faster to offer among 0 layouts"]


def test_an_abstention_says_what_is_missing() -> None:
    decision = decide(Goals(restart_cost_s=1.0), forecast=None, plan=None)
    (line,) = transcript_lines(decision=decision)
    assert line == (
        "[forerun] decision: abstain (0 measured steps are too few; record 5 unflagged ones)"
    )


def test_moments_are_utc() -> None:
    assert utc_moment(1_700_000_000.0) == "Tue 22:13 UTC"

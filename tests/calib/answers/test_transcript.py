"""Each line of the transcript reads alone: no bare number, probability or negative cost."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forerun.calib.advice.decision import Rule, decide
from forerun.calib.advice.planning import Candidate, Plan
from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.finish_line import finish_line
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_end import run_end, undecided
from forerun.calib.answers.run_measurements import HookSummary, Overhead
from forerun.calib.answers.transcript import (
    checked_line,
    decision_line,
    faster_line,
    run_line,
    with_prefix,
)
from forerun.calib.forecast._remaining_time import RemainingTime
from forerun.calib.forecast.batch_ratios import PredictedStep
from forerun.calib.forecast.forecast_record import Forecast
from forerun.calib.forecast.rates import Throughput
from forerun.calib.layers.model_size import model_name
from forerun.calib.memory.peak import MemoryEstimate, Verdict
from forerun.calib.records.record_kinds import LoopRecord
from forerun.calib.regressors.estimate import Estimate
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table
from forerun.calib.workload.choices import layout_words
from forerun.calib.workload.config import RunConfig
from forerun.calib.workload.config_json import encode_fields
from forerun.calib.workload.model_shape import Experts, ModelShape, Normalization, PositionEmbedding
from forerun.calib.workload.run_options import Goals

Steady = Callable[..., Forecast]
Planned = Callable[..., Plan]
Layout = Callable[..., RunConfig]
GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
GIB = 1024**3
HOOKS = HookSummary(
    num_fired=214,
    num_installed=214,
)
COST = Overhead(overhead_frac=0.001, low_frac=-0.006, high_frac=0.009, num_hooked=3, num_bare=3)


def measured(cost: Overhead) -> Any:
    return SimpleNamespace(step_s=1.842, hooks=HOOKS, overhead=cost)


RATE = Throughput(
    tokens_per_s=71_234.0,
    tokens_per_s_per_gpu=8904.25,
    flop_per_s_per_gpu=4.07e14,
    mfu_frac=0.412,
    hfu_frac=0.412,
)
DAY_S = 86_400.0
THURSDAY_UNIX_S = 1_700_143_800.0
"""Thu 16 Nov 2023 14:10 UTC."""


@pytest.fixture
def run(steady: Steady) -> Forecast:
    """41.2 h in all, of which 40.1 h are left."""
    return replace(
        steady(),
        now_unix_s=THURSDAY_UNIX_S - 144_360.0,
        finish_p50_unix_s=THURSDAY_UNIX_S,
        finish_p95_unix_s=THURSDAY_UNIX_S + 9300.0,
        elapsed_s=3960.0,
        total_s=148_320.0,
        remaining_s=144_360.0,
        remaining_high_s=153_660.0,
        remaining_time=RemainingTime.normal(144_360.0, 9300.0 / 1.645),
        gpu_hours=329.6,
    )


@pytest.fixture
def faster(planned: Planned) -> Plan:
    """One other layout: 11 % less, 71 of 80 GiB."""
    plan = planned(memory_capacity_nbytes=80 * GIB)
    running = replace(
        plan.running, config=replace(plan.running.config, device="NVIDIA H100 80GB HBM3")
    )
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
        ratio=Estimate(median=0.89, unshared_sigma_log=0.03),
    )
    return replace(plan, running=running, candidates=(best,))


def test_the_lines_of_the_design(run: Forecast, faster: Plan, layout: Layout) -> None:
    config = replace(
        faster.running.config,
        cadence=replace(faster.running.config.cadence, train_iters=10_000),
    )
    goals = Goals(restart_cost_s=720.0, limit_unix_s=run.now_unix_s - 3960.0 + 172_800.0)
    decision = decide(goals, forecast=run, plan=faster)
    lines = with_prefix(
        [
            run_line(config, config.parallelism.num_ranks, 1.842, RATE),
            finish_line(run, goals),
            faster_line(faster, decision),
            decision_line(decision, faster, directory="my runs"),
            checked_line(measured(COST), PredictedStep(time_s=1.861, low_s=1.80, high_s=1.93)),
        ]
    )
    words = layout_words(faster.candidates[0].config)
    (reason,) = decision.reasons
    assert lines == [
        f"[forerun] {model_name(config)} · 8 x H100 · {layout_words(config)} · step 1.842 s · "
        "41.2 % MFU · 71,200 tokens/s",
        "[forerun] ends Thu 14:10 UTC (by 16:45 with 95 %) · 41.2 h in all · 330 GPU-hours · "
        "inside the Slurm limit of 48 h",
        f"[forerun] faster here: {words} · 11 % less per step (6 to 15) · memory 71 of 80 GiB · "
        "saves 4.4 h less 12.0 min for the restart",
        "[forerun] decision: keep running until another window confirms it ("
        f"{100 * reason.probability:.3g} % chance that a restart "
        "pays off, threshold 90 %) · forerun plan 'my runs' --show 1 prints the command",
        "[forerun] checked: model 1.861 s (1.800 s to 1.930 s), 1.0 % off · hooks 214 of 214, "
        "cost not measurable (below 0.9 %)",
    ]


def test_a_moment_is_said_as_closely_as_it_is_near(run: Forecast) -> None:
    def ending(remaining_s: float, late_s: float) -> str:
        near = replace(
            run,
            now_unix_s=THURSDAY_UNIX_S - remaining_s,
            remaining_low_s=0.0,
            remaining_s=remaining_s,
            remaining_high_s=remaining_s + late_s,
            finish_p95_unix_s=THURSDAY_UNIX_S + late_s,
        )
        return finish_line(near, Goals()).partition(" · ")[0]

    assert ending(30.0, 5.0) == "ends 14:10:00 UTC (by 14:10:05 with 95 %)"
    assert ending(3600.0, 60.0) == "ends 14:10 UTC (by 14:11 with 95 %)"
    assert ending(2 * DAY_S, DAY_S) == "ends Thu 14:10 UTC (by Fri 14:10 with 95 %)"
    assert ending(9 * DAY_S, DAY_S) == "ends Thu 16 Nov 14:10 UTC (by Fri 17 Nov 14:10 with 95 %)"
    assert ending(1e12, 1e12) == (
        "ends Thu 16 Nov 2023 14:10 UTC (by beyond any calendar with 95 %)"
    )


def test_a_limit_is_one_that_the_run_is_inside_or_over(run: Forecast) -> None:
    def verdict(**goals: float) -> str:
        return finish_line(run, Goals(**goals)).rpartition(" · ")[2]

    end = run.finish_p50_unix_s
    assert verdict(deadline_unix_s=end + DAY_S) == "inside the deadline, Fri 14:10 UTC"
    assert verdict(budget_hours=100.0) == "inside the budget of 100 h"
    assert verdict(limit_unix_s=end) == (
        "ends after the Slurm limit of 41.2 h with probability 0.50"
    )
    # At a steady speed half of what is left is half of the steps that are.
    half = run.steps_done + run.steps_left / 2
    share = 100 * half / (run.steps_done + run.steps_left)
    assert verdict(limit_unix_s=run.now_unix_s + run.remaining_s / 2) == (
        f"over the Slurm limit of 21.1 h, when {share:.0f} % of the steps will be done"
    )
    both = finish_line(run, Goals(budget_hours=1.0, deadline_unix_s=end + DAY_S))
    assert "inside the deadline" in both and "over the budget of 1 h" in both


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-0.143, 0.072, "cost not measurable (below 7.2 %)"),
        (-0.05, -0.01, "cost not measurable (below 5.0 %)"),
        (0.001, 0.007, "cost 0.4 % of a step (0.1 to 0.7)"),
    ],
)
def test_no_cost_is_below_zero(low: float, high: float, expected: str) -> None:
    cost = replace(COST, overhead_frac=min(0.004, high), low_frac=low, high_frac=high)
    assert checked_line(measured(cost), None) == f"checked: hooks 214 of 214, {expected}"


@pytest.mark.slow
@pytest.mark.parametrize("cost_s", [0.0, 60.0, 1e5, 1e9])
@pytest.mark.parametrize("remaining_s", [1.0, 100.0, 1e6])
def test_no_saving_is_below_zero_whatever_a_restart_costs(
    run: Forecast, faster: Plan, cost_s: float, remaining_s: float
) -> None:
    near = replace(
        run,
        **dict.fromkeys(("remaining_low_s", "remaining_s", "remaining_high_s"), remaining_s),
        remaining_time=RemainingTime.normal(remaining_s, 0.0),
    )
    decision = decide(Goals(restart_cost_s=cost_s), forecast=near, plan=faster)
    line = faster_line(faster, decision)
    assert not re.search(r"-\d", line.replace(layout_words(faster.candidates[0].config), ""))
    (numbers,) = (r.numbers for r in decision.reasons if r.rule is Rule.RESTART)
    assert numbers["saved_s"] >= 0 and numbers["restart_cost_s"] == cost_s
    assert numbers["net_s"] == numbers["saved_s"] - cost_s
    assert ("less" if numbers["net_s"] >= 0 else "but a restart costs") in line


def test_what_only_the_code_can_set_is_said_with_its_gain(faster: Plan, run: Forecast) -> None:
    loop = replace(faster.running.config, framework="PyTorch 2.13.0")
    best = faster.candidates[0]
    other = replace(best, config=replace(best.config, framework="PyTorch 2.13.0"))
    plan = replace(faster, running=replace(faster.running, config=loop), candidates=(other,))
    assert plan.best is None and plan.by_code is other
    line = faster_line(plan, None)
    assert line.startswith(f"faster by a change of the code: {layout_words(other.config)}")
    assert other.change_text in line and "no option of PyTorch sets it" in line
    decision = decide(Goals(), forecast=run, plan=plan)
    assert "faster layouts need a change of the code" in [r.text for r in decision.reasons]
    unsure = replace(other, ratio=Estimate(median=0.89, unshared_sigma_log=0.12))
    assert replace(plan, candidates=(unsure,)).by_code is None


def test_where_nothing_is_faster_the_nearest_is_named_with_its_obstacle(faster: Plan) -> None:
    ratio = Estimate(median=1.03, unshared_sigma_log=0.01)
    slower = replace(faster.candidates[0], ratio=ratio)
    line = faster_line(replace(faster, candidates=(slower,)), None)
    assert line.startswith("faster: nothing to offer among ")
    assert line.endswith(f"nearest is {layout_words(slower.config)} (+3.0 %): it is not faster")
    none = faster_line(replace(faster, candidates=(), tried={}), None)
    assert none == "faster: nothing to offer among 0 layouts"


def test_a_stop_for_a_limit_says_which_and_how_sure(run: Forecast, faster: Plan) -> None:
    goals = Goals(restart_cost_s=1e9, deadline_unix_s=run.now_unix_s + 60.0)
    met = decide(goals, forecast=run, plan=faster).rules_met
    decision = decide(goals, forecast=run, plan=faster, previously_met=met)
    assert decision_line(decision, faster).startswith(
        "decision: stop (100 % chance that the run ends after its deadline, threshold 90 %)"
    )


def test_without_an_end_nothing_is_said_of_it(run: Forecast, faster: Plan) -> None:
    end = run_end(LoopRecord(), run.steps_done)
    decision = undecided(end, Goals(), now_unix_s=run.now_unix_s)
    assert "its saving depends on the end" in faster_line(faster, decision, has_end=False)
    line = decision_line(decision, faster)
    assert line == f"decision: none yet (end of the run not known: {end.reason})"


def test_a_device_without_a_data_sheet_says_why_there_is_no_mfu(layout: Layout) -> None:
    config = replace(layout(), device="Accelerator 9")
    line = run_line(config, 1, 1.0, replace(RATE, mfu_frac=None))
    assert line.endswith("71,200 tokens/s · no MFU: the peak of Accelerator 9 is not known")


GPT3: dict[str, Any] = {
    "num_layers": 96, "hidden_size": 12288, "ffn_hidden_size": 49152, "num_attention_heads": 96,
    "num_query_groups": 96, "kv_channels": 128, "seq_length": 2048, "vocab_size": 51200,
    "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA2_7B: dict[str, Any] = {
    "num_layers": 32, "hidden_size": 4096, "ffn_hidden_size": 11008, "num_attention_heads": 32,
    "num_query_groups": 32, "kv_channels": 128, "seq_length": 4096, "vocab_size": 32000,
    "is_gated": True, "has_bias": False, "is_tied": False, "normalization": Normalization.RMS_NORM,
    "position_embedding": PositionEmbedding.ROPE,
}  # fmt: skip
MIXTRAL: dict[str, Any] = {
    **LLAMA2_7B, "ffn_hidden_size": 14336, "num_query_groups": 8,
    "experts": Experts(num_experts=8, top_k=2, ffn_hidden_size=14336),
}  # fmt: skip


@pytest.mark.parametrize(
    ("sizes", "name"),
    # As their papers have them: 175B; 6.74B; 46.7B with 12.9B active.
    [(GPT3, "GPT 175B"), (LLAMA2_7B, "GPT 6.7B"), (MIXTRAL, "MoE 47B (13B active)")],
)
def test_a_model_is_called_what_its_paper_calls_it(
    sizes: dict[str, Any], name: str, layout: Layout
) -> None:
    config = replace(layout(), model=ModelShape(**sizes))
    assert model_name(config) == name


def test_a_layout_is_spelled_out(planned: Planned) -> None:
    candidates: tuple[Candidate, ...] = planned(num_ranks=(2, 8, 16)).candidates
    for one in candidates:
        words = layout_words(one.config)
        assert f"micro-batch {one.config.batch.micro_batch_size}" in words
        assert not re.search(r"mbs|noOverlap|gradOverlap|noP2P|offload:", words), words


def test_a_run_whose_layout_is_not_known_says_so_and_what_to_do() -> None:
    table = build_table(read_run(GOLDEN))
    runs = table.runs.assign(config="", loop=json.dumps(encode_fields(LoopRecord(num_steps=20))))
    goals = Goals(budget_hours=100.0)
    request = Request(now_unix_s=float(table.runs["started_unix_s"].min()) + 5.0, goals=goals)
    run, end, *_, others, checked = analyse(replace(table, runs=runs), request).transcript
    assert run.startswith("[forerun] 2 x CPU · step 0.")
    assert end.startswith("[forerun] ends ") and end.endswith("inside the budget of 100 h")
    assert "not compared" in others and "forerun.attach" in others
    assert checked.startswith("[forerun] checked: hooks ")
    silent = replace(table, runs=table.runs.assign(config=""))
    (_, unknown, *_) = analyse(silent, request).transcript
    assert unknown.startswith("[forerun] end of the run not known: ") and "train_iters" in unknown

"""Runs whose layout nobody knows: their end by arithmetic, or the reason why there is none."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from undescribed_runs import GOLDEN, undescribed

from forerun.calib.advice.decision import Action, Rule
from forerun.calib.answers.analysis import analyse, finish_lines, with_new_forecast
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.answers.run_measurements import Measurements
from forerun.calib.records.record_kinds import (
    CollectiveRecord,
    DataLength,
    LoopRecord,
    StepRecord,
)
from forerun.calib.records.run_values import RUN_VALUES
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table
from forerun.calib.workload.config import Cadence
from forerun.calib.workload.config_json import encode_fields
from forerun.calib.workload.run_options import Goals

NOW_S, STEP_S, DONE, TOTAL = 1795187030.0, 0.1, 40, 100
LOOP = LoopRecord(num_steps=TOTAL, samples=8, tokens=256)
PASS = LoopRecord(data=DataLength.KNOWN, pass_end=50, pass_steps=50)


def table_of(directory: Path, loop: LoopRecord | None) -> SampleTable:
    return build_table(read_run(undescribed(directory, loop)))


def request(**more: Any) -> Request:
    return Request(now_unix_s=NOW_S, last_step=DONE, step_times_s=(STEP_S,) * DONE, **more)


def answer(directory: Path, loop: LoopRecord | None, **more: Any) -> Answer:
    return analyse(table_of(directory, loop), request(**more))


def test_the_finish_is_what_is_left_of_steps_times_a_step(tmp_path: Path) -> None:
    forecast = answer(tmp_path, LOOP).forecast
    assert forecast.finish_p50_unix_s == pytest.approx(NOW_S + (TOTAL - DONE) * STEP_S)
    assert forecast.finish_p95_unix_s > forecast.finish_p50_unix_s


def test_evaluations_and_saves_go_on_as_often_as_so_far(tmp_path: Path) -> None:
    forecast = answer(tmp_path, LOOP, eval_times_s=(0.5,) * 4, save_times_s=(2.0,) * 2).forecast
    extra_s = 6 * 0.5 + 3 * 2.0  # of 60 steps, where 40 had 4 and 2
    assert forecast.remaining_s == pytest.approx((TOTAL - DONE) * STEP_S + extra_s)
    assert {part.name: part.num_left for part in forecast.breakdown} == {
        "steps": 60,
        "evaluations": 6,
        "saves": 3,
    }


@pytest.mark.parametrize("loop", [LOOP, LoopRecord(num_steps=TOTAL, samples=8)])
def test_every_rate_that_is_logged_says_what_it_is(tmp_path: Path, loop: LoopRecord) -> None:
    rates = answer(tmp_path, loop).rates
    assert len(rates) == 2 and rates.keys() <= RUN_VALUES.keys()


def test_the_end_of_a_pass_is_never_that_of_the_run(tmp_path: Path) -> None:
    result = answer(tmp_path, PASS)
    assert not result.has_finish and "how many passes over its data" in result.end.reason
    values = result.forecast_json()
    assert not {"finish_p50_unix_s", "steps_left", "remaining_s"} & values.keys()
    part = values["pass"]
    assert isinstance(part, dict) and part["end_step"] == 50
    assert part["finish_p50_unix_s"] == pytest.approx(NOW_S + 10 * STEP_S)
    text = "\n".join(result.transcript)
    assert "this pass over the data ends" in text and "[forerun] ends " not in text
    assert "--calibrate-total-steps=N" in text


@pytest.mark.slow
@pytest.mark.parametrize("loop", [None, LoopRecord(data=DataLength.NONE), LoopRecord(samples=3)])
def test_a_run_without_any_end_has_reason_and_remedy(
    tmp_path: Path, loop: LoopRecord | None
) -> None:
    result = answer(tmp_path, loop)
    assert not result.has_finish and "pass" not in result.forecast_json()
    assert "--calibrate-total-steps=N" in result.end.reason
    assert result.end.reason in "\n".join(result.transcript)
    assert result.decision.action is Action.ABSTAIN


def test_rates_are_of_all_ranks(tmp_path: Path) -> None:
    table = table_of(tmp_path, LOOP)
    answer = analyse(table, request())
    each = 256 / answer.measured.step_s
    assert answer.rates == {"tokens_per_s": 2 * each, "tokens_per_s_per_gpu": each}
    assert answer.rates_of(2.0) == {"tokens_per_s": 256.0, "tokens_per_s_per_gpu": 128.0}


@pytest.mark.slow
def test_steps_that_only_the_loop_tells_end_a_described_run(tmp_path: Path) -> None:
    """As they end one whose layout nobody knows."""
    table = build_table(read_run(GOLDEN))
    bare = replace(table.config(), cadence=Cadence())
    runs = table.runs.assign(
        config=json.dumps(bare.to_json()), loop=json.dumps(encode_fields(LOOP))
    )
    result = analyse(replace(table, runs=runs), request())
    assert result.end.steps_total == TOTAL and result.remaining_run is not None
    assert result.forecast.steps_left == TOTAL - DONE
    plain = answer(tmp_path, LOOP).forecast
    assert result.forecast.finish_p50_unix_s == pytest.approx(plain.finish_p50_unix_s)


def test_samples_count_where_there_are_no_tokens(tmp_path: Path) -> None:
    result = answer(tmp_path, LoopRecord(samples=8))
    assert result.rates_of(2.0) == {"samples_per_s": 8.0, "samples_per_s_per_gpu": 4.0}


def test_a_later_moment_goes_on_from_the_window(tmp_path: Path) -> None:
    later = Request(now_unix_s=NOW_S + 3.0, last_step=70, step_times_s=(STEP_S,) * 70)
    result = with_new_forecast(answer(tmp_path, LOOP), later)
    assert result.has_finish
    assert result.forecast.finish_p50_unix_s == pytest.approx(NOW_S + 3.0 + 30 * STEP_S)
    (line,) = finish_lines(result, Goals())
    assert line.startswith("[forerun] ends ")


def test_a_deadline_that_is_missed_twice_stops_any_loop(tmp_path: Path) -> None:
    goals = Goals(deadline_unix_s=NOW_S)
    first = answer(tmp_path / "a", LOOP, goals=goals)
    assert first.decision.rules_met == {Rule.DEADLINE} and not first.is_stop
    met = (Rule.DEADLINE.value,)
    assert answer(tmp_path / "b", LOOP, goals=goals, previously_met=met).is_stop


def test_calls_of_a_group_are_those_that_a_rank_makes_in_a_step(tmp_path: Path) -> None:
    directory = undescribed(tmp_path, LOOP)
    records = read_run(directory).records[0]
    hooked = {r.step for r in records if isinstance(r, StepRecord) and r.is_hooked}
    calls = Counter(
        (r.role.value, r.collective.value) for r in records if isinstance(r, CollectiveRecord)
    )
    groups = analyse(build_table(read_run(directory)), request()).measured.groups
    assert groups
    for group in groups:
        made = calls[group.role, group.collective] / len(hooked)
        assert group.calls == pytest.approx(made)


def test_a_bound_above_the_step_is_no_time_of_transfers(tmp_path: Path) -> None:
    result = answer(tmp_path, LOOP)
    group = result.measured.groups[0]
    assert group.line(result.measured.step_s) in "\n".join(result.transcript)
    for time_s, words in ((8.1, "whose end is not recorded"), (STEP_S / 2, "at most")):
        text = replace(group, is_bound=True, time_s=time_s).line(STEP_S)
        assert words in text and "8.1" not in text


def test_calls_whose_size_changes_are_counted_once() -> None:
    """Two exchanges a step of each of two ranks, in four steps: each size is seen once."""
    sizes = [(rank, step, call) for rank in range(2) for step in range(4) for call in range(2)]
    common = {"run_id": "r", "is_probe": False, "window": 0, "role": "ep", "kind": "all_to_all"}
    common |= {"num_ranks": 2, "time_s": 0.1, "is_bound": False, "row": "collective"}
    rows = [
        {**common, "nbytes": 8 * number, "count": 1, "num_steps": 1, "num_seen": 1}
        for number, _ in enumerate(sizes)
    ]
    fixed = {**common, "kind": "all_reduce", "nbytes": 8, "count": 4, "num_steps": 4, "num_seen": 2}
    even = {**fixed, "kind": "all_to_all", "nbytes": 1}  # of a size that is the same for both
    samples = pd.DataFrame([*rows, fixed, even])
    table: Any = SimpleNamespace(newest=lambda name: samples, loop=LoopRecord)
    calls = {group.collective: group.calls for group in Measurements(table=table).groups}
    assert calls == pytest.approx({"all_to_all": 3.0, "all_reduce": 1.0})


def test_groups_are_those_that_were_seen_and_those_that_are_only_known(tmp_path: Path) -> None:
    loop = LoopRecord(num_replicas=2, grad_nbytes=4096)
    table = table_of(tmp_path, loop)
    seen = {(group.role, group.num_ranks) for group in analyse(table, request()).measured.groups}
    rows = table.collectives
    assert seen == set(zip(rows["role"], rows["num_ranks"], strict=True))
    bare = SampleTable(
        **{name: getattr(table, name) for name in table.__slots__}
        | {"samples": table.samples[table.samples["row"] != "collective"]}
    )
    (known,) = analyse(bare, request()).measured.groups
    assert (known.role, known.num_ranks, known.calls) == ("dp", 2, 0.0)
    assert "4.0 KiB" in known.note and "TORCH_FR_BUFFER_SIZE" in known.note

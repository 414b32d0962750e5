"""How the error moved, window by window: one fit each, and the same as when all is fitted again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.history import MOST_WINDOWS, History, Models
from forerun.calib.answers.request import Request
from forerun.calib.forecast.evaluation import Ended
from forerun.calib.samples.columns import FRAMES
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table, only_windows

TRAIN_ITERS = 4000
GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"


@pytest.fixture(scope="module")
def table() -> SampleTable:
    """Three windows, each a tenth slower than the one before it."""
    first = build_table(read_run(GOLDEN))
    parts = []
    for window in range(3):
        frames = {}
        for name in FRAMES:
            frame = getattr(first, name).copy()
            if "window" in frame:
                frame["window"] = window
            if "step" in frame:
                frame["step"] += 100 * window
            for column in set(frame) & {"time_s", "duration_s"}:
                frame[column] *= 1.1**window
            frames[name] = frame
        parts.append(SampleTable(**frames))
    return SampleTable.concat(parts)


@pytest.mark.slow
def test_each_window_is_held_against_the_models_before_and_after_it(table: SampleTable) -> None:
    history = History.of(table)
    assert [error.window for error in history.errors] == [0, 1, 2]
    for place, error in enumerate(history.errors):
        after = Models.of(only_windows(table, range(place + 1)))
        assert error.after_frac == pytest.approx(after.step_error_frac(error.measured_s))
        if place:
            before = Models.of(only_windows(table, range(place)))
            assert error.before_frac == pytest.approx(before.step_error_frac(error.measured_s))
            assert error.before_frac < error.after_frac < 0
        else:
            assert error.before_frac is None


@pytest.mark.slow
def test_answers_one_after_the_other_keep_what_was_said(table: SampleTable) -> None:
    history = None
    for end in (1, 2, 2, 3):
        seen = only_windows(table, range(end))
        answer = analyse(seen, Request(now_unix_s=1e9, last_step=11), history=history)
        history = answer.known.history
    whole = History.of(table)
    assert [e.window for e in history.errors] == [0, 1, 2]
    for known, recomputed in zip(history.errors, whole.errors, strict=True):
        for name in ("after_frac", "operator_before_frac", "operator_after_frac"):
            assert getattr(known, name) == pytest.approx(getattr(recomputed, name)), name


def test_the_finish_before_a_refit_is_what_the_window_before_says_at_that_moment(
    table: SampleTable,
) -> None:
    """Steps to come take the level of the steps that were known: a plain product."""
    history, level_s, finishes_unix_s = None, (0.5, 0.6, 0.8), []
    cadence = table.config().cadence
    for end, time_s in enumerate(level_s, start=1):
        seen = only_windows(table, range(end))
        done = 100 * end
        request = Request(now_unix_s=1e9 + done, last_step=done, step_times_s=(time_s,) * 50)
        answer = analyse(_long(seen), request, history=history)
        history = answer.known.history
        finishes_unix_s.append(answer.forecast.finish_p50_unix_s)
    assert cadence.train_iters < TRAIN_ITERS
    assert [e.finish_after_unix_s for e in history.errors] == pytest.approx(
        finishes_unix_s, abs=1e-6
    )
    assert history.errors[0].finish_before_unix_s is None
    for place in (1, 2):
        error, done = history.errors[place], 100 * (place + 1)
        num_remaining = TRAIN_ITERS - done
        before_s, after_s = (
            at - (1e9 + done) for at in (error.finish_before_unix_s, error.finish_after_unix_s)
        )
        assert before_s == pytest.approx(num_remaining * level_s[place - 1], rel=0.01)
        assert after_s == pytest.approx(num_remaining * level_s[place], rel=0.01)
    last = answer.window_scores[-1]
    assert last.finish_after_frac == pytest.approx(0.0) and last.finish_before_frac < 0
    at_end = {"last_step_unix_s": 1e9 + 5000.0, "end_unix_s": 1e9 + 5000.0}
    end = Ended(run_id="r", iteration=TRAIN_ITERS, steps_total=TRAIN_ITERS, **at_end)
    ended = replace(answer, ended=end).window_scores[-1]
    total_s = 1e9 + 5000.0 - answer.forecast.now_unix_s + answer.forecast.elapsed_s
    assert ended.finish_after_frac == pytest.approx((finishes_unix_s[-1] - 1e9 - 5000.0) / total_s)


def _long(table: SampleTable) -> SampleTable:
    """The run with thousands of steps to come."""
    configs = [json.loads(text) for text in table.runs["config"]]
    for config in configs:
        config["cadence"]["train_iters"] = TRAIN_ITERS
    return replace(table, runs=table.runs.assign(config=[json.dumps(one) for one in configs]))


@pytest.mark.slow
def test_the_errors_of_a_run_without_end_are_bounded(table: SampleTable) -> None:
    one = only_windows(table, [0])
    models = Models.of(one)
    history = History()
    for window in range(MOST_WINDOWS + 3):
        moved = {
            name: getattr(one, name).assign(window=window)
            for name in ("samples", "steps", "skew", "phases")
        }
        history = history.followed_by(replace(one, **moved), models)
    assert len(history.errors) == MOST_WINDOWS
    assert history.errors[-1].window == MOST_WINDOWS + 2
    assert json.dumps(history.errors[-1].window)


@pytest.mark.slow
def test_frames_without_rows_change_nothing(table: SampleTable) -> None:
    empty = replace(table, traced=pd.DataFrame(columns=list(FRAMES["traced"])))
    assert History.of(empty).errors == History.of(table).errors

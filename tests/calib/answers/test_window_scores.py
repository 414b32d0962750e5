"""Errors of the next step and of the finish, from figures that were planted."""

from __future__ import annotations

from typing import Any

import pytest

from forerun.calib.answers.history import WindowError, window_scores

BEGIN, END = 1000.0, 2000.0
MEASURED = (1.0, 2.0, 4.0)
MODELLED = ((None, 1.1), (1.1, 1.5), (1.5, 3.0))
FINISHES = ((None, 1500.0), (1600.0, 2100.0), (2050.0, 1990.0))


def error(window: int) -> WindowError:
    before, after = MODELLED[window]
    return WindowError(
        window=10 * window,
        num_rows=5,
        measured_s=MEASURED[window],
        before_frac=None if before is None else before / MEASURED[window] - 1,
        after_frac=after / MEASURED[window] - 1,
        operator_before_frac=None,
        operator_after_frac=0.0,
        modelled_before_s=before,
        modelled_after_s=after,
        finish_before_unix_s=FINISHES[window][0],
        finish_after_unix_s=FINISHES[window][1],
    )


def rows(**finish: Any) -> list[dict[str, Any]]:
    settings = {"started_unix_s": BEGIN, "finish_unix_s": END} | finish
    return [one.to_json() for one in window_scores([error(k) for k in range(3)], **settings)]


def test_the_next_windows_step_is_held_against_the_models_of_both_sides_of_a_refit() -> None:
    results = [(row["next_before_frac"], row["next_after_frac"]) for row in rows()]
    assert results[0] == (None, pytest.approx(1.1 / 2.0 - 1))
    assert results[1] == (pytest.approx(1.1 / 4.0 - 1), pytest.approx(1.5 / 4.0 - 1))
    assert results[2] == (None, None)
    for row, following in zip(rows(), rows()[1:], strict=False):
        assert row["next_after_frac"] == pytest.approx(following["before_frac"])


def test_a_finish_is_too_late_by_a_share_of_the_whole_run() -> None:
    results = [(row["finish_before_frac"], row["finish_after_frac"]) for row in rows()]
    assert results == [(None, pytest.approx(-0.5)), (pytest.approx(-0.4), pytest.approx(0.1)),
                     (pytest.approx(0.05), pytest.approx(-0.01))]  # fmt: skip


def test_a_run_that_took_no_time_has_no_share() -> None:
    assert {row["finish_after_frac"] for row in rows(finish_unix_s=BEGIN)} == {None}
    assert window_scores([], started_unix_s=BEGIN, finish_unix_s=END) == []

"""How the error of the modelled step moved from the first window to the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.calib.answers.analysis import analyse
from forerun.calib.answers.answer import Answer
from forerun.calib.answers.request import Request
from forerun.calib.samples.columns import FRAMES
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import SampleTable, build_table, only_windows
from forerun.launch.views.answer_tables import MODEL_ERROR, notes_of

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
REQUEST = Request(now_unix_s=1e9, last_step=11)


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


@pytest.fixture(scope="module")
def alone(table: SampleTable) -> Answer:
    return analyse(only_windows(table, [0]), REQUEST)


def error_frac(answer: Answer) -> float:
    return answer.known.step.time_s / answer.measured.step_s - 1


def test_one_window_has_one_error_and_no_line(alone: Answer) -> None:
    assert alone.known.first_error_frac == pytest.approx(error_frac(alone))
    assert not any(note.startswith(MODEL_ERROR) for note in notes_of(alone))


def test_records_of_three_windows_give_what_the_first_answer_said(
    table: SampleTable, alone: Answer
) -> None:
    whole = analyse(table, REQUEST)
    first_frac = alone.known.first_error_frac
    assert whole.known.first_error_frac == pytest.approx(first_frac)
    assert first_frac is not None and error_frac(whole) < first_frac
    (line,) = [note for note in notes_of(whole) if note.startswith(MODEL_ERROR)]
    assert f"{100 * abs(first_frac):.1f} % of the step after the first window" in line
    assert f"{100 * abs(error_frac(whole)):.1f} % after the newest" in line
    live = analyse(only_windows(table, [2]), REQUEST, first_error_frac=first_frac)
    assert live.known.first_error_frac == first_frac
    values = whole.to_json()["calibration"]
    assert values["first_error_frac"] == pytest.approx(first_frac)
    assert values["error_frac"] == pytest.approx(error_frac(whole))

"""Public launches that answers are held against: each is a run with a source, and counts add up."""

from __future__ import annotations

import shlex
from collections import Counter

import pytest

from forerun.benchmarks.first_answers.score import Answer, Launch, read_launches, summary
from forerun.calib.arguments.megatron_command import config_from_command
from forerun.calib.memory.devices import known_device

LAUNCHES = read_launches()
GIVEN = 3
"""Launches that came with the cases; the others were looked for."""


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda one: one["name"])
def test_a_launch_is_a_run_on_a_known_device(launch: Launch) -> None:
    description = config_from_command(shlex.split(launch["command"]))
    layout = description.config.parallelism
    ranks = layout.dp * layout.tp * layout.pp * layout.cp
    assert ranks == int(launch["name"].rpartition("-")[2].partition("x")[0])
    assert description.unknown == () and description.notes == ()
    assert known_device(launch["device"]).memory_nbytes


@pytest.mark.parametrize("launch", LAUNCHES, ids=lambda one: one["name"])
def test_a_launch_has_a_source_and_a_measured_step(launch: Launch) -> None:
    assert "/" in launch["source"].split()[0] and "://" not in launch["source"]
    assert launch["measured_step_s"] > 0 and launch["from"] and all(launch["assumed"])
    assert launch["memory_verdict"] in ("fits", "does not fit", None)


def test_no_repository_gives_more_than_three_of_those_looked_for() -> None:
    counts = Counter(launch["source"].split()[0] for launch in LAUNCHES[GIVEN:])
    assert len(LAUNCHES) == GIVEN + counts.total() == 21
    assert max(counts.values()) == 3 and len(counts) == 10


def make_answer(step_s: float, verdict: str) -> Answer:
    return {"step_time_s": step_s, "low_s": step_s / 2, "high_s": step_s * 2, "verdict": verdict}


def test_what_held_is_counted() -> None:
    measured_s = LAUNCHES[0]["measured_step_s"]
    answers = [make_answer(1.2 * measured_s, "fits"), make_answer(4 * measured_s, "tight")]
    refused = (LAUNCHES[1], {"refusal": "an option is not modelled"})
    assert summary([*((LAUNCHES[0], one) for one in answers), refused]).splitlines() == [
        "median absolute error: 160.0 %",
        "held: 1 of 2",
        "half-width: largest 75 %, median 75 %",
        "memory verdicts right: 1 of 2",
        "1 refused",
    ]

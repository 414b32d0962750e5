"""The host's number of steps wins over the user's, and that is said once."""

from __future__ import annotations

from pathlib import Path

import pytest

from forerun.hooks.process.settings import CadenceHint, RankInfo, Settings
from forerun.hooks.session.session import RunLength


def settings(total_steps: int | None, hint: int | None = None, rank: int = 0) -> Settings:
    place = RankInfo(rank=rank, world_size=2, local_rank=rank, local_world_size=2, run_id="run")
    cadence = CadenceHint(train_iters=hint)
    return Settings(rank=place, total_steps=total_steps, cadence=cadence, directory=Path("out"))


@pytest.mark.parametrize(
    ("requested", "hint", "reported", "steps", "num_lines"),
    [
        (None, None, 0, 0, 0),
        (500, None, 0, 500, 0),
        (500, None, 500, 500, 0),
        (500, None, 80, 80, 1),
        (500, 70, 0, 70, 1),
        (None, 70, 80, 80, 0),
    ],
)
def test_who_is_heard(
    requested: int | None,
    hint: int | None,
    reported: int,
    steps: int,
    num_lines: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    length = RunLength(settings(requested, hint))
    assert [length.steps(reported), length.steps(reported)] == [steps, steps]
    assert len(caplog.records) == num_lines
    assert all("--calibrate-total-steps=500" in line for line in caplog.messages)


def test_one_rank_says_it(caplog: pytest.LogCaptureFixture) -> None:
    assert RunLength(settings(500, rank=1)).steps(80) == 80
    assert not caplog.records

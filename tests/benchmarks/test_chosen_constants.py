"""Numbers that somebody chose are counted: a new one replaces another, or says what it is worth."""

from __future__ import annotations

from pathlib import Path

from forerun import calib
from forerun.benchmarks.scoring.chosen_constants import chosen, not_chosen, numbers

CALIB = Path(calib.__path__[0])
MOST = 145
"""As many as there were when each was last scored (benchmarks/RESULTS.md)."""


def test_no_number_is_chosen_beside_those_that_were_scored() -> None:
    assert len(chosen(CALIB)) <= MOST


def test_what_is_listed_with_its_source_is_there_once() -> None:
    listed = list(not_chosen())
    assert len(listed) == len(set(listed))
    assert set(listed) <= set(numbers(CALIB))

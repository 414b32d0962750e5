"""Each verb answers on recorded runs as it did, and refuses: JSON, text on 80 columns, exit code.

``benchmarks/golden_answers.py --write`` stores new answers; review them before they are committed.
"""

from __future__ import annotations

import pytest

from forerun.benchmarks.golden_answers import (
    LINES,
    QUESTIONS,
    answer_differences,
    ask,
    line_answers,
)


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.usefixtures("golden_home")
def test_a_verb_answers_as_it_did(name: str) -> None:
    assert not answer_differences(name, ask(QUESTIONS[name]))


@pytest.mark.parametrize("name", LINES)
@pytest.mark.usefixtures("golden_home")
def test_lines_are_answered_or_refused_as_they_were(name: str) -> None:
    assert not answer_differences(f"lines_{name}", line_answers(name))

"""Each verb answers on recorded runs as it did, and refuses: JSON, text on 80 columns, exit code.

``benchmarks/golden_answers.py --write`` stores new answers; review them before they are committed.
"""

from __future__ import annotations

import pytest

from forerun.benchmarks.golden_answers import (
    QUESTIONS,
    REFUSED,
    answer_differences,
    ask,
    refusals,
)


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.usefixtures("golden_home")
def test_a_verb_answers_as_it_did(name: str) -> None:
    assert not answer_differences(name, ask(QUESTIONS[name]))


@pytest.mark.parametrize("verb", REFUSED)
@pytest.mark.usefixtures("golden_home")
def test_a_verb_refuses_as_it_did(verb: str) -> None:
    assert not answer_differences(f"refused_{verb}", refusals(verb))

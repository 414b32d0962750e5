"""Each verb answers on recorded runs as it did: JSON, text on 80 columns, exit code.

``benchmarks/golden_answers.py --write`` stores new answers; review them before they are committed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.benchmarks.golden_answers import (
    QUESTIONS,
    answer_differences,
    ask,
    at_home,
    make_directories,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("golden")
    with at_home(directory):
        make_directories(directory)
        yield directory


@pytest.mark.parametrize("name", QUESTIONS)
@pytest.mark.usefixtures("home")
def test_a_verb_answers_as_it_did(name: str) -> None:
    assert not answer_differences(name, ask(QUESTIONS[name]))

"""A companion that is told of a recorded run again logs, sends and writes what it did.

Rows, tables, alerts and summary are those that a W&B run gets; the page is ``report.html`` as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.benchmarks.golden_answers import (
    REPLAYED,
    answer_differences,
    at_home,
    make_directories,
    replay,
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("golden")
    with at_home(directory):
        make_directories(directory)
        yield directory


@pytest.mark.parametrize("name", REPLAYED)
@pytest.mark.usefixtures("home")
def test_a_companion_answers_as_it_did(name: str) -> None:
    assert not answer_differences(f"replay_{name}", replay(name))

"""Recorded runs side by side, in which golden answers are asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from forerun.benchmarks.golden_answers import at_home, make_directories


@pytest.fixture(scope="module")
def golden_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("golden")
    with at_home(directory):
        make_directories(directory)
        yield directory

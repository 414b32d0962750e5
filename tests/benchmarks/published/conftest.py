"""A few rows of every family of published tables."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pandas as pd
import pytest

from forerun.benchmarks.published.readers import read_published

GOLDEN = Path(__file__).parents[2] / "golden" / "published"
TABLES = sorted(path.stem for path in GOLDEN.glob("*.csv"))


@cache
def golden_table(name: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Published and canonical rows, read once for all tests, none of which changes them."""
    frame = pd.read_csv(GOLDEN / f"{name}.csv")
    return frame, read_published(frame, name)


@pytest.fixture(params=TABLES)
def name(request: pytest.FixtureRequest) -> str:
    """Each table in turn."""
    return request.param


@pytest.fixture
def frame(name: str) -> pd.DataFrame:
    """Its published rows."""
    return golden_table(name)[0].copy()


@pytest.fixture
def table(name: str) -> pd.DataFrame:
    """Canonical rows of one table."""
    return golden_table(name)[1]


@pytest.fixture
def golden() -> Callable[[str], tuple[pd.DataFrame, pd.DataFrame]]:
    """Published and canonical rows of one table."""
    return golden_table

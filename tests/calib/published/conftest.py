"""A few rows of every family of published tables."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from forerun.calib.published.readers import PublishedTable, read_published

GOLDEN = Path(__file__).parents[2] / "golden" / "published"
TABLES = sorted(path.stem for path in GOLDEN.glob("*.csv"))


def golden_frame(name: str) -> pd.DataFrame:
    """The published rows as they are."""
    return pd.read_csv(GOLDEN / f"{name}.csv")


@pytest.fixture(params=TABLES)
def frame(request: pytest.FixtureRequest) -> pd.DataFrame:
    """Each table in turn."""
    return golden_frame(request.param)


@pytest.fixture
def golden() -> Callable[[str], tuple[pd.DataFrame, PublishedTable]]:
    """Published and canonical rows of one table."""

    def read(name: str) -> tuple[pd.DataFrame, PublishedTable]:
        frame = golden_frame(name)
        return frame, read_published(frame, name)

    return read

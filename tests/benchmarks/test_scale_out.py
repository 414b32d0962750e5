"""Efficiency at larger numbers of GPUs: against published scale-out, and planted series."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from forerun.benchmarks.protocols.steps import series
from forerun.benchmarks.published.readers import steps_of
from forerun.benchmarks.scale_out import ScaleOutRow, series_rows

pytestmark = pytest.mark.slow

PUBLISHED = Path(__file__).parents[2] / "recipes" / "published"
MOST_ERROR_FRAC = 0.015
"""Perfect scaling is 1.4 % off in the median over the DGX Cloud tables."""


@pytest.fixture(scope="module")
def scale_out_rows() -> list[ScaleOutRow]:
    """Llama 3.1 70B on 64 to 2,048 H100 (DGX Cloud benchmarks)."""
    rows = steps_of(PUBLISHED, "steps_dgxc_scaling").rows
    results = []
    for label, positions in series(rows, 4).items():
        if "llama3-70b" in label:
            results += series_rows("dgxc", label, [rows[position] for position in positions])
    return results


def test_published_series_keep_the_efficiency_that_their_smallest_size_tells(
    scale_out_rows: list[ScaleOutRow],
) -> None:
    assert len(scale_out_rows) >= 10
    assert max(one.num_ranks for one in scale_out_rows) == 2048
    errors = [abs(one.error_frac) for one in scale_out_rows]
    assert median(errors) < MOST_ERROR_FRAC
    assert sum(one.is_covered for one in scale_out_rows) >= 0.9 * len(scale_out_rows)


def test_a_series_that_loses_efficiency_is_told_by_its_measured_steps() -> None:
    rows = steps_of(PUBLISHED, "steps_dgxc_scaling").rows
    label, positions = next(
        (label, results) for label, results in series(rows, 4).items() if "llama3-70b" in label
    )
    slower = [
        replace(rows[i], measured_s=rows[i].measured_s * (rows[i].num_ranks / 64) ** 0.1)
        for i in positions
    ]
    plain = list(series_rows("dgxc", label, [rows[i] for i in positions]))
    for one, other in zip(plain, series_rows("dgxc", label, slower), strict=True):
        planted = one.measured_frac / (one.num_ranks / 64) ** 0.1
        assert other.measured_frac == pytest.approx(planted)
        # Larger sizes are not looked at.
        assert other.predicted_frac == pytest.approx(one.predicted_frac)

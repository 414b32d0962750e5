"""Removals: planted changes of sources are summed as they were planted, and judged by the sum."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.benchmarks.carried import LINES
from forerun.benchmarks.generalise import SOURCES
from forerun.benchmarks.removals import (
    ScoredRow,
    changes,
    comparison_text,
    mean_over_sources,
    parts,
    scored,
)


def state(error: float = 10.0, covered: float = 1.0, num_rows: int = 12):
    return {
        part.name: {
            f"row {place}": ScoredRow(
                unit=f"series {place % 4}", error=error, coverage_frac=covered, half_width=20.0
            )
            for place in range(num_rows)
        }
        for part in parts()
    }


def moved(before, sources, **by):
    """The state with figures of all rows of some sources changed."""
    names = {part.name for part in parts() if part.source in sources}
    return {
        part: {
            row: replace(one, **{key: getattr(one, key) + step for key, step in by.items()})
            for row, one in rows.items()
        }
        if part in names
        else rows
        for part, rows in before.items()
    }


def test_each_part_has_a_name_of_its_own_and_each_source_a_part():
    names = [part.name for part in parts()]
    assert len({*names}) == len(names)
    assert {source.name for source in SOURCES} <= {part.source for part in parts()}
    assert {part.protocol for part in parts() if not part.table} <= {line.name for line in LINES}


@given(points=st.floats(-5.0, 5.0), number=st.integers(1, 6))
def test_the_sum_is_what_was_planted_over_all_sources(points, number):
    sources = list(dict.fromkeys(part.source for part in parts()))
    before = state()
    after = moved(before, sources[:number], error=points)
    mean, low, high = mean_over_sources(changes(before, after))
    expected = points * number / len(sources)
    assert (mean, low, high) == pytest.approx((expected,) * 3, abs=1e-9)


def test_a_small_source_that_loses_much_is_not_hidden_by_large_ones():
    before = state()
    sources = list(dict.fromkeys(part.source for part in parts()))
    after = moved(before, ["huggingface/nanotron"], error=0.4 * len(sources))
    assert "as a removal it goes" in comparison_text(before, after, "without it")
    after = moved(before, ["huggingface/nanotron"], error=0.2 * len(sources))
    assert "as a removal it stays" in comparison_text(before, after, "without it")


@pytest.mark.parametrize(
    ("covered", "lost", "points"), [(1.0, 0.1, 0.0), (0.9, 0.1, 5.0), (0.8, 0.1, 10.0)]
)
def test_each_point_of_coverage_below_85_counts_as_one(covered, lost, points):
    before = state(covered=covered)
    after = moved(before, ["eth-easl/sailor"], coverage_frac=-lost)
    of_sailor = [one for one in changes(before, after) if one.source == "eth-easl/sailor"]
    assert [one.points for one in of_sailor] == pytest.approx([points] * len(of_sailor))


def test_rows_that_one_state_lacks_are_not_compared():
    before = state()
    after = {
        part: {row: one for row, one in rows.items() if row != "row 0"}
        for part, rows in moved(before, ["eth-easl/sailor"], error=1.0).items()
    }
    assert all(sum(count for _, count in one.units) == 11 for one in changes(before, after))


@pytest.mark.nightly
def test_operators_of_a_machine_price_the_parts_that_know_them_alone(tmp_path):
    golden = Path(__file__).parents[1] / "golden"
    profiles = pd.read_csv(golden / "published" / "ops_sailor_layer_profiles.csv")
    known = next(part for part in parts() if part.operators and part.protocol == "calibrate_0")
    errors = []
    for slower in (1, 8):
        data = tmp_path / str(slower)
        data.mkdir()
        pd.read_csv(golden / "steps" / "e2e_sailor.csv").to_csv(data / "e2e_sailor.csv")
        times = {column: slower * profiles[column] for column in ("fwd_s", "bwd_s")}
        profiles.assign(gpu="GH-96", **times).to_csv(data / f"{known.operators[0]}.csv")
        both = [scored(part, data, 1) for part in (known, replace(known, operators=()))]
        errors.append([{name: one.error for name, one in rows.items()} for rows in both])
    (as_is, without), (slowed, still_without) = errors
    assert as_is and without == still_without
    assert all(slowed[name] > 100 > as_is[name] for name in as_is)

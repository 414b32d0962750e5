"""Planted clocks come back within their intervals, from timelines simulated in true time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forerun.calib.records.record_kinds import CollectiveRecord
from forerun.calib.samples._clocks import Moments, aligned_start_s, clock_rows, fit_line
from forerun.calib.samples._transfers import match_ranks
from forerun.calib.samples.store import read_run
from forerun.calib.samples.table import build_table

GOLDEN = Path(__file__).parents[2] / "golden" / "cpu_dp2"
RING = (("a", (0, 1)), ("b", (2, 3)), ("c", (0, 2)))
STEP_S, NUM_STEPS, NUM_CALLS = 1.0, 5, 6
NS_PER_S = 1e9
ROUNDING_S = 2e-6
LIE_S = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """Clocks of ranks with a planted offset and drift."""

    offset_s: np.ndarray
    drift_frac: np.ndarray

    def reading(self, rank: int, true_s: float) -> float:
        return true_s * (1 + self.drift_frac[rank]) + self.offset_s[rank]

    def ahead_s(self, rank: int, true_s: float) -> float:
        return self.reading(rank, true_s) - self.reading(0, true_s)


def planted(draw: np.random.Generator, drift_frac: float, num_ranks: int = 4) -> Clocks:
    """Hosts that were booted at different times; rank 0 has the true time."""
    return Clocks(
        offset_s=np.r_[0.0, draw.uniform(0, 1e5, num_ranks - 1)],
        drift_frac=np.r_[0.0, draw.uniform(-drift_frac, drift_frac, num_ranks - 1)],
    )


def event(rank: int, step: int, sequence: int, group: str, **values: object) -> dict[str, object]:
    return {
        **{"window": 0, "step": step, "rank": rank, "role": "tp", "group": group, "nbytes": 8},
        **{"sequence": sequence, "peer": -1, "is_bound": False, "collective": "all_reduce"},
        **values,
    }


def times(begin_s: float, end_s: float) -> dict[str, object]:
    begin_ns, spent_ns = round(begin_s * NS_PER_S), round((end_s - begin_s) * NS_PER_S)
    spent = {"time_s": spent_ns / NS_PER_S, "exposed_s": spent_ns / NS_PER_S}
    return {"issue_ns": begin_ns, "duration_ns": spent_ns, **spent}


def play(
    draw: np.random.Generator, clocks: Clocks, *, lie_frac: float = 0.0
) -> tuple[pd.DataFrame, int]:
    """Ranks arrive late by chance and leave after the last; also how many of the records lie."""
    rows, num_lies = [], 0
    for step in range(NUM_STEPS):
        for call in range(NUM_CALLS):
            base = (step + 0.9 * call / NUM_CALLS) * STEP_S
            for group, ranks in RING:
                arrive = base + draw.exponential(100e-6, len(ranks))
                leave = arrive.max() + 50e-6 + draw.exponential(20e-6, len(ranks))
                for rank, begin, end in zip(ranks, arrive, leave, strict=True):
                    is_lie = draw.random() < lie_frac
                    num_lies += is_lie
                    lie = draw.choice([-1, 1]) * LIE_S if is_lie else 0.0
                    seen = times(clocks.reading(rank, begin) + lie, clocks.reading(rank, end) + lie)
                    names = ",".join(map(str, ranks))
                    rows.append(event(rank, step, call, group, ranks=names, **seen))
    return pd.DataFrame(rows), num_lies


def middle_s(events: pd.DataFrame) -> float:
    first = events[events["rank"] == 0]["issue_ns"]
    return float(first.max() + first.min()) / 2 / NS_PER_S


@pytest.mark.slow
@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    drift_frac=st.sampled_from([0.0, 20e-6, 100e-6]),
    lie_frac=st.sampled_from([0.0, 0.03]),
)
def test_offsets_lie_in_their_intervals(seed: int, drift_frac: float, lie_frac: float) -> None:
    draw = np.random.default_rng(seed)
    clocks = planted(draw, drift_frac)
    events, num_lies = play(draw, clocks, lie_frac=lie_frac)
    matched = match_ranks(events)
    rows = clock_rows(matched).set_index("rank")
    assert rows["is_reached"].all() and rows.loc[0, "is_shared"]
    for rank in (1, 2, 3):
        truth = clocks.ahead_s(rank, middle_s(events))
        assert rows.loc[rank, "low_s"] - ROUNDING_S <= truth
        assert truth <= rows.loc[rank, "high_s"] + ROUNDING_S
        assert rows.loc[rank, "high_s"] - rows.loc[rank, "low_s"] < 1e-3
        drift = clocks.drift_frac[rank]
        assert rows.loc[rank, "drift_frac"] == pytest.approx(drift, abs=100e-6)
    assert (rows["num_dropped"].max() > 0) == (num_lies > 0)
    if not num_lies:
        aligned = aligned_start_s(matched, clock_rows(matched))
        assert (
            aligned - aligned.groupby([events["step"], events["sequence"]]).transform("min")
        ).max() < 3e-3


def test_messages_in_both_directions_tie_two_clocks_and_one_direction_does_not() -> None:
    draw = np.random.default_rng(5)
    clocks = planted(draw, 0.0, num_ranks=2)

    def messages(source: int, target: int) -> list[dict[str, object]]:
        out = []
        for step in range(NUM_STEPS):
            sent = step * STEP_S + draw.exponential(1e-4)
            got = sent + 50e-6 + draw.exponential(20e-6)
            for rank, peer, kind in ((source, target, "send"), (target, source, "recv")):
                # The sender goes on at once; the receiver had been waiting for long.
                begin, end = (sent, sent + 1e-6) if kind == "send" else (sent - 0.1, got)
                seen = times(clocks.reading(rank, begin), clocks.reading(rank, end))
                names = {"ranks": "0,1", "collective": kind, "peer": peer}
                out.append(event(rank, step, 0, "p", **(names | seen)))
        return out

    one = match_ranks(pd.DataFrame(messages(0, 1)))
    assert clock_rows(one)["is_reached"].tolist() == [True, False]
    both = match_ranks(pd.DataFrame(messages(0, 1) + messages(1, 0)))
    row = clock_rows(both).set_index("rank").loc[1]
    assert row["is_reached"] and not row["is_shared"]
    assert row["low_s"] <= clocks.offset_s[1] <= row["high_s"] < row["low_s"] + 1e-3


def test_a_group_without_a_common_rank_is_not_reached() -> None:
    draw = np.random.default_rng(2)
    events, _ = play(draw, planted(draw, 0.0))
    apart = match_ranks(events[events["group"] != "c"])
    rows = clock_rows(apart).set_index("rank")
    assert rows["is_reached"].tolist() == [True, True, False, False]
    aligned = aligned_start_s(apart, clock_rows(apart))
    assert aligned[apart["rank"] < 2].notna().all() and aligned[apart["rank"] > 1].isna().all()


def test_real_ranks_of_one_host_share_a_clock_and_a_planted_offset_is_found() -> None:
    run = read_run(GOLDEN)
    assert build_table(run).clocks["is_shared"].all()
    planted_s = 1234.5
    moved = tuple(
        replace(r, issue_ns=r.issue_ns + int(planted_s * NS_PER_S))
        if isinstance(r, CollectiveRecord)
        else r
        for r in run.records[1]
    )
    rows = build_table(replace(run, records={**run.records, 1: moved})).clocks.set_index("rank")
    assert not rows.loc[1, "is_shared"] and rows.loc[1, "num_dropped"] == 0
    assert rows.loc[1, "low_s"] <= planted_s <= rows.loc[1, "high_s"]
    # A step of this run takes a tenth of a second.
    assert rows.loc[1, "high_s"] - rows.loc[1, "low_s"] < 0.1


@settings(max_examples=20, deadline=None)
@given(
    offset_s=st.floats(-1e3, 1e3),
    drift_frac=st.floats(-2e-4, 2e-4),
    widths=st.lists(st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-6, 1e-3)), min_size=2),
)
def test_the_line_that_made_the_intervals_is_among_those_that_fit(
    offset_s: float, drift_frac: float, widths: list[tuple[float, float]]
) -> None:
    at_s = np.arange(len(widths), dtype=np.float64)
    middle = at_s.mean()
    truth = offset_s + drift_frac * (at_s - middle)
    below, above = np.array(widths).T
    line = fit_line(Moments(at_s=at_s, low_s=truth - below, high_s=truth + above), middle)
    assert line.is_reached and line.num_dropped == 0
    assert line.low_s - 1e-8 <= offset_s <= line.high_s + 1e-8
    assert line.high_s - line.low_s <= 2e-3

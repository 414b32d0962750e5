"""How far each rank's clock is ahead of a reference rank's, from collectives alone.

Nobody leaves a synchronising collective before the last has arrived, and no message is received
before it is sent (Lamport 1978, clock condition).  So a rank's end minus another one's start
bounds the difference of their clocks, from both sides as a request and its answer do (Cristian
1989).  Bounds chain over ranks that share groups: difference constraints, solved moment by moment
as shortest paths.  A line through the moments' intervals is offset and drift (Moon, Skelly and
Towsley 1999).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..units import NS_PER_S
from ..workload.collectives import Collective
from .offset_lines import Moments, fit_line
from .transfers import EVENT_KEYS

Floats = NDArray[np.float64]

SYNCHRONISING = frozenset(
    c.value
    for c in (
        Collective.ALL_REDUCE,
        Collective.ALL_GATHER,
        Collective.REDUCE_SCATTER,
        Collective.ALL_TO_ALL,
    )
)
"""Every rank's result depends on every rank's input; a root of a broadcast may leave early."""
MOMENT_S = 0.2
"""Clocks are taken to run alike for so long: 100 ppm are then 20 us."""
# A line has two unknowns: eight intervals a step tell them, and more cost time beside training.
_MOST_MOMENTS = 8
# Of two intervals that contradict each other nobody can say which lies.
_LEAST_VOTES = 3
_COLUMNS = [
    *("window", "rank", "reference", "offset_s", "low_s", "high_s", "drift_frac"),
    *("num_moments", "num_dropped", "is_reached", "is_shared"),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """One group's transfers in a moment: readings of its ranks, shape (transfers, ranks).

    A missing start is minus infinity and a missing end infinity: they bound nothing.
    """

    places: NDArray[np.int64]
    starts: Floats
    ends: Floats


def clock_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """One row per window and rank: offset from the lowest rank's clock in mid-window, seconds.

    ``matched`` is what ``match_ranks`` returns.  The true offset lies between ``low_s`` and
    ``high_s``, ``offset_s`` is the middle; ``drift_frac`` is its change per second.  Where every
    bound of a rank admits an offset of zero, it is taken to share the clock (``is_shared``).
    ``num_dropped`` counts the moments and transfers whose bounds contradict most others: a record
    lies.  A rank that nothing ties to the reference has ``is_reached`` False and no offset.
    """
    parts = [_window_rows(part) for _, part in matched.groupby("window", sort=True)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=_COLUMNS)


def aligned_start_s(matched: pd.DataFrame, clocks: pd.DataFrame) -> pd.Series:
    """When each rank arrived, seconds after the window's first arrival, on the reference's clock.

    NaN for ranks whose clock is not known.
    """
    rows = matched[["window", "rank", "issue_ns"]].merge(clocks, on=["window", "rank"], how="left")
    rows.index = matched.index
    first = matched.groupby(["window", "rank"])["issue_ns"].transform("min")
    base_ns = matched.groupby("window")["issue_ns"].transform("min")
    middle_s = _middle_s(matched)
    since_s = (matched["issue_ns"] - first) / NS_PER_S
    drift = rows["drift_frac"] * (since_s - middle_s)
    start_s = (matched["issue_ns"] - base_ns) / NS_PER_S - rows["offset_s"] - drift
    reached = rows["is_reached"].fillna(False).astype(bool)
    return start_s.where(reached, np.nan)


def _middle_s(matched: pd.DataFrame) -> pd.Series:
    """Half of the window's length as each rank saw it."""
    spans = matched.groupby(["window", "rank"])["issue_ns"]
    return (spans.transform("max") - spans.transform("min")) / NS_PER_S / 2


def _window_rows(events: pd.DataFrame) -> pd.DataFrame:
    ranks = np.sort(events["rank"].unique())
    bases = events.groupby("rank")["issue_ns"].min()
    since_ns = events["issue_ns"] - events["rank"].map(bases)
    events = events.assign(
        place=np.searchsorted(ranks, events["rank"]),
        transfer=events.groupby(EVENT_KEYS, sort=False).ngroup(),
        start_s=since_ns / NS_PER_S,
        end_s=(since_ns + events["duration_ns"]) / NS_PER_S,
    )
    moments, num_dropped = _intervals(events, len(ranks))
    middle_s = float(events.loc[events["place"] == 0, "start_s"].max()) / 2
    gaps_s = [(int(bases[rank]) - int(bases[ranks[0]])) / NS_PER_S for rank in ranks]
    lines = pd.DataFrame(
        [
            asdict(fit_line(moments.of(place), middle_s, zero_s=-gap_s))
            for place, gap_s in enumerate(gaps_s)
        ]
    ).rename(columns={"is_zero": "is_shared"})
    is_apart = lines["is_reached"] & ~lines["is_shared"]
    # Within a moment the clocks move apart by this much.
    slack_s = lines["drift_frac"].abs().max() * MOMENT_S / 2
    rows = lines.assign(
        window=int(events["window"].iloc[0]),
        rank=ranks,
        reference=int(ranks[0]),
        offset_s=(gaps_s + lines["offset_s"]).where(is_apart, 0.0),
        low_s=(gaps_s + lines["low_s"] - slack_s).where(lines["is_reached"], 0.0),
        high_s=(gaps_s + lines["high_s"] + slack_s).where(lines["is_reached"], 0.0),
        drift_frac=lines["drift_frac"].where(~lines["is_shared"], 0.0),
        num_dropped=num_dropped + lines["num_dropped"],
    )
    return rows[_COLUMNS]


def _moments(events: pd.DataFrame) -> pd.Series:
    """The moment of each event, an interval of its step; -1 where a long step has enough others."""
    start_s = events.groupby("transfer", sort=False)["start_s"].transform("min")
    before_s = start_s.groupby(events["step"]).transform("max") - start_s
    number = (before_s // MOMENT_S).astype("int64")
    most = number.groupby(events["step"]).transform("max")
    stride = np.maximum(1, -(-(most + 1) // _MOST_MOMENTS))
    return number.where(number % stride == 0, -1)


def _intervals(events: pd.DataFrame, num_ranks: int) -> tuple[Moments, int]:
    """Where each rank's offset lies in each moment, and how many transfers were dropped."""
    at, lows, highs, num_dropped = [], [], [], 0
    events = events.assign(moment=_moments(events))
    for _, part in events[events["moment"] >= 0].groupby(["step", "moment"], sort=True):
        groups = _groups(part)
        found = _solve(groups, num_ranks)
        if found is None:
            kept = [_without_liars(group) for group in groups]
            num_dropped += _num_transfers(groups) - _num_transfers(kept)
            found = _solve(kept, num_ranks)
            groups = kept
        if found is None:
            num_dropped += _num_transfers(groups)
            continue
        at.append(float(part["start_s"].median()))
        lows.append(found[0])
        highs.append(found[1])
    shape = (len(at), num_ranks)
    low_s, high_s = np.reshape(lows, shape), np.reshape(highs, shape)
    return Moments(at_s=np.array(at), low_s=low_s, high_s=high_s), num_dropped


def _num_transfers(groups: list[_Bounds]) -> int:
    return sum(len(group.starts) for group in groups)


def _groups(events: pd.DataFrame) -> list[_Bounds]:
    """The transfers of a moment that bound clocks, by the ranks that took part."""
    out = []
    joint = events[events["collective"].isin(SYNCHRONISING)]
    for _, part in joint.groupby("ranks", sort=True):
        out.append(_readings(part))
    pairs = events[(events["collective"] == Collective.SEND.value) & (events["source"] >= 0)]
    for _, part in pairs.groupby(["source", "target"], sort=True):
        found = _readings(part)
        is_source = found.places == part.loc[part["rank"] == part["source"], "place"].min()
        # Only the sender's start and the receiver's end: a message may be sent and left behind.
        out.append(
            _Bounds(
                places=found.places,
                starts=np.where(is_source, found.starts, -np.inf),
                ends=np.where(is_source, np.inf, found.ends),
            )
        )
    return out


def _readings(events: pd.DataFrame) -> _Bounds:
    _, number = np.unique(events["transfer"].to_numpy(), return_inverse=True)
    places, column = np.unique(events["place"].to_numpy(), return_inverse=True)
    shape = (int(number.max()) + 1, len(places))
    starts, ends = np.full(shape, -np.inf), np.full(shape, np.inf)
    starts[number, column] = events["start_s"].to_numpy()
    ends[number, column] = events["end_s"].to_numpy()
    return _Bounds(places=places.astype(np.int64), starts=starts, ends=ends)


def _most(group: _Bounds) -> Floats:
    """By how much clock i is ahead of clock j at most, shape (ranks, ranks)."""
    if not len(group.starts):
        return np.full((len(group.places),) * 2, np.inf)
    return np.array([np.min(end[:, None] - group.starts, axis=0) for end in group.ends.T])


def _solve(groups: list[_Bounds], num_ranks: int) -> tuple[Floats, Floats] | None:
    """Lower and upper offset of each rank from the first; None where the bounds contradict."""
    most = np.full((num_ranks, num_ranks), np.inf)
    for group in groups:
        here = np.ix_(group.places, group.places)
        most[here] = np.minimum(most[here], _most(group))
    # A record whose end lies before its own start would bound a clock by itself.
    if (np.diagonal(most) < 0).any():
        return None
    upper, lower = _shortest(most), _shortest(most.T)
    if upper is None or lower is None or (upper < -lower).any():
        return None
    return -lower, upper


def _shortest(most: Floats) -> Floats | None:
    """Bellman and Ford's distances from the first rank; None where a cycle is negative."""
    found = np.full(len(most), np.inf)
    found[0] = 0.0
    for _ in range(len(most) + 1):
        step = np.minimum(found, np.min(most + found[None, :], axis=1))
        if np.array_equal(step, found):
            return found
        found = step
    return None


def _without_liars(group: _Bounds) -> _Bounds:
    """The transfers whose bounds the most others admit (Marzullo and Owicki 1983), per pair."""
    if len(group.starts) < _LEAST_VOTES:
        return group
    keep = np.ones(len(group.starts), dtype=bool)
    for i in range(len(group.places)):
        for j in range(i):
            high = group.ends[:, i] - group.starts[:, j]
            low = group.starts[:, i] - group.ends[:, j]
            keep &= _agreeing(low, high)
    return _Bounds(places=group.places, starts=group.starts[keep], ends=group.ends[keep])


def _agreeing(low: Floats, high: Floats) -> NDArray[np.bool_]:
    """The intervals that hold the point which most of them hold."""
    points = np.concatenate([low, high])
    points = points[np.isfinite(points)]
    if not len(points):
        return np.ones(len(low), dtype=bool)
    held = np.sum((low[None, :] <= points[:, None]) & (points[:, None] <= high[None, :]), axis=1)
    best = points[int(np.argmax(held))]
    return (low <= best) & (best <= high)

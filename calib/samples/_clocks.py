"""Offset of each rank's clock from a reference rank's, from collectives alone.

No rank leaves a synchronising collective before the last has arrived, and no message is received
before it is sent (Lamport 1978, clock condition). A rank's end minus another one's start therefore
bounds the difference of their clocks, from both sides, as a request and its response do (Cristian
1989). Bounds chain over ranks that share groups: difference constraints, solved as shortest paths
for each moment. A line through the moments' intervals gives offset and drift (Moon, Skelly and
Towsley 1999), with bounds on both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..units import NS_PER_S
from ..workload.collectives import Collective
from ._transfers import EVENT_KEYS
from .reduce import median_over_steps

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
"""Collectives in which every rank's result depends on every rank's input; a root of a broadcast may
leave early."""
MOMENT_S = 0.2
"""Length of a moment, within which clocks are assumed to run alike: 100 ppm are then 20 us."""
# A line has two unknowns: eight intervals per step determine it, and more cost time during
# training.
_MOST_MOMENTS = 8
# With two contradicting intervals, either may be wrong.
_LEAST_VOTES = 3
_COLUMNS = [
    *("window", "rank", "reference", "offset_s", "low_s", "high_s", "drift_frac"),
    *("num_moments", "num_dropped", "is_reached", "is_shared"),
]
MAX_DRIFT_FRAC = 500e-6
"""Largest error of frequency that NTP corrects (RFC 5905, section 11.1)."""
# Pairs grow quadratically: 24 moments give 276 lines, spread over the window.
_MOST_TRIED = 24
# Clocks count whole nanoseconds.
_SLACK_S = 1e-9
# Zero needs a majority: half of the moments may be bounded by false records.
_LEAST_SHARE = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bounds:
    """One group's transfers in a moment: clock readings of its ranks, shape (transfers, ranks).

    A missing start is minus infinity and a missing end infinity: they bound nothing.
    """

    places: NDArray[np.int64]
    starts: Floats
    ends: Floats


def clock_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Return one row per window and rank: the offset from the lowest rank's clock in mid-window,
    seconds.

    ``matched`` is the result of ``match_ranks``. The true offset lies between ``low_s`` and
    ``high_s``, ``offset_s`` is the middle; ``drift_frac`` is its change per second. If as many
    moments of a rank admit an offset of zero as agree on any line, and at least half of them, it is
    taken to share the clock (``is_shared``). ``num_dropped`` counts the moments and transfers whose
    bounds contradict most others, so that a record must be false. A rank that no transfers connect
    to the reference has ``is_reached`` False and no offset.
    """
    parts = [_window_rows(part) for _, part in matched.groupby("window", sort=True)]
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=_COLUMNS)


def aligned_start_s(matched: pd.DataFrame, clocks: pd.DataFrame) -> pd.Series:
    """Return the arrival of each rank, seconds after the window's first arrival, on the reference's
    clock.

    Ranks whose clock is unknown have NaN.
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
    """Return half of the window's length, as measured by each rank."""
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
    # Upper bound on the clocks' relative drift within a moment.
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
    """Return the moment of each event, an interval of its step; -1 for moments that a long step
    skips."""
    start_s = events.groupby("transfer", sort=False)["start_s"].transform("min")
    before_s = start_s.groupby(events["step"]).transform("max") - start_s
    number = (before_s // MOMENT_S).astype("int64")
    most = number.groupby(events["step"]).transform("max")
    stride = np.maximum(1, -(-(most + 1) // _MOST_MOMENTS))
    return number.where(number % stride == 0, -1)


def _intervals(events: pd.DataFrame, num_ranks: int) -> tuple[Moments, int]:
    """Return the bounds of each rank's offset in each moment, and the number of dropped
    transfers."""
    at, lows, highs, num_dropped = [], [], [], 0
    events = events.assign(moment=_moments(events))
    for _, part in events[events["moment"] >= 0].groupby(["step", "moment"], sort=True):
        groups = _groups(part)
        offset_bounds = _solve(groups, num_ranks)
        if offset_bounds is None:
            consistent_groups = [_without_falsetickers(group) for group in groups]
            num_dropped += _num_transfers(groups) - _num_transfers(consistent_groups)
            offset_bounds = _solve(consistent_groups, num_ranks)
            groups = consistent_groups
        if offset_bounds is None:
            num_dropped += _num_transfers(groups)
            continue
        at.append(float(part["start_s"].median()))
        lows.append(offset_bounds[0])
        highs.append(offset_bounds[1])
    shape = (len(at), num_ranks)
    low_s, high_s = np.reshape(lows, shape), np.reshape(highs, shape)
    return Moments(at_s=np.array(at), low_s=low_s, high_s=high_s), num_dropped


def _num_transfers(groups: list[_Bounds]) -> int:
    return sum(len(group.starts) for group in groups)


def _groups(events: pd.DataFrame) -> list[_Bounds]:
    """Return the transfers of a moment that bound clocks, by the ranks that took part."""
    out = []
    joint = events[events["collective"].isin(SYNCHRONISING)]
    for _, part in joint.groupby("ranks", sort=True):
        out.append(_readings(part))
    pairs = events[(events["collective"] == Collective.SEND.value) & (events["source"] >= 0)]
    for _, part in pairs.groupby(["source", "target"], sort=True):
        readings = _readings(part)
        is_source = readings.places == part.loc[part["rank"] == part["source"], "place"].min()
        # Use only the sender's start and the receiver's end: a send may return before it is
        # received.
        out.append(
            _Bounds(
                places=readings.places,
                starts=np.where(is_source, readings.starts, -np.inf),
                ends=np.where(is_source, np.inf, readings.ends),
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


def _max_clock_lead(group: _Bounds) -> Floats:
    """Return upper bounds on the offset of clock i from clock j, shape (ranks, ranks)."""
    if not len(group.starts):
        return np.full((len(group.places),) * 2, np.inf)
    return np.array([np.min(end[:, None] - group.starts, axis=0) for end in group.ends.T])


def _solve(groups: list[_Bounds], num_ranks: int) -> tuple[Floats, Floats] | None:
    """Return lower and upper offsets of each rank from the first; None if the bounds contradict."""
    most = np.full((num_ranks, num_ranks), np.inf)
    for group in groups:
        here = np.ix_(group.places, group.places)
        most[here] = np.minimum(most[here], _max_clock_lead(group))
    # A record that ends before its own start would bound a clock by itself.
    if (np.diagonal(most) < 0).any():
        return None
    upper, lower = _shortest(most), _shortest(most.T)
    if upper is None or lower is None or (upper < -lower).any():
        return None
    return -lower, upper


def _shortest(most: Floats) -> Floats | None:
    """Return Bellman-Ford distances from the first rank; None if a cycle is negative."""
    distances = np.full(len(most), np.inf)
    distances[0] = 0.0
    for _ in range(len(most) + 1):
        step = np.minimum(distances, np.min(most + distances[None, :], axis=1))
        if np.array_equal(step, distances):
            return distances
        distances = step
    return None


def _without_falsetickers(group: _Bounds) -> _Bounds:
    """Return the transfers whose bounds agree with most others, pair by pair (Marzullo and Owicki
    1983)."""
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
    """Return a mask of the intervals that contain the most-covered point (Marzullo)."""
    points = np.concatenate([low, high])
    points = points[np.isfinite(points)]
    if not len(points):
        return np.ones(len(low), dtype=bool)
    num_covering = np.sum(
        (low[None, :] <= points[:, None]) & (points[:, None] <= high[None, :]), axis=1
    )
    best = points[int(np.argmax(num_covering))]
    return (low <= best) & (best <= high)


@dataclass(frozen=True, slots=True, kw_only=True)
class Moments:
    """Bounds of the offsets; ``at_s`` is (moments,), the others (moments, ranks) or (moments,)."""

    at_s: Floats
    low_s: Floats
    high_s: Floats

    def of(self, place: int) -> Moments:
        """Return the bounds of one rank in the moments that bound it from both sides."""
        low, high = self.low_s[:, place], self.high_s[:, place]
        known = np.isfinite(low) & np.isfinite(high)
        return Moments(at_s=self.at_s[known], low_s=low[known], high_s=high[known])

    def only(self, keep: NDArray[np.bool_]) -> Moments:
        """Return a selection of the moments of one rank."""
        return Moments(at_s=self.at_s[keep], low_s=self.low_s[keep], high_s=self.high_s[keep])

    def admits(self, offset_s: Floats | float) -> NDArray[np.bool_]:
        """Return a mask of the moments whose bounds admit an offset, one for all moments or one
        each."""
        return (self.low_s - _SLACK_S <= offset_s) & (offset_s <= self.high_s + _SLACK_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The offset in mid-window between ``low_s`` and ``high_s``, and its change per second."""

    offset_s: float = 0.0
    low_s: float = 0.0
    high_s: float = 0.0
    drift_frac: float = 0.0
    num_moments: int = 0
    num_dropped: int = 0
    is_reached: bool = False
    is_zero: bool = False
    """True if most moments admit the constant offset ``zero_s``, without drift."""


def fit_line(moments: Moments, middle_s: float, *, zero_s: float = 0.0) -> Line:
    """Return the middle of all lines that the moments admit; moments that contradict most are
    dropped."""
    if not len(moments.at_s):
        return Line()
    remaining = moments
    ranges = _ranges(remaining, middle_s)
    if ranges is None:
        remaining = moments.only(_most_agreed(moments))
        ranges = _ranges(remaining, middle_s)
    if ranges is None:
        return Line(num_dropped=len(moments.at_s))
    (low, high), (slow, fast) = ranges
    num_zero = int(moments.admits(zero_s).sum())
    is_zero = num_zero >= max(len(remaining.at_s), _LEAST_SHARE * len(moments.at_s))
    num_remaining = num_zero if is_zero else len(remaining.at_s)
    return Line(
        offset_s=(low + high) / 2,
        low_s=min(low, zero_s) if is_zero else low,
        high_s=max(high, zero_s) if is_zero else high,
        drift_frac=(slow + fast) / 2 if len(remaining.at_s) > 1 else 0.0,
        num_moments=num_remaining,
        num_dropped=len(moments.at_s) - num_remaining,
        is_reached=True,
        is_zero=is_zero,
    )


def _ranges(
    moments: Moments, middle_s: float
) -> tuple[tuple[float, float], tuple[float, float]] | None:
    """Return the least and greatest offset at the middle, and drift; None if no line fits."""
    from scipy.optimize import linprog  # slow to import, and only clocks need it

    # Centred and scaled: the solver's tolerance is absolute.
    center = float(np.median((moments.low_s + moments.high_s) / 2))
    scale = max(float(np.max(moments.high_s - moments.low_s)), _SLACK_S)
    time = moments.at_s - middle_s
    reach = max(float(np.max(np.abs(time))), _SLACK_S)
    low, high = (moments.low_s - center) / scale, (moments.high_s - center) / scale
    one = np.ones_like(time)
    sides = np.vstack([np.column_stack([one, time / reach]), -np.column_stack([one, time / reach])])
    limits = np.concatenate([high, -low]) + _SLACK_S / scale
    steepest = MAX_DRIFT_FRAC * reach / scale
    out = []
    for column, unit in ((0, scale), (1, scale / reach)):
        ends = []
        for sign in (1.0, -1.0):
            goal = np.zeros(2)
            goal[column] = sign
            solution = linprog(
                goal, A_ub=sides, b_ub=limits, bounds=[(None, None), (-steepest, steepest)]
            )
            if solution.status != 0:
                return None
            ends.append(float(solution.x[column]) * unit)
        out.append((ends[0], ends[1]))
    (first, last), drift = out
    return (first + center, last + center), drift


def _most_agreed(moments: Moments) -> NDArray[np.bool_]:
    """Return a mask of the moments admitted by the best line through the middles of two moments."""
    middle = (moments.low_s + moments.high_s) / 2
    tried = np.unique(np.linspace(0, len(middle) - 1, min(len(middle), _MOST_TRIED)).astype(int))
    best = np.zeros(len(middle), dtype=bool)
    for place in tried.tolist():
        agreed = moments.admits(middle[place])
        best = agreed if agreed.sum() > best.sum() else best
    for i, j in combinations(tried.tolist(), 2):
        slope = (middle[j] - middle[i]) / max(moments.at_s[j] - moments.at_s[i], _SLACK_S)
        if abs(slope) > MAX_DRIFT_FRAC:
            continue
        agreed = moments.admits(middle[i] + slope * (moments.at_s - moments.at_s[i]))
        best = agreed if agreed.sum() > best.sum() else best
    return best


_RANK_ROLE = ["window", "rank", "role"]
_ARRIVAL = [*_RANK_ROLE, "num_events", "num_last", "late_s", "num_steps"]
_LINK = ["window", "collective", "role", "num_ranks", "num_nodes", "nbytes", "ranks"]


def arrival_rows(matched: pd.DataFrame, clocks: pd.DataFrame) -> pd.DataFrame:
    """Return the lateness of each rank at the synchronising collectives of each role that all ranks
    recorded.

    ``num_last`` counts those of its ``num_events`` at which it arrived last, by more than the
    clocks' uncertainty; ``late_s`` is its delay after the previous arrival, per step: the time that
    the group waited for this rank alone. Clocks must be known.
    """
    events = matched[matched["collective"].isin(SYNCHRONISING)]
    if events.empty:
        return pd.DataFrame(columns=_ARRIVAL)
    events = events.assign(start_s=aligned_start_s(events, clocks)).dropna(subset=["start_s"])
    groups = events.groupby(EVENT_KEYS, sort=False)
    events = events[groups["rank"].transform("nunique") == events["num_ranks"]]
    if events.empty:
        return pd.DataFrame(columns=_ARRIVAL)
    events = events.merge(_uncertainty(clocks), on=["window", "rank"], how="left")
    events = events.sort_values([*EVENT_KEYS, "start_s"], kind="stable")
    groups = events.groupby(EVENT_KEYS, sort=False)
    ahead_s = events["start_s"] - groups["start_s"].shift(1)
    unsure_s = events["unsure_s"] + groups["unsure_s"].shift(1)
    is_last = groups.cumcount(ascending=False) == 0
    events["is_late"] = is_last & (ahead_s > unsure_s)
    events["late_s"] = np.where(events["is_late"], ahead_s, 0.0) * events.get("stands_for", 1.0)
    num_steps = events.groupby(["window", "rank"])["step"].nunique().rename("num_steps")
    rows = events.groupby(_RANK_ROLE, sort=True).agg(
        num_events=("late_s", "size"), num_last=("is_late", "sum"), late_s=("late_s", "sum")
    )
    rows = rows.reset_index().merge(num_steps.reset_index(), on=["window", "rank"])
    rows["late_s"] /= rows["num_steps"]
    return rows


def link_rows(matched: pd.DataFrame) -> pd.DataFrame:
    """Return the transfer time of each group, one row per collective and payload.

    ``exposed_s`` is the time that its last rank stood still for it, the least over the group. Only
    transfers with a known end that all ranks of a group recorded are included.
    """
    exact = matched[~matched["is_bound"]]
    stood = np.minimum(exact["exposed_s"], exact["transfer_s"])
    exact = exact.assign(stood_s=stood)
    exact["stood_s"] = exact.groupby(EVENT_KEYS, sort=False)["stood_s"].transform("min")
    events = exact.drop_duplicates(subset=EVENT_KEYS).drop(columns="time_s").assign(rank=0)
    rows = median_over_steps(events.rename(columns={"transfer_s": "time_s"}), _LINK)
    if rows.empty:
        return rows
    stood = events.groupby(_LINK, sort=True)["stood_s"].median().rename("exposed_s")
    return rows.merge(stood.reset_index(), on=_LINK).rename(columns={"collective": "kind"})


def _uncertainty(clocks: pd.DataFrame) -> pd.DataFrame:
    """Return half of the interval of each clock; 0 for ranks that share the reference's."""
    half = np.where(clocks["is_shared"], 0.0, (clocks["high_s"] - clocks["low_s"]) / 2)
    return clocks[["window", "rank"]].assign(unsure_s=half)

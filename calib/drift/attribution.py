"""Attribution of a change between two windows to a rank, a group, all clocks, or the data.

Each part of the step is compared with the same part in the earlier window: the work of each rank,
its batches and time between steps, and the transfers of each group.  A rank is named for its change
in excess of the other ranks, all ranks for their common change.  A part is named if its change is
significant over all comparisons and explains enough of the step's change; else the cause is
unknown, with the reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtr

from ..plain_json import JsonObject
from ..samples.rank_compute import RankCompute, newest_rank_compute
from ..samples.reduce import MAD_EFFICIENCY, MEDIAN_OVER_MEAN, mad_sigma, median_error_log
from ..samples.table import SampleTable
from ..units import format_frac, format_ranks, format_time
from ..workload.config_json import Encoded, encode_fields, encoded
from .stragglers import excess_s

Floats = NDArray[np.float64]

FALSE_ALARM = 0.02
"""Probability that any cause is named between two windows without a change."""
LEAST_FRAC = 0.03
"""Smallest change that is a cause of drift, as a share of the step."""
LEAST_SHARE = 0.3
"""Smallest share of the step's change that a cause must explain."""
REPEAT_SIGMA_FRAC = 0.008
"""Relative standard deviation of a rank's excess work between two windows, beyond its noise."""
COMMON_REPEAT_SIGMA_FRAC = 0.016
"""Relative standard deviation of the common work of all ranks between two windows."""
# Two values hardly constrain a scatter.
_LEAST_SAMPLES = 3
# From six ranks on, the scatter over ranks replaces that over samples.
_LEAST_CROWD = 6
_ALIKE = 0.5
"""Smallest excess of a named rank, as a share of the largest excess."""
LEAST_CHANGE_FRAC = 0.1
"""Smallest change of a group's transfers that counts; links vary by less between windows."""
REPEAT_SIGMA_LOG = 0.02
"""Standard deviation (log) of the same transfers between two windows, beyond step noise."""
_KEYS = ["kind", "role", "num_ranks", "num_nodes", "nbytes", "ranks"]


class CauseKind(Enum):
    """Part of the step that changed."""

    RANK = "straggling rank"
    GROUP = "congested group"
    CLOCKS = "clocks"
    DATA = "data"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause(Encoded):
    """One cause; times are of the part that changed, per step, and ``change_s`` is its change.

    ``chance`` is the probability of such a change by noise alone in any of the comparisons.
    """

    kind: CauseKind
    ranks: tuple[int, ...] = ()
    role: str = ""
    before_s: float = 0.0
    after_s: float = 0.0
    change_s: float = 0.0
    chance: float = 1.0
    reason: str = ""

    def to_json(self) -> JsonObject:
        """Return the JSON object."""
        return encoded(**encode_fields(self), change_frac=self.change_frac, text=self.text)

    @property
    def change_frac(self) -> float:
        """Relative change of the part."""
        return self.change_s / self.before_s if self.before_s > 0 else 0.0

    @property
    def text(self) -> str:
        """The cause in words, for one line of the log."""
        if self.kind is CauseKind.UNKNOWN:
            return f"unknown ({self.reason})"
        who = _who(self.ranks, self.role)
        amount = f"{format_time(self.before_s)} -> {format_time(self.after_s)}"
        if self.before_s > 0 and self.change_frac < 10:
            amount += f" ({format_frac(self.change_frac, signed=True)})"
        what = {
            CauseKind.RANK: f"{who}: own compute",
            CauseKind.GROUP: f"{who}: transfers",
            CauseKind.CLOCKS: "compute of all ranks alike",
            CauseKind.DATA: f"{who}: batches and time between steps",
        }[self.kind]
        return f"{self.kind.value}: {what} {amount} per step"


def find_causes(
    before: SampleTable, after: SampleTable, *, change_s: float, step_s: float
) -> tuple[Cause, ...]:
    """Return the causes of a change of the step by ``change_s``, largest first; never empty.

    ``before`` and ``after`` hold one window each, of one layout; ``step_s`` is the step before.
    """
    sign = 1.0 if change_s > 0 else -1.0
    large_causes = [
        cause
        for cause in (*_of_ranks(before, after, sign, step_s), *_of_groups(before, after, sign))
        if sign * cause.change_s >= max(LEAST_FRAC * step_s, LEAST_SHARE * abs(change_s))
    ]
    if large_causes:
        return tuple(sorted(large_causes, key=lambda c: -sign * c.change_s))
    reason = "computation, data and transfers of the ranks are as before"
    if newest_rank_compute(before) is None or newest_rank_compute(after) is None:
        reason = "one of the windows has no clean hooked step"
    return (Cause(kind=CauseKind.UNKNOWN, reason=reason),)


def find_group_causes(
    before: SampleTable, after: SampleTable, *, step_s: float
) -> tuple[Cause, ...]:
    """Return groups whose transfers have changed, even if compute hides them.

    Groups of a whole role that changed alike count as one; changes below ``LEAST_FRAC`` of the step
    are excluded.
    """
    both = (*_of_groups(before, after, 1.0), *_of_groups(before, after, -1.0))
    large_causes = [c for c in both if abs(c.change_s) >= LEAST_FRAC * step_s]
    return tuple(sorted(large_causes, key=lambda c: -abs(c.change_s)))


def _of_groups(before: SampleTable, after: SampleTable, sign: float) -> list[Cause]:
    """Return groups that changed in the direction of ``sign``; one cause if all of a role did."""
    by_role: dict[str, list[Cause]] = {}
    for link in link_changes(before.links, after.links):
        by_role.setdefault(link.role, []).append(link)
    causes: list[Cause] = []
    for _, every in sorted(by_role.items()):
        hit = [link for link in every if link.chance <= FALSE_ALARM and sign * link.change_s > 0]
        if len(every) > 1 and len(hit) == len(every):
            ranks = tuple(sorted({rank for link in hit for rank in link.ranks}))
            # The group with the largest change represents them.
            hit = [replace(max(hit, key=lambda link: abs(link.change_s)), ranks=ranks)]
        causes += hit
    return causes


def _of_ranks(before: SampleTable, after: SampleTable, sign: float, step_s: float) -> list[Cause]:
    old, new = newest_rank_compute(before), newest_rank_compute(after)
    if old is None or new is None:
        return []
    ranks = np.intersect1d(old.ranks, new.ranks)
    if not len(ranks):
        return []
    # Bonferroni: each rank and all ranks together, in compute and in data.
    num_tests = 2 * (len(ranks) + 1)
    rank_causes: list[Cause] = []
    for kind, name in ((CauseKind.CLOCKS, "compute"), (CauseKind.DATA, "data")):
        part = _Part(_values(old, ranks, name), _values(new, ranks, name), sign)
        rank_causes += _changed(part, kind, ranks, num_tests=num_tests, step_s=step_s)
    return rank_causes


def _values(compute: RankCompute, ranks: NDArray[np.int64], name: str) -> Floats:
    data_s = compute.data_s + compute.between_s
    values = data_s if name == "data" else compute.work_s - data_s
    return values[:, np.searchsorted(compute.ranks, ranks)]


class _Part:
    """One part of the step of all ranks in both windows, shapes (samples, ranks).

    Changes are counted positive in the direction of the drift.
    """

    def __init__(self, before: Floats, after: Floats, sign: float) -> None:
        self.before, self.after = before, after
        moved = sign * (np.median(after, axis=0) - np.median(before, axis=0))
        # The lower median, so that of two ranks the one that changed less is the common part.
        self.common_s = float(np.sort(moved)[(len(moved) - 1) // 2])
        self.excess_s = moved - self.common_s
        self._level_s = float(np.median(before))
        whole = np.zeros(before.shape[1], dtype=np.int64)
        self._apart = [
            excess_s(values, whole) if len(whole) > 1 else values for values in (before, after)
        ]

    def common_chance(self) -> float:
        """Return the p-value of the common change, from the median rank's scatter over steps."""
        before, after = (np.median(values, axis=1) for values in (self.before, self.after))
        return self._chance(self.common_s, before, after, COMMON_REPEAT_SIGMA_FRAC)

    def excess_chance(self, place: int) -> float:
        """Return the p-value of a rank's excess, from its scatter about the others over steps."""
        before, after = (values[:, place] for values in self._apart)
        return self._chance(float(self.excess_s[place]), before, after, REPEAT_SIGMA_FRAC)

    def _chance(
        self, change_s: float, before: Floats, after: Floats, repeat_sigma_frac: float
    ) -> float:
        old, new, freedom = _error(before), _error(after), len(before) + len(after) - 2
        repeat_sigma_s = repeat_sigma_frac * self._level_s
        if freedom + 2 < 2 * _LEAST_SAMPLES:
            # With one sample per window, only the scatter over ranks is available.
            if len(self.excess_s) < _LEAST_CROWD:
                return 1.0
            old, new = mad_sigma(self.excess_s), 0.0
            # The efficiency of a median deviation is about a third (0.37 on normal data).
            freedom = max(1, len(self.excess_s) // 3)
        error = float(np.sqrt(old**2 + new**2 + repeat_sigma_s**2))
        if error <= 0:
            return 0.0 if change_s > 0 else 1.0
        return float(stdtr(max(1, freedom), -change_s / error))


def _changed(
    part: _Part, kind: CauseKind, ranks: NDArray[np.int64], *, num_tests: int, step_s: float
) -> list[Cause]:
    """Return the causes of one part: ranks with excess change, and the common change."""
    part_causes = []
    least_s = LEAST_FRAC * step_s
    chances = [part.excess_chance(place) * num_tests for place in range(len(ranks))]
    largest_s = float(part.excess_s.max())
    apart = [
        place
        for place, chance in enumerate(chances)
        if chance <= FALSE_ALARM and part.excess_s[place] >= max(least_s, _ALIKE * largest_s)
    ]
    if apart:
        who = CauseKind.RANK if kind is CauseKind.CLOCKS else kind
        worst = max(apart, key=lambda place: part.excess_s[place])
        names = tuple(int(rank) for rank in ranks[apart])
        chance = max(chances[place] for place in apart)
        part_causes.append(_cause(part, who, worst, names, float(part.excess_s[worst]), chance))
    chance = part.common_chance() * num_tests
    if chance <= FALSE_ALARM and part.common_s >= least_s:
        middle = int(np.argsort(part.excess_s)[(len(ranks) - 1) // 2])
        part_causes.append(_cause(part, kind, middle, (), part.common_s, chance))
    return part_causes


def _cause(
    part: _Part, kind: CauseKind, place: int, ranks: tuple[int, ...], moved_s: float, chance: float
) -> Cause:
    before_s = float(np.median(part.before[:, place]))
    after_s = float(np.median(part.after[:, place]))
    change_s = moved_s if after_s > before_s else -moved_s
    return Cause(
        kind=kind, ranks=ranks, before_s=before_s, after_s=after_s, change_s=change_s, chance=chance
    )


def _error(values: Floats) -> float:
    """Return the standard error of a median, from the median deviation."""
    if len(values) < 2:
        return 0.0
    # With few values the median deviation may be 0 by chance; bound it by half the usual one.
    sigma = max(mad_sigma(values), 0.5 * float(values.std(ddof=1)))
    return MEDIAN_OVER_MEAN * sigma / float(np.sqrt(len(values)))


def _who(ranks: Sequence[int], role: str) -> str:
    """Return ranks in short, with the role of their group.

    >>> _who((3,), ""), _who((), ""), _who((0, 1), "tp")
    ('rank 3', 'all ranks', 'tp group of ranks 0, 1')
    """
    if not ranks:
        return "all ranks"
    return f"{role} group of {format_ranks(ranks)}" if role else format_ranks(ranks)


def link_changes(before: pd.DataFrame, after: pd.DataFrame) -> list[Cause]:
    """Return the change of each group's transfers that are in both windows, without waiting for
    ranks, seconds per step; frames are ``links`` of one window each.

    The chance of a change below ``LEAST_CHANGE_FRAC`` is 1.
    """
    both = _timed(before).merge(_timed(after), on=_KEYS, suffixes=("_before", "_after"))
    if both.empty:
        return []
    # Transfers of a group share its links, so that their errors add up linearly.
    columns = ["own_s_before", "own_s_after", "error_s_before", "error_s_after"]
    groups = both.groupby(["role", "ranks"], sort=True)
    sums = groups[columns].sum()
    sums["freedom"] = MAD_EFFICIENCY * groups[["num_steps_before", "num_steps_after"]].min().sum(
        axis=1
    )
    changes = []
    for (role, ranks), row in zip(sums.index.tolist(), sums.to_dict("records"), strict=True):
        old, new = row["own_s_before"], row["own_s_after"]
        error = np.hypot(row["error_s_before"], row["error_s_after"])
        error = np.hypot(error, REPEAT_SIGMA_LOG * old)
        chance = float(stdtr(max(1.0, row["freedom"]), -abs(new - old) / error)) * 2 * len(sums)
        is_small = abs(new - old) < LEAST_CHANGE_FRAC * min(old, new)
        changes.append(
            Cause(
                kind=CauseKind.GROUP,
                role=str(role),
                ranks=tuple(int(rank) for rank in str(ranks).split(",")),
                before_s=float(old),
                after_s=float(new),
                change_s=float(new) - float(old),
                chance=1.0 if is_small else min(1.0, chance),
            )
        )
    return changes


def _timed(links: pd.DataFrame) -> pd.DataFrame:
    rows = links[links["num_steps"] > 1]
    transfer_s = rows["time_s"] * rows["count"] / rows["num_steps"]
    error_s = median_error_log(rows) * transfer_s
    return rows[[*_KEYS, "num_steps"]].assign(own_s=transfer_s, error_s=error_s)

"""From one layout to another, one choice at a time: what each of them is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from ..errors import ConfigError
from ..plain_json import JsonObject
from ..regressors.intervals import Z_90
from ..search.labels import layout_label
from ..steps.estimate import StepEstimate, paired_sigma_log
from ..steps.model import FittedSteps
from ..workload.config import RunConfig
from ..workload.config_json import Encoded
from .axes import axis_value, differing_axes, mixed

_MOST_AXES = 8
"""Choices that are changed apart; of more, the last go together.  All orders of eight are 256
layouts between."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change(Encoded):
    """One layout between two, with what its choices do to the step before it."""

    JSON: ClassVar[str] = "axes=changed label step_time_s change_s low_s high_s"

    axes: tuple[str, ...]
    """What was changed; several where no layout between can run."""
    before: tuple[str, ...]
    after: tuple[str, ...]
    """Values of these axes."""
    label: str
    step_time_s: float
    change_s: float
    """Against the layout before it."""
    low_s: float
    high_s: float
    """Its 90 % interval; errors that both share have cancelled."""

    @property
    def text(self) -> str:
        """What was changed, as ``tp 2 -> 4``."""
        named = zip(self.axes, self.before, self.after, strict=True)
        return ", ".join(f"{axis} {old} -> {new}" if new else axis for axis, old, new in named)

    @property
    def changed(self) -> list[JsonObject]:
        """Each choice with its values before and after."""
        named = zip(self.axes, self.before, self.after, strict=True)
        return [{"axis": axis, "before": old, "after": new} for axis, old, new in named]


@dataclass(frozen=True, slots=True, kw_only=True)
class Walk(Encoded):
    """The way from one layout to another."""

    JSON: ClassVar[str] = "changes alone impossible"

    changes: tuple[Change, ...]
    """In their order; the last ends at the other layout."""
    alone: tuple[Change, ...]
    """Each choice changed by itself in the first layout, where that can run."""
    impossible: tuple[str, ...]
    """Axes whose choice cannot be changed by itself."""


def walk(start: RunConfig, end: RunConfig, steps: FittedSteps) -> Walk:
    """From ``start`` to ``end`` by as many layouts that can run as there are.

    Of orders with equally many, the one that changes axes in the order of ``AXES`` first.  Whether
    a layout between fits in memory is not asked.
    """
    groups = _groups(differing_axes(start, end))
    between = _between(start, end, groups)
    path = _longest(between, len(groups))
    singles = [frozenset({place}) for place in range(len(groups))]
    able = [one for one in singles if one in between]
    layouts = [between[places] for places in (*path, *able)]
    first, *found = steps.estimates([start, *layouts])
    changes, before = [], (frozenset[int](), first)
    for places, estimate in zip(path, found[: len(path)], strict=True):
        changed = [axis for place in sorted(places - before[0]) for axis in groups[place]]
        changes.append(_change(changed, before[1], estimate))
        before = (places, estimate)
    alone = [
        _change([axis for place in places for axis in groups[place]], first, estimate)
        for places, estimate in zip(able, found[len(path) :], strict=True)
    ]
    impossible = [axis for n, axes in enumerate(groups) if singles[n] not in able for axis in axes]
    return Walk(changes=tuple(changes), alone=tuple(alone), impossible=tuple(impossible))


def _groups(axes: Sequence[str]) -> list[tuple[str, ...]]:
    apart, rest = axes[: _MOST_AXES - 1], axes[_MOST_AXES - 1 :]
    return [*((axis,) for axis in apart), *([tuple(rest)] if rest else [])]


def _between(
    start: RunConfig, end: RunConfig, groups: Sequence[Sequence[str]]
) -> dict[frozenset[int], RunConfig]:
    """Every layout with some choices of each that can run, by the groups of axes that are those of
    the end; the end itself always."""
    out: dict[frozenset[int], RunConfig] = {}
    for number in range(1, len(groups)):
        for chosen in combinations(range(len(groups)), number):
            try:
                axes = [axis for place in chosen for axis in groups[place]]
                out[frozenset(chosen)] = mixed(start, end, axes)
            except ConfigError:
                continue
    if groups:
        out[frozenset(range(len(groups)))] = end
    return out


def _longest(between: dict[frozenset[int], RunConfig], number: int) -> list[frozenset[int]]:
    """The way over the most layouts, each with more choices of the end than the one before it."""
    best: dict[frozenset[int], list[frozenset[int]]] = {frozenset(): []}
    for places in sorted(between, key=lambda one: (len(one), sorted(one))):
        ways = [way for before, way in best.items() if before < places]
        # Among equals choices in the order of the axes.
        best[places] = [*min(ways, key=lambda way: (-len(way), list(map(sorted, way)))), places]
    return best[frozenset(range(number))]


def _change(axes: Sequence[str], before: StepEstimate, after: StepEstimate) -> Change:
    spread = math.exp(Z_90 * paired_sigma_log(after, before))
    ratio = after.time_s / before.time_s
    return Change(
        axes=tuple(axes),
        before=tuple(axis_value(before.config, axis) for axis in axes),
        after=tuple(axis_value(after.config, axis) for axis in axes),
        label=layout_label(after.config),
        step_time_s=after.time_s,
        change_s=after.time_s - before.time_s,
        low_s=before.time_s * (ratio / spread - 1.0),
        high_s=before.time_s * (ratio * spread - 1.0),
    )

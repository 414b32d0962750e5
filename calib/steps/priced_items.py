"""Seconds of items as a function of the constants of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..fit.estimates import Source
from ..timeline.compiled import Compiled
from ..timeline.items import Floats, Ints, Item, family
from ..workload.collectives import CollectiveCall, GroupRole
from .base_estimates import base_estimates
from .base_times import BaseTimes
from .scales import HOP, Scale, scales, weights

KNOWN_FRAC = 0.15
"""How much of a constant's deviation is left for what was sampled in training itself."""
SCALE, FAMILY = "scale", "family"
Constant = tuple[object, ...]
"""A name that says what a constant is of: equal names are the same constant."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedItems:
    """Items with the constants that their times depend on."""

    base_s: Floats
    """Seconds of each item with all constants at their centres."""
    sources: tuple[Source, ...]
    """Where the time of each item comes from."""
    weights: Floats
    """Power of each scale and family in each item, shape (items, scales + families)."""
    scales: tuple[Scale, ...]
    families: tuple[str, ...]
    hops: Ints
    """Items that are messages between stages and hold no latency between sides yet."""

    @property
    def constants(self) -> tuple[Constant, ...]:
        """Names of scales and families, in the order of all vectors of constants."""
        named = [(SCALE, scale.name) for scale in self.scales]
        return (*named, *((FAMILY, name) for name in self.families))

    def time_s(self, theta: Floats) -> Floats:
        """Seconds, shape (items, columns), of constants of shape (constants, columns)."""
        times_s = self.base_s[:, np.newaxis] * np.exp(self.weights @ theta[: len(self.constants)])
        times_s[self.hops] += self.named(theta, HOP)
        return times_s

    def named(self, theta: Floats, name: str) -> Floats:
        """Value of a constant that is a time or a ratio of its own, shape (columns,)."""
        place = next(i for i, scale in enumerate(self.scales) if scale.name == name)
        return np.exp(self.scales[place].log_center + theta[place])


def priced_items(compiled: Compiled, base: BaseTimes) -> PricedItems:
    """The items of compiled layouts, or of parts of them, over base times."""
    known = base.conditions
    chosen = scales(known)
    found = base_estimates(compiled, base)
    is_prior = np.array([source is Source.PRIOR for source in found.sources], dtype=bool)
    is_new = is_prior | (not known.is_in_situ)
    powers = weights(compiled.items, chosen)
    centers = np.array([scale.log_center for scale in chosen])
    families, spreads = _families(compiled.items, found.sigma_log)
    powers_left = powers * np.where(is_new, 1.0, KNOWN_FRAC)[:, np.newaxis]
    return PricedItems(
        base_s=found.time_s * np.exp(np.where(is_new, powers @ centers, 0.0)),
        sources=found.sources,
        weights=np.hstack([powers_left, spreads]),
        scales=chosen,
        families=families,
        hops=np.flatnonzero(is_new & [_is_message(item) for item in compiled.items]),
    )


def _is_message(item: Item) -> bool:
    return isinstance(item, CollectiveCall) and item.role is GroupRole.PP


def _families(items: Sequence[Item], sigma_log: Floats) -> tuple[tuple[str, ...], Floats]:
    """Families of models with a deviation, and the deviation of each item, (items, families).

    The errors of one operator kind or kind of transfer are taken as one: they add up linearly over
    the step, and in quadrature across kinds.
    """
    names = [family(item) for item in items]
    families = sorted({name for name, sigma in zip(names, sigma_log, strict=True) if sigma > 0})
    is_of = np.array([[name == other for other in families] for name in names], dtype=np.float64)
    return tuple(families), is_of.reshape(len(items), len(families)) * sigma_log[:, np.newaxis]

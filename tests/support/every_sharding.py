"""Shardings and overlaps of one layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from forerun.calib.errors import ConfigError
from forerun.calib.search.space import num_nodes, shardings, states
from forerun.calib.workload.config import RunConfig


def other_shardings(layout: RunConfig) -> list[RunConfig]:
    """Return a layout with every other sharding and overlap that its program supports.

    Custom loops have DDP, FSDP and FSDP in two copies.  Empty if there is one replica.
    """
    par = layout.parallelism
    if par.dp * par.cp == 1:
        return []
    deep = shardings(layout) if par.pp == 1 else shardings(layout)[:1]
    layouts: dict[RunConfig, None] = {}
    for changes in deep:
        try:
            base = replace(layout, parallelism=replace(par, **dict[str, Any](changes)))
        except ConfigError:
            continue
        layouts |= dict.fromkeys(choice.of(base) for choice in states(base, num_nodes(base)))
    return [one for one in layouts if one != layout]

"""How many layouts some cells have."""

from __future__ import annotations

import numpy as np

from ..arguments.keep import Keep
from ..workload.config import RunConfig
from .cells import Cells
from .recomputes import recomputes
from .space import num_nodes, states

_AGAIN = "recompute"
"""The axis of what is computed again; all others that vary in a cell are of its states."""


def num_variants(cells: Cells, keep: Keep | None = None) -> int:
    """Variants of all cells together, those that ``keep`` allows: cells that were made for it."""
    columns, keep = cells.columns, keep or Keep()
    replicas = columns["dp"] * columns["cp"]
    expert_dp = columns["tp"] * replicas // (columns["ep"] * columns["etp"])
    nodes = cells.num_nodes
    has_instances = (replicas % nodes == 0) & (expert_dp % nodes == 0)
    # Layouts alike in these have as many; which are asked for may hang on more.
    names, spread = ("pp", "vp", "split", "deep"), nodes > 1
    if keep.axes:
        names, spread = (*names, "tp", "ep", "etp"), nodes
    keys = [*(columns[name] for name in names), replicas > 1, spread, has_instances]
    firsts, places = cells.distinct(*keys)
    numbers = [_of_cell(cells.layout(first), keep) for first in firsts.tolist()]
    return int(np.bincount(places) @ np.array(numbers)) if numbers else 0


def _of_cell(layout: RunConfig, keep: Keep) -> int:
    """What is computed again and how states are kept do not depend on each other."""
    agains, kept = recomputes(layout), states(layout, num_nodes(layout))
    if not keep.axes:
        return len(agains) * len(kept)
    of_states = keep.without(_AGAIN)
    of_again = Keep(axes=tuple(one for one in keep.axes if one.name == _AGAIN))
    num_again = sum(of_again.allows(again.of(layout)) for again in agains)
    return num_again * sum(of_states.allows(choice.of(layout)) for choice in kept)

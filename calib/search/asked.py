"""How many layouts of some cells are asked for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..arguments.keep import Keep
from ..errors import ConfigError
from ..workload.config import RunConfig
from .cells import Cells
from .recomputes import recomputes
from .space import num_nodes, states

_AGAIN = "recompute"
"""The axis of what is computed again; all others that vary in a cell are of its states."""


def num_asked(cells: Cells, keep: Keep) -> int:
    """How many variants of all cells ``keep`` allows; the cells are those that were made for it."""
    columns = cells.columns
    replicas = columns["dp"] * columns["cp"]
    expert_dp = columns["tp"] * replicas // (columns["ep"] * columns["etp"])
    nodes = cells.num_nodes
    has_instances = (replicas % nodes == 0) & (expert_dp % nodes == 0)
    keys = [columns[name] for name in ("tp", "ep", "etp", "pp", "vp", "split", "deep")]
    firsts, places = cells.distinct(*keys, replicas > 1, nodes, has_instances)
    numbers = [_of_cell(cells.layout(first), keep) for first in firsts.tolist()]
    return int(np.bincount(places) @ np.array(numbers)) if numbers else 0


def _of_cell(layout: RunConfig, keep: Keep) -> int:
    """What is computed again and how states are kept do not depend on each other."""
    of_states = keep.without(_AGAIN)
    of_again = Keep(axes=tuple(one for one in keep.axes if one.name == _AGAIN))
    num_again = sum(of_again.allows(again.of(layout)) for again in recomputes(layout))
    return num_again * sum(map(of_states.allows, _with_states(layout)))


def _with_states(layout: RunConfig) -> Iterator[RunConfig]:
    for choice in states(layout, num_nodes(layout)):
        try:
            yield choice.of(layout)
        except ConfigError:
            continue

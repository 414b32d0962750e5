"""Protocols on a canonical table of collectives: rows held out of the fit and scored.

A machine is a device on a fabric; a curve is one collective among a number of ranks on a number of
nodes of a machine; a group (of scores) is a collective.  All repeats of a payload are on one side
of a split.

- ``small_to_large``: the smaller half of a curve's payloads is known, its largest 20 % are scored.
- ``few_8``, ``few_24``: that many payloads of each curve are known, all others are scored.
- ``leave_nodes``: curves on fewer nodes are known, 2 -> 8 and 2 and 8 -> 128.
- ``leave_ranks_per_node``: of inter-node curves, each number of ranks per node is held out in turn.
- ``one_ranks_per_node``: only one is known in turn, and all others are scored.
- ``leave_collective``: one collective is predicted only from all others of its machine.
- ``pair_to_node``: within a node only groups of two ranks are known, the widest are scored.

In protocols that hold out topology, a group of scores is a collective among a number of ranks on a
number of nodes, since means over several would hide those that a law cannot resolve.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from forerun.benchmarks.protocols.scores import (
    PROTOCOLS,
    TEST_FRAC,
    Split,
    concat_scored,
    fit_network,
    payload_splits,
    score_collectives,
    splits_by_nodes,
    transfer_splits,
)
from forerun.calib.errors import ConfigError
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group

Payloads = NDArray[np.int64]
COLLECTIVE_PROTOCOLS = {
    "random": PROTOCOLS["collectives"]["random"],
    "small_to_large": "a collective with five payloads or more on one group shape",
    "few_8": "a collective with more than 8 payloads on one group shape",
    "few_24": "a collective with more than 24 payloads on one group shape",
    "leave_span": PROTOCOLS["collectives"]["leave_span"],
    "leave_nodes": "one fabric measured on three numbers of nodes, or on two above one",
    "leave_ranks_per_node": "one fabric across nodes with several numbers of ranks on each",
    "one_ranks_per_node": "one fabric across nodes with several numbers of ranks on each",
    "leave_collective": "one fabric measured with two collectives or more",
    "pair_to_node": "one node measured with two ranks and with more",
}
"""Requirements of each protocol on the table."""


def validate_collectives(
    frame: pd.DataFrame, *, seeds: Sequence[int], protocols: Sequence[str]
) -> pd.DataFrame:
    """Return scored rows of everything that the protocols hold out; a group is a collective.

    ``frame`` is a canonical table of collectives; flagged rows are neither fitted nor scored.  A
    protocol that no machine of the table supports has no rows.  Raises ``ConfigError`` for an
    unknown protocol.
    """
    unknown = sorted(set(protocols) - COLLECTIVE_PROTOCOLS.keys())
    if unknown:
        known = ", ".join(COLLECTIVE_PROTOCOLS)
        raise ConfigError(f"protocol {unknown[0]!r} is not known; choose from {known}")
    scored = (scored_rows(frame, protocol, seeds=seeds) for protocol in protocols)
    return concat_scored(rows for rows in scored if len(rows))


def scored_rows(
    frame: pd.DataFrame,
    protocol: str,
    *,
    seeds: Sequence[int],
    fit: Callable[[Mapping[Group, Samples], str], Any] = fit_network,
) -> pd.DataFrame:
    """Return scored rows of one protocol, over all machines and seeds, with ``nbytes``.

    There are no rows if no machine supports the protocol.
    """
    label = _topology if protocol in _TOPOLOGIES else _collective
    return score_collectives(frame, protocol, seeds, fit=fit, draw=splits, label=label)


def splits(machine: pd.DataFrame, protocol: str, seeds: Sequence[int]) -> Iterator[Split]:
    """Yield a protocol's splits of the rows of one machine; nothing if it does not apply."""
    if protocol in PROTOCOLS["collectives"]:
        yield from transfer_splits(machine, protocol, seeds)
    elif protocol in _TOPOLOGIES:
        yield from _TOPOLOGIES[protocol](machine)
    elif protocol == "small_to_large":
        # Small and large depend on payloads alone, so every seed gives the same split.
        yield from payload_splits(machine, np.random.default_rng(0), _small_and_large)
    else:
        few = partial(_few, int(protocol.removeprefix("few_")))
        for seed in seeds:
            yield from payload_splits(machine, np.random.default_rng(seed), few)


def _collective(group: Group) -> str:
    return group.collective.value


def _topology(group: Group) -> str:
    return f"{group.collective.value} {group.num_ranks} on {group.num_nodes}"


def _small_and_large(sizes: Payloads, _: np.random.Generator) -> tuple[Payloads, Payloads]:
    number = max(1, round(TEST_FRAC * len(sizes)))
    return sizes[: len(sizes) // 2], sizes[-number:]


def _few(number: int, sizes: Payloads, rng: np.random.Generator) -> tuple[Payloads, Payloads]:
    if len(sizes) <= number:
        return sizes[:0], sizes[:0]
    train = rng.choice(sizes, number, replace=False)
    return train, np.setdiff1d(sizes, train)


def _fewer_nodes(machine: pd.DataFrame) -> Iterator[Split]:
    nodes = machine["num_nodes"].to_numpy()
    return splits_by_nodes(nodes, lambda number: nodes < number)


def _ranks_per_node(machine: pd.DataFrame, *, is_one_known: bool = False) -> Iterator[Split]:
    """Yield each number of ranks per node in turn, held out or alone; intra-node rows are known."""
    nodes = machine["num_nodes"].to_numpy()
    is_far = nodes > 1
    ranks_per_node = machine["num_ranks"].to_numpy() / nodes
    for number in np.unique(ranks_per_node[is_far]):
        is_chosen = is_far & (ranks_per_node == number)
        others = is_far & ~is_chosen
        if others.any():
            test = others if is_one_known else is_chosen
            yield Split(train=~test, test=test)


def _one_ranks_per_node(machine: pd.DataFrame) -> Iterator[Split]:
    return _ranks_per_node(machine, is_one_known=True)


def _collectives(machine: pd.DataFrame) -> Iterator[Split]:
    collective = machine["collective"].to_numpy()
    for name in np.unique(collective):
        test = collective == name
        if not test.all():
            yield Split(train=~test, test=test)


def _pairs(machine: pd.DataFrame) -> Iterator[Split]:
    is_near = machine["num_nodes"].to_numpy() == 1
    ranks = machine["num_ranks"].to_numpy()
    train = is_near & (ranks == 2)
    if train.any() and (most := ranks[is_near].max()) > 2:
        yield Split(train=train, test=is_near & (ranks == most))


_TOPOLOGIES: Mapping[str, Callable[[pd.DataFrame], Iterator[Split]]] = {
    "leave_nodes": _fewer_nodes,
    "leave_ranks_per_node": _ranks_per_node,
    "one_ranks_per_node": _one_ranks_per_node,
    "leave_collective": _collectives,
    "pair_to_node": _pairs,
}
"""Protocols that hold out whole groups; every seed gives the same split."""

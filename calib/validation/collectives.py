"""Protocols on a canonical table of collectives: what is left out of the fit, and is scored.

A machine is a device on a fabric, a curve one collective among so many ranks on so many nodes of a
machine, a group (of scores) a collective.  All repeats of a payload are on one side of a split.

- ``random``: of each curve 20 % of its payloads, the smallest and the largest among them.
- ``small_to_large``: the smaller half of a curve's payloads is known, its largest 20 % are scored.
- ``few_8``, ``few_24``: so many payloads of each curve are known, all others are scored.
- ``leave_span``: curves on at most a quarter of the nodes are known, those on more are not; each
  number of nodes is scored by itself.  Some known curve has to cross nodes, or nothing at all is
  known of the network.  On machines of one node the most ranks are left out instead, and all
  smaller groups are known.
- ``leave_nodes``: the same with all curves on fewer nodes known, 2 -> 8 and 2 and 8 -> 128.
- ``leave_ranks_per_node``: of what crosses nodes, one number of ranks on each is left out in turn.
- ``one_ranks_per_node``: only one is known in turn, and all others are scored.
- ``leave_collective``: one collective is known only through all others of its machine.
- ``pair_to_node``: of one node only groups of two ranks are known, the widest are scored.

In those that leave topology out a group of scores is a collective among so many ranks on so many
nodes, since means over several hide which of them a law cannot tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..errors import ConfigError
from ..importers.own_format import CHOSEN
from ..network.cluster import stated_network
from ..network.collective_times import Transfers, fit_transfers
from ..network.curves import Samples
from ..network.groups import Group
from ..network.systems import network_prior
from ..records.cluster import StatedNodes
from ..workload.collectives import Collective
from .scores import joined
from .splits import Split

COLLECTIVE_PROTOCOLS = {
    "random": "a collective with five payloads or more on one group shape",
    "small_to_large": "a collective with five payloads or more on one group shape",
    "few_8": "a collective with more than 8 payloads on one group shape",
    "few_24": "a collective with more than 24 payloads on one group shape",
    "leave_span": "one fabric measured on several numbers of nodes or, on one node, of ranks",
    "leave_nodes": "one fabric measured on three numbers of nodes, or on two above one",
    "leave_ranks_per_node": "one fabric across nodes with several numbers of ranks on each",
    "one_ranks_per_node": "one fabric across nodes with several numbers of ranks on each",
    "leave_collective": "one fabric measured with two collectives or more",
    "pair_to_node": "one node measured with two ranks and with more",
}
"""What a table has to hold for each."""
_CURVE = ["collective", "num_ranks", "num_nodes"]
# Shorter curves leave nothing to score once a part is held out.
_LEAST_PAYLOADS = 5
_RANDOM_FRAC = 0.2
_LARGEST_FRAC = 0.2
_NODES_FACTOR = 4


def validate_collectives(
    frame: pd.DataFrame,
    *,
    seeds: Sequence[int],
    protocols: Sequence[str],
    cluster: StatedNodes | None = None,
) -> pd.DataFrame:
    """Scored rows of everything that the protocols leave out; a group is a collective.

    ``frame`` is a canonical table of collectives; flagged rows are neither fitted nor scored.  A
    protocol that no machine of the table can carry has no rows.  ``cluster`` states its nodes
    (``network.cluster``).  ``ConfigError`` for a protocol that is not known.
    """
    unknown = sorted(set(protocols) - COLLECTIVE_PROTOCOLS.keys())
    if unknown:
        known = ", ".join(COLLECTIVE_PROTOCOLS)
        raise ConfigError(f"protocol {unknown[0]!r} is not known; choose from {known}")
    fit = partial(fit_machine, cluster=cluster)
    found = (left_out(frame, protocol, seeds=seeds, fit=fit) for protocol in protocols)
    return joined(rows.sort_values("group", kind="stable") for rows in found if len(rows))


class TransferModel(Protocol):
    """What is fitted on a machine and scored."""

    def estimate(self, group: Group, nbytes: NDArray[np.float64]) -> Transfers:
        """Transfers of these payloads among the ranks of a group."""
        ...


def fit_machine(
    samples: Mapping[Group, Samples], device: str, *, cluster: StatedNodes | None = None
) -> TransferModel:
    """Our model of the curves of one machine, with what is stated of its nodes."""
    return fit_transfers(samples, stated_network(cluster or StatedNodes(), network_prior(device)))


def left_out(
    frame: pd.DataFrame,
    protocol: str,
    *,
    seeds: Sequence[int],
    fit: Callable[[Mapping[Group, Samples], str], TransferModel] = fit_machine,
) -> pd.DataFrame:
    """Scored rows of all that a protocol leaves out, over all machines and seeds, with ``nbytes``.

    No rows where no machine can carry the protocol.
    """
    parts = []
    for (device, _), machine in _usable(frame).groupby(["device", "fabric"], sort=True):
        for split in splits(machine, protocol, seeds):
            model = fit(_curves(machine[split.train]), str(device))
            parts += _estimated(model, machine[split.test], protocol)
    return joined(parts)


def splits(machine: pd.DataFrame, protocol: str, seeds: Sequence[int]) -> Iterator[Split]:
    """What a protocol leaves out of the rows of one machine; nothing where it cannot be run."""
    if protocol in _TOPOLOGIES:
        yield from _TOPOLOGIES[protocol](machine)
        return
    # The payloads alone decide what is small and what is large: every seed gives the same split.
    for seed in (0,) if protocol == "small_to_large" else seeds:
        yield from _payloads(machine, protocol, np.random.default_rng(seed))


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    known = [c.value for c in Collective if c is not Collective.OTHER]
    keep = (frame["flag"] == "") & (frame["num_ranks"] > 1) & frame["collective"].isin(known)
    rows = frame[keep & (frame["time_s"] > 0)]
    chosen = rows[CHOSEN] if CHOSEN in rows.columns else 0
    # Inside a node there is no other node to send to once.
    rows = rows.assign(**{CHOSEN: np.where(rows["num_nodes"] > 1, chosen, 0)})
    return rows.replace({"collective": {Collective.RECV.value: Collective.SEND.value}})


def _groups(rows: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    for _, curve in rows.groupby([*_CURVE, CHOSEN], sort=True):
        first = curve.iloc[0]
        group = Group(
            collective=Collective(first["collective"]),
            num_ranks=int(first["num_ranks"]),
            num_nodes=int(first["num_nodes"]),
            num_chosen=int(first[CHOSEN]),
        )
        yield group, curve


def _curves(rows: pd.DataFrame) -> dict[Group, Samples]:
    return {
        group: Samples(
            nbytes=curve["nbytes"].to_numpy(dtype=np.float64),
            time_s=curve["time_s"].to_numpy(dtype=np.float64),
            weight=np.ones(len(curve)),
        )
        for group, curve in _groups(rows)
    }


def _estimated(model: TransferModel, rows: pd.DataFrame, protocol: str) -> Iterator[pd.DataFrame]:
    for group, curve in _groups(rows):
        nbytes = curve["nbytes"].to_numpy(dtype=np.float64)
        found = model.estimate(group, nbytes)
        yield pd.DataFrame(
            {
                "protocol": protocol,
                "group": _label(group, protocol),
                "nbytes": nbytes,
                "measured_s": curve["time_s"].to_numpy(),
                "predicted_s": np.exp(found.log_time),
                "low_s": np.exp(found.log_time - found.half_width_log),
                "high_s": np.exp(found.log_time + found.half_width_log),
            }
        )


def _label(group: Group, protocol: str) -> str:
    name = group.collective.value
    if protocol not in _TOPOLOGIES or protocol == "leave_span":
        return name
    return f"{name} {group.num_ranks} on {group.num_nodes}"


def _payloads(machine: pd.DataFrame, protocol: str, rng: np.random.Generator) -> Iterator[Split]:
    """Payloads of each curve by a choice; curves with few payloads are left out altogether."""
    train, test = np.zeros((2, len(machine)), dtype=np.bool_)
    nbytes = machine["nbytes"].to_numpy()
    for rows in machine.groupby(_CURVE, sort=True).indices.values():
        sizes = np.unique(nbytes[rows])
        if len(sizes) >= _LEAST_PAYLOADS:
            known, scored = _chosen(protocol, sizes, rng)
            train[rows] = np.isin(nbytes[rows], known)
            test[rows] = np.isin(nbytes[rows], scored)
    if test.any():
        yield Split(train=train, test=test)


def _chosen(
    protocol: str, sizes: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """From the payloads of a curve those that are known and those that are scored."""
    if protocol == "small_to_large":
        number = max(1, round(_LARGEST_FRAC * len(sizes)))
        return sizes[: len(sizes) // 2], sizes[-number:]
    if protocol == "random":
        test = rng.choice(sizes, max(1, round(_RANDOM_FRAC * len(sizes))), replace=False)
        return np.setdiff1d(sizes, test), test
    number = int(protocol.removeprefix("few_"))
    if len(sizes) <= number:
        return sizes[:0], sizes[:0]
    train = rng.choice(sizes, number, replace=False)
    return train, np.setdiff1d(sizes, train)


def _spans(machine: pd.DataFrame) -> Iterator[Split]:
    nodes, ranks = machine["num_nodes"].to_numpy(), machine["num_ranks"].to_numpy()
    if nodes.max() > 1:
        yield from _by_nodes(nodes, lambda number: nodes <= number / _NODES_FACTOR)
        return
    test = ranks == ranks.max()
    if not test.all():
        yield Split(train=~test, test=test)


def _fewer_nodes(machine: pd.DataFrame) -> Iterator[Split]:
    nodes = machine["num_nodes"].to_numpy()
    return _by_nodes(nodes, lambda number: nodes < number)


def _by_nodes(
    nodes: NDArray[np.int64], is_known: Callable[[int], NDArray[np.bool_]]
) -> Iterator[Split]:
    """Each number of nodes in turn, where something that crosses nodes is known beside it."""
    for number in np.unique(nodes).tolist():
        train = is_known(number)
        if (nodes[train] > 1).any():
            yield Split(train=train, test=nodes == number)


def _ranks_per_node(machine: pd.DataFrame, *, is_one_known: bool = False) -> Iterator[Split]:
    """Each number of ranks a node in turn, left out or alone; what stays in a node is known."""
    nodes = machine["num_nodes"].to_numpy()
    is_far = nodes > 1
    held = machine["num_ranks"].to_numpy() / nodes
    for number in np.unique(held[is_far]):
        is_chosen = is_far & (held == number)
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
    "leave_span": _spans,
    "leave_nodes": _fewer_nodes,
    "leave_ranks_per_node": _ranks_per_node,
    "one_ranks_per_node": _one_ranks_per_node,
    "leave_collective": _collectives,
    "pair_to_node": _pairs,
}
"""Protocols that leave whole groups out; every seed gives the same split."""

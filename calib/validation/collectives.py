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
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ..errors import ConfigError
from ..network.collective_times import Transfers, fit_transfers
from ..network.curves import Samples
from ..network.groups import Group
from ..network.systems import network_prior
from ..workload.collectives import Collective
from .protocols import COLLECTIVE_PROTOCOLS
from .scores import Scored

Mask = NDArray[np.bool_]
PROTOCOLS = tuple(COLLECTIVE_PROTOCOLS)
_COLUMNS = ["group", "nbytes", "measured_s", "predicted_s", "low_s", "high_s"]
_CURVE = ["collective", "num_ranks", "num_nodes"]
_LEAST_PAYLOADS = 5
_RANDOM_FRAC = 0.2
_LARGEST_FRAC = 0.2
_NODES_FACTOR = 4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferSplit:
    """Rows of one machine that are fitted and rows that are scored, ``(rows,)`` each."""

    train: Mask
    test: Mask


def validate_collectives(
    frame: pd.DataFrame, name: str, *, seeds: Sequence[int], protocols: Sequence[str]
) -> list[Scored]:
    """Estimates of everything that the protocols leave out, one ``Scored`` a protocol and group.

    ``frame`` is a canonical table of collectives; flagged rows are neither fitted nor scored.  A
    protocol that no machine of the table can carry has no entry.  ``ConfigError`` for a protocol
    that is not known.
    """
    unknown = sorted(set(protocols) - set(PROTOCOLS))
    if unknown:
        raise ConfigError(f"protocol {unknown[0]!r} is none of {', '.join(PROTOCOLS)}; name one")
    scored: list[Scored] = []
    for protocol in protocols:
        scored += _by_group(left_out(frame, protocol, seeds=seeds), name, protocol)
    return scored


class TransferModel(Protocol):
    """What is fitted on a machine and scored."""

    def estimate(self, group: Group, nbytes: NDArray[np.float64]) -> Transfers:
        """Transfers of these payloads among the ranks of a group."""
        ...


def fit_machine(samples: Mapping[Group, Samples], device: str) -> TransferModel:
    """Our model of the curves of one machine."""
    return fit_transfers(samples, network_prior(device))


def left_out(
    frame: pd.DataFrame,
    protocol: str,
    *,
    seeds: Sequence[int],
    fit: Callable[[Mapping[Group, Samples], str], TransferModel] = fit_machine,
) -> pd.DataFrame:
    """Every row that a protocol leaves out, over all machines and seeds.

    Columns ``group`` (the collective), ``nbytes``, ``measured_s``, ``predicted_s`` and the ends of
    the 90 % interval ``low_s`` and ``high_s``; no rows where no machine can carry the protocol.
    """
    parts = []
    for (device, _), machine in _usable(frame).groupby(["device", "fabric"], sort=True):
        for split in splits(machine, protocol, seeds):
            model = fit(_curves(machine[split.train]), str(device))
            parts.append(_estimated(model, machine[split.test]))
    return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame(columns=_COLUMNS)


def splits(machine: pd.DataFrame, protocol: str, seeds: Sequence[int]) -> Iterator[TransferSplit]:
    """What a protocol leaves out of the rows of one machine; nothing where it cannot be run."""
    if protocol == "leave_span":
        yield from _spans(machine)
    elif protocol == "small_to_large":
        yield from _sizes(machine, _small_to_large, np.random.default_rng(0))
    else:
        for seed in seeds:
            yield from _sizes(machine, _CHOICES[protocol], np.random.default_rng(seed))


def _usable(frame: pd.DataFrame) -> pd.DataFrame:
    known = [c.value for c in Collective if c is not Collective.OTHER]
    keep = (frame["flag"] == "") & (frame["num_ranks"] > 1) & frame["collective"].isin(known)
    rows = frame[keep & (frame["time_s"] > 0)]
    return rows.replace({"collective": {Collective.RECV.value: Collective.SEND.value}})


def _groups(rows: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    for _, curve in rows.groupby(_CURVE, sort=True):
        first = curve.iloc[0]
        group = Group(
            collective=Collective(first["collective"]),
            num_ranks=int(first["num_ranks"]),
            num_nodes=int(first["num_nodes"]),
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


def _estimated(model: TransferModel, rows: pd.DataFrame) -> pd.DataFrame:
    parts = []
    for group, curve in _groups(rows):
        nbytes = curve["nbytes"].to_numpy(dtype=np.float64)
        found = model.estimate(group, nbytes)
        low, high = found.log_time - found.half_width_log, found.log_time + found.half_width_log
        columns = [nbytes, curve["time_s"], np.exp(found.log_time), np.exp(low), np.exp(high)]
        values = dict(zip(_COLUMNS[1:], columns, strict=True))
        parts.append(pd.DataFrame({"group": group.collective.value, **values}))
    return pd.concat(parts, ignore_index=True)


def _by_group(rows: pd.DataFrame, table: str, protocol: str) -> list[Scored]:
    return [
        Scored(
            table=table,
            protocol=protocol,
            group=str(group),
            measured_s=part["measured_s"].to_numpy(),
            predicted_s=part["predicted_s"].to_numpy(),
            low_s=part["low_s"].to_numpy(),
            high_s=part["high_s"].to_numpy(),
        )
        for group, part in rows.groupby("group", sort=True)
    ]


Choice = Callable[[NDArray[np.int64], np.random.Generator], tuple[NDArray, NDArray] | None]
"""From the payloads of a curve to those that are known and those that are scored."""


def _random(sizes: NDArray[np.int64], rng: np.random.Generator) -> tuple[NDArray, NDArray]:
    number = max(1, round(_RANDOM_FRAC * len(sizes)))
    test = rng.choice(sizes, number, replace=False)
    return np.setdiff1d(sizes, test), test


def _small_to_large(sizes: NDArray[np.int64], _: np.random.Generator) -> tuple[NDArray, NDArray]:
    number = max(1, round(_LARGEST_FRAC * len(sizes)))
    return sizes[: len(sizes) // 2], sizes[-number:]


def _few(number: int) -> Choice:
    def choose(
        sizes: NDArray[np.int64], rng: np.random.Generator
    ) -> tuple[NDArray, NDArray] | None:
        if len(sizes) <= number:
            return None
        train = rng.choice(sizes, number, replace=False)
        return train, np.setdiff1d(sizes, train)

    return choose


_CHOICES: Mapping[str, Choice] = {"random": _random, "few_8": _few(8), "few_24": _few(24)}


def _sizes(
    machine: pd.DataFrame, choose: Choice, rng: np.random.Generator
) -> Iterator[TransferSplit]:
    """Payloads of each curve by a choice; curves with few payloads are left out altogether."""
    train, test = np.zeros((2, len(machine)), dtype=np.bool_)
    nbytes = machine["nbytes"].to_numpy()
    for rows in machine.groupby(_CURVE, sort=True).indices.values():
        sizes = np.unique(nbytes[rows])
        chosen = choose(sizes, rng) if len(sizes) >= _LEAST_PAYLOADS else None
        if chosen is not None:
            train[rows] = np.isin(nbytes[rows], chosen[0])
            test[rows] = np.isin(nbytes[rows], chosen[1])
    if test.any():
        yield TransferSplit(train=train, test=test)


def _spans(machine: pd.DataFrame) -> Iterator[TransferSplit]:
    nodes, ranks = machine["num_nodes"].to_numpy(), machine["num_ranks"].to_numpy()
    if nodes.max() == 1:
        test = ranks == ranks.max()
        if not test.all():
            yield TransferSplit(train=~test, test=test)
        return
    for number in np.unique(nodes):
        train = nodes <= number / _NODES_FACTOR
        if (nodes[train] > 1).any():
            yield TransferSplit(train=train, test=nodes == number)

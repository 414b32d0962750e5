"""Times of transfers from published tables of collectives."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ..fit.priors import device_prior
from ..importers.own_format import CHOSEN
from ..network.cluster import on_domains, stated_network
from ..network.collective_times import CollectiveModel, fit_transfers
from ..network.curves import Samples
from ..network.groups import Group
from ..network.systems import REACHED_FRAC, NetworkPrior, network_prior
from ..records.cluster import StatedNodes
from ..workload.collectives import Collective

_MAX_ROWS = 400
"""Payloads of a group that its curve is drawn through; more are averaged."""


_GIGA = 1e9
_CARDS: tuple[tuple[str, float], ...] = (
    ("slingshot-10", 12.5 * _GIGA),
    ("slingshot-11", 25 * _GIGA),
    ("slingshot", 25 * _GIGA),
    ("xdr", 100 * _GIGA),
    ("ndr", 50 * _GIGA),
    ("hdr", 25 * _GIGA),
    ("edr", 12.5 * _GIGA),
)
"""Rates of one network card by the name of its generation."""


def network_of(place: str, device: str, stated: StatedNodes | None = None) -> NetworkPrior:
    """Links of a cluster: those usual for the device, with the network that its name tells, and
    what is stated of its nodes.

    >>> network_of("Alps (4xGH200, Slingshot-11)", "GH200").links.network_bytes_per_s
    22500000000.0
    """
    return on_domains(stated_network(stated or StatedNodes(), _named(place, device)))


def _named(place: str, device: str) -> NetworkPrior:
    usual = network_prior(device)
    words = place.lower()
    rate = next((rate for name, rate in _CARDS if re.search(rf"\b{name}\b", words)), None)
    if rate is None or usual.links is None:
        return usual
    links = replace(usual.links, network_bytes_per_s=REACHED_FRAC * rate)
    return replace(usual, links=links)


def transfer_tables(
    frames: Sequence[pd.DataFrame],
    *,
    device: str,
    network: NetworkPrior | None = None,
    is_flagged_used: bool = False,
) -> CollectiveModel:
    """Curves through all canonical tables of one device; without rows what its ``network`` says.

    A table of several fabrics (clusters, or versions of the library) counts with the one that has
    most rows.  Flagged rows are left out unless asked for.
    """
    prior = network or device_prior(device).network
    wanted = device_prior(device).name
    samples: dict[Group, Samples] = {}
    for frame in frames:
        is_here = [device_prior(str(name)).name == wanted for name in frame["device"]]
        rows = frame[np.array(is_here, dtype=bool)]
        if not is_flagged_used:
            rows = rows[rows["flag"] == ""]
        if len(rows):
            rows = rows[rows["fabric"] == rows["fabric"].value_counts().idxmax()]
            samples.update(_samples(rows))
    return fit_transfers(samples, prior)


def groups_of(rows: pd.DataFrame) -> Iterator[tuple[Group, pd.DataFrame]]:
    """The rows of each group of a canonical table; inside a node no token is sent to another node
    once."""
    chosen = rows[CHOSEN].fillna(0) if CHOSEN in rows.columns else 0
    rows = rows.assign(**{CHOSEN: np.where(rows["num_nodes"] > 1, chosen, 0)})
    for _, found in rows.groupby(["collective", "num_ranks", "num_nodes", CHOSEN]):
        first = found.iloc[0]
        group = Group(
            collective=Collective(str(first["collective"])),
            num_ranks=int(first["num_ranks"]),
            num_nodes=int(first["num_nodes"]),
            num_chosen=int(first[CHOSEN]),
        )
        if group.collective is not Collective.OTHER:
            yield group, found


def _samples(rows: pd.DataFrame) -> dict[Group, Samples]:
    out = {}
    for group, found in groups_of(rows):
        # A step adds up hundreds of equal transfers: their mean counts, not one that was lucky.
        ordered = found[["nbytes", "time_s"]].to_numpy(dtype=np.float64)
        ordered = ordered[np.argsort(ordered[:, 0], kind="stable")]
        means = pd.DataFrame(ordered, columns=["nbytes", "time_s"]).groupby("nbytes").mean()
        parts = np.array_split(means.reset_index().to_numpy(), min(len(means), _MAX_ROWS))
        nbytes, time_s = np.array([part.mean(axis=0) for part in parts]).T
        out[group] = Samples(nbytes=nbytes, time_s=time_s, weight=np.ones(len(parts)))
    return out

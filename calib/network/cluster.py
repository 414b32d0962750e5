"""What a user says of the nodes of a cluster, in place of what is usual for its GPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..errors import ConfigError
from .systems import NetworkPrior
from .topology import Joint, Origin

_COUNTS = ("num_gpus", "num_cards", "domain")
_RATES = {"node_bytes_per_s": "node_bytes_per_s", "card_bytes_per_s": "network_bytes_per_s"}
KEYS = ("joint", *_COUNTS, *_RATES)
"""Of a cluster file."""


def stated_network(values: Mapping[str, object], prior: NetworkPrior) -> NetworkPrior:
    """The prior with what is stated of nodes; no measurement overrules its counts and its joint.

    ``joint`` is how GPUs of a node are joined, ``num_gpus`` and ``num_cards`` are counted by node,
    ``domain`` is the number of ranks that NVLink joins.  ``node_bytes_per_s`` is the bus bandwidth
    inside a node, ``card_bytes_per_s`` that of one card, both as nccl-tests reaches them; they are
    where the measured ones start from.  ``ConfigError`` for a value that cannot be.

    >>> from .systems import network_prior
    >>> links = stated_network({"num_gpus": 4, "num_cards": 2}, network_prior("a100")).links
    >>> links.topology.cards_in_use(4), links.topology.origin("num_cards").value
    (2, 'stated')
    """
    unknown = sorted(values.keys() - set(KEYS))
    if unknown:
        raise ConfigError(f"{unknown[0]!r} of the cluster is none of {', '.join(KEYS)}")
    if prior.links is None:
        return prior
    topology = prior.links.topology
    changed: dict[str, object] = {n: _count(n, values[n]) for n in _COUNTS if n in values}
    if "joint" in values:
        changed["joint"] = _joint(values["joint"])
    origins = {**topology.origins, **dict.fromkeys(changed, Origin.STATED)}
    rates = {to: _rate(n, values[n]) for n, to in _RATES.items() if n in values}
    topology = replace(topology, **changed, origins=origins)  # type: ignore[arg-type]
    return replace(prior, links=replace(prior.links, topology=topology, **rates))


def _count(name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} {value!r} of the cluster is no whole number from 1 on")
    return value


def _rate(name: str, value: object) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not 0.0 < float(value) < float("inf"):  # type: ignore[arg-type]
        raise ConfigError(f"{name} {value!r} of the cluster is no rate above 0")
    return float(value)  # type: ignore[arg-type]


def _joint(value: object) -> Joint:
    known = {joint.value: joint for joint in Joint}
    if not isinstance(value, str) or value not in known:
        raise ConfigError(f"joint {value!r} of the cluster is none of {', '.join(known)}")
    return known[value]

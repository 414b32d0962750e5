"""A user's statements about nodes: they are applied, they last, and nonsense is refused."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.calib.errors import ConfigError
from forerun.calib.network.cluster import stated_network
from forerun.calib.network.collective_times import fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.network.systems import network_prior
from forerun.calib.records.cluster import GpuInterconnect, Origin, StatedNodes, stated_nodes
from forerun.calib.workload.collectives import Collective

NBYTES = 2.0 ** np.arange(10, 31)


def _group(num_ranks: int, num_nodes: int) -> Group:
    return Group(collective=Collective.ALL_GATHER, num_ranks=num_ranks, num_nodes=num_nodes)


def test_what_is_stated_is_told_from_what_is_usual() -> None:
    stated = StatedNodes(joint="mesh", num_gpus=4, card_bytes_per_s=10e9)
    links = stated_network(stated, network_prior("a100")).links
    assert links is not None
    assert links.topology.joint is GpuInterconnect.MESH
    assert links.topology.origin("joint") is Origin.STATED
    assert links.topology.origin("num_cards") is Origin.PRIOR
    assert links.network_bytes_per_s == 10e9


def test_nothing_stated_changes_nothing() -> None:
    for device in ("a100", "h100", "cpu", "unknown"):
        assert stated_network(StatedNodes(), network_prior(device)) == network_prior(device)


@pytest.mark.parametrize(
    "wrong",
    [
        {"nics": 4},
        {"num_cards": 0},
        {"num_cards": True},
        {"num_gpus": 2.5},
        {"joint": "torus"},
        {"joint": 3},
        {"card_bytes_per_s": float("nan")},
        {"card_bytes_per_s": "fast"},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="cluster"):
        stated_nodes(wrong)


def test_hosts_of_one_domain_are_one_node() -> None:
    """Two hosts of four in a rack of 72 differ from one by steps; 32 hosts are two racks."""
    prior = stated_network(StatedNodes(num_gpus=4, domain=72), network_prior("gb200"))
    samples = Samples(
        nbytes=NBYTES, time_s=8e-6 + 0.75 * NBYTES / 600e9, weight=np.ones(len(NBYTES))
    )
    model = fit_transfers({_group(4, 1): samples}, prior)
    two, racks = (model.estimate(_group(4 * n, n), NBYTES[-3:]) for n in (2, 32))
    assert np.exp(two.log_time) == pytest.approx(0.875 * NBYTES[-3:] / 600e9, rel=0.1)
    assert np.all(two.half_width_log < 0.3)
    # Nothing across racks was measured: the prior's network, far and wide.
    assert np.all(np.isinf(racks.octaves)) and np.all(racks.log_time > two.log_time)

"""An exchange that sends a token once to each node: two planted bounds, each carried by its own."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.calib.network.collective_times import fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group
from forerun.calib.network.once_per_node import (
    as_all_to_all,
    copies_to_far_nodes,
    copies_to_ranks,
)
from forerun.calib.network.systems import network_prior
from forerun.calib.workload.collectives import Collective

H100 = network_prior("NVIDIA H100 80GB HBM3")
TOKENS = 2.0 ** np.arange(0, 18)
NBYTES = 7168 * 2
CROWDED = 1.16
"""Growth of the cards' time with each doubling of nodes, as in public tables in the mean."""


def _group(nodes: int) -> Group:
    return Group(
        collective=Collective.ALL_TO_ALL, num_ranks=8 * nodes, num_nodes=nodes, num_chosen=8
    )


def _payload(group: Group, tokens: np.ndarray) -> np.ndarray:
    return tokens * NBYTES * copies_to_ranks(group)


def _time_s(group: Group, copy_rate: float, card_rate: float) -> np.ndarray:
    by_copies = _payload(group, TOKENS) / copy_rate
    doublings = np.log2(group.num_nodes / 2)
    by_cards = TOKENS * NBYTES * copies_to_far_nodes(group) / card_rate * CROWDED**doublings
    return 60e-6 * (1 + 0.4 * doublings) + np.maximum(by_copies, by_cards)


@pytest.mark.parametrize(("copy_rate", "nodes"), [(60e9, 4), (60e9, 8), (400e9, 4), (400e9, 8)])
def test_copies_or_cards_bound_it(copy_rate: float, nodes: int) -> None:
    """60 GB/s of copies hide the cards on 2 nodes and on 8; 400 GB/s hide neither."""
    seen, wanted = _group(2), _group(nodes)
    times = _time_s(seen, copy_rate, 45e9)
    samples = Samples(nbytes=_payload(seen, TOKENS), time_s=times, weight=np.ones(len(TOKENS)))
    model = fit_transfers({seen: samples}, H100)
    values = np.exp(model.estimate(wanted, _payload(wanted, TOKENS)).log_time)
    assert values == pytest.approx(_time_s(wanted, copy_rate, 45e9), rel=0.15)


def test_a_token_goes_to_fewer_nodes_than_ranks() -> None:
    for nodes in (2, 4, 8):
        group = _group(nodes)
        assert 0 < copies_to_far_nodes(group) < copies_to_ranks(group) <= 8
        assert copies_to_far_nodes(group) <= nodes - 1


def test_where_no_exchange_was_measured_one_rank_of_each_node_swaps() -> None:
    """By hand: of 16 ranks on two nodes a token goes to both, and the card carries half of that."""
    group = _group(2)
    plain = Group(collective=Collective.ALL_TO_ALL, num_ranks=2, num_nodes=2)
    model = fit_transfers({}, H100)
    values = model.estimate(group, _payload(group, TOKENS)).log_time
    as_plain = np.exp(model.estimate(plain, 2.0 * TOKENS * NBYTES).log_time)
    assert values == pytest.approx(np.log(np.maximum(70e-6, as_plain)), abs=5e-3)
    assert as_all_to_all(group)[0] == plain


@pytest.mark.parametrize(
    ("nodes", "mib", "measured_us"),
    [(2, 1.1, 64), (2, 372.6, 1659), (4, 1.2, 101), (4, 414.5, 3586), (8, 1.3, 150)],
)
def test_before_any_exchange_was_measured_its_latency_counts(
    nodes: int, mib: float, measured_us: float
) -> None:
    """DeepEP's dispatch on H100 with 20 multiprocessors (aiconfigurator, SGLang 0.5.0)."""
    transfers = fit_transfers({}, H100).estimate(_group(nodes), np.array([mib * 2**20]))
    assert 1e6 * np.exp(transfers.log_time[0]) == pytest.approx(measured_us, rel=0.6)


def test_a_measured_exchange_speaks_for_others_and_not_for_plain_ones() -> None:
    """Copies at 20 GB/s, a third of the card: an all-to-all of NCCL knows nothing of that."""
    seen, wanted = _group(2), _group(4)
    times = _time_s(seen, 20e9, 45e9)
    samples = Samples(nbytes=_payload(seen, TOKENS), time_s=times, weight=np.ones(len(TOKENS)))
    model, bare = fit_transfers({seen: samples}, H100), fit_transfers({}, H100)
    large = _payload(wanted, TOKENS)[-3:]
    slower = model.estimate(wanted, large).log_time - bare.estimate(wanted, large).log_time
    assert (slower > np.log(1.5)).all()
    assert model.has(seen) and not model.has(wanted)

"""Groups that another one stands in for: bridges, other collectives, how far off they may be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.network.collective_times import fit_transfers
from forerun.calib.network.curves import Samples, Vector
from forerun.calib.network.groups import Group
from forerun.calib.network.nccl_tuner import TunedTime
from forerun.calib.network.systems import network_prior
from forerun.calib.records.cluster import GpuInterconnect
from forerun.calib.workload.collectives import Collective

NBYTES: Vector = 2.0 ** np.arange(10.0, 31.0)
A100 = network_prior("NVIDIA A100-SXM4-80GB")


def _group(collective: Collective, ranks: int, nodes: int = 1) -> Group:
    return Group(collective=collective, num_ranks=ranks, num_nodes=nodes)


def _samples(time_s: Vector) -> Samples:
    return Samples(nbytes=NBYTES, time_s=time_s, weight=np.ones(len(NBYTES)))


def test_a_pair_with_a_bridge_tells_of_pcie_beyond_it() -> None:
    """Pairs of A100 cards reduce at 190 GB/s, four of them at 15.8 (vidur, 256 MiB)."""
    prior = network_prior("NVIDIA A100 80GB PCIe")
    assert prior.links is not None
    assert prior.links.topology.joint is GpuInterconnect.BRIDGE
    pair = _group(Collective.ALL_REDUCE, 2)
    model = fit_transfers({pair: _samples(30e-6 + NBYTES / 190e9)}, prior)
    transfers = model.estimate(_group(Collective.ALL_REDUCE, 4), np.array([2.0**28]))
    assert 2.0**28 / np.exp(transfers.log_time[0]) == pytest.approx(15.8e9, rel=0.15)


@pytest.mark.parametrize("step_us", [0.5, 2.0])
def test_a_step_is_as_long_as_groups_of_two_lengths_say(step_us: float) -> None:
    """Rings of two and of four ranks tell what a step takes where it is not the 0.75 us of the
    device's prior: those of eight have the launch and their own steps."""
    launch_us = 6.0
    rings = {Collective.ALL_GATHER: 1, Collective.REDUCE_SCATTER: 1, Collective.ALL_REDUCE: 2}
    samples = {
        _group(way, n): _samples(
            1e-6 * (launch_us + passes * (n - 1) * step_us) + passes * (n - 1) / n * NBYTES / 350e9
        )
        for way, passes in rings.items()
        for n in (2, 4)
    }
    model = fit_transfers(samples, network_prior("NVIDIA H100 80GB HBM3"))
    transfers = model.estimate(_group(Collective.ALL_GATHER, 8), np.array([1024.0]))
    assert 1e6 * np.exp(transfers.log_time[0]) == pytest.approx(launch_us + 7 * step_us, rel=0.08)


@pytest.mark.parametrize("factor", [0.5, 2.0])
def test_latency_of_another_collective_is_half_its_own(factor: float) -> None:
    """Small gathers that take so many times what NCCL expects say half as much of all-reduces; of
    large ones they say all."""
    assert A100.links is not None
    gather, reduce = (_group(c, 32, 8) for c in (Collective.ALL_GATHER, Collective.ALL_REDUCE))
    priced = TunedTime(group=gather, links=A100.links)(NBYTES)
    model = fit_transfers({gather: _samples(factor * priced)}, A100)
    wanted = TunedTime(group=reduce, links=model.fitted_prior.links or A100.links)(NBYTES)
    ratio = np.exp(model.estimate(reduce, NBYTES).log_time) / wanted
    if factor > 1.0:
        assert 1.0 < ratio[0] < factor
    else:
        assert factor < ratio[0] < 1.0
    assert ratio[-1] == pytest.approx(1.0, rel=0.15)  # the cards' rate has been found


def test_groups_that_agree_with_each_other_make_intervals_narrow() -> None:
    """Four collectives by one law, or each with a factor of its own: 16 nodes are foretold from 8,
    4 and 2 in either, with intervals that know which."""
    assert A100.links is not None
    rng = np.random.default_rng(0)
    half_widths_log = []
    for scatter_log in (0.0, 0.7):
        samples = {}
        for collective in (Collective.ALL_GATHER, Collective.ALL_REDUCE, Collective.REDUCE_SCATTER):
            for nodes in (2, 4, 8):
                group = _group(collective, 8 * nodes, nodes)
                law = TunedTime(group=group, links=A100.links)(NBYTES)
                samples[group] = _samples(law * float(np.exp(scatter_log * rng.normal())))
        model = fit_transfers(samples, A100)
        wanted = _group(Collective.ALL_GATHER, 128, 16)
        half_widths_log.append(float(model.estimate(wanted, NBYTES[-1:]).half_width_log[0]))
    assert half_widths_log[0] < 0.1 < 2 * half_widths_log[0] < half_widths_log[1]


def test_where_nothing_was_measured_another_machine_says_half_of_what_it_differs() -> None:
    """Transfers on A100 four times as long as expected: on H100 twice as long, within a factor of
    2.7 in a node and 7.4 between nodes; nothing of groups that neither of both knows."""
    pair, eight = (_group(Collective.ALL_GATHER, n, n // 2) for n in (2, 8))
    assert A100.links is not None
    there = {
        group: _samples(4.0 * TunedTime(group=group, links=A100.links)(NBYTES))
        for group in (pair, eight)
    }
    prior = network_prior("NVIDIA H100 80GB HBM3")
    assert prior.links is not None
    alone = fit_transfers({}, prior)
    model = replace(alone, like=fit_transfers(there, A100))
    for group, width in ((pair, 1.0), (eight, 2.0)):
        transfers = model.estimate(group, NBYTES)
        expected = TunedTime(group=group, links=prior.links)(NBYTES)
        assert np.exp(transfers.log_time) == pytest.approx(2.0 * expected, rel=0.01)
        assert transfers.half_width_log == pytest.approx(width, rel=0.1)
        assert np.isfinite(transfers.octaves).all() and (transfers.octaves > 0).all()
    far_only = replace(alone, like=fit_transfers({eight: there[eight]}, A100))
    assert (far_only.estimate(pair, NBYTES).octaves == np.inf).all()
    cpu = replace(fit_transfers({}, network_prior("cpu")), like=fit_transfers(there, A100))
    assert (cpu.estimate(pair, NBYTES).octaves == np.inf).all()


# Bytes/s of a large payload by nodes and H100 on each (meta-pytorch/autoparallel,
# cost_models/h100_nvswitch_roce_400g.py, NCCL 2.27.5).
PUBLISHED = {
    Collective.ALL_REDUCE: {
        (2, 2): 88.5e9,
        (4, 2): 54.0e9,
        (8, 2): 50.6e9,
        (2, 4): 165.2e9,
        (4, 4): 101.0e9,
        (16, 4): 94.7e9,
    },
    Collective.REDUCE_SCATTER: {(2, 1): 80.3e9, (4, 1): 57.3e9, (8, 1): 50.4e9},
    Collective.ALL_GATHER: {
        (2, 2): 115.9e9,
        (8, 2): 99.1e9,
        (2, 4): 209.7e9,
        (16, 4): 199.4e9,
        (32, 4): 194.7e9,
    },
}


@pytest.mark.parametrize(
    ("way", "per_node"),
    [(way, n) for way, rates in PUBLISHED.items() for nodes, n in rates if nodes == 2],
)
def test_more_nodes_follow_from_two(way: Collective, per_node: int) -> None:
    """Trees between two nodes send half of what rings and other trees do."""
    rates = {k: rate for k, rate in PUBLISHED[way].items() if k[1] == per_node}
    two = _group(way, 2 * per_node, 2)
    prior = network_prior("NVIDIA H100 80GB HBM3")
    model = fit_transfers({two: _samples(20e-6 + NBYTES / rates[2, per_node])}, prior)
    nbytes = np.array([2.0**32])
    for (nodes, _), rate in rates.items():
        log_time = model.estimate(_group(way, nodes * per_node, nodes), nbytes).log_time
        assert nbytes / np.exp(log_time) == pytest.approx(rate, rel=0.1)


@pytest.mark.parametrize("way", [Collective.REDUCE_SCATTER, Collective.ALL_REDUCE])
def test_a_pair_of_ranks_does_not_fill_its_cards(way: Collective) -> None:
    rates = {**PUBLISHED[way], **({(2, 1): 41.9e9} if way is Collective.ALL_REDUCE else {})}
    model = fit_transfers({}, network_prior("NVIDIA H100 80GB HBM3"))
    nbytes = np.array([2.0**32])
    log_time = model.estimate(_group(way, 2, 2), nbytes).log_time
    assert nbytes / np.exp(log_time) == pytest.approx(rates[2, 1], rel=0.05)


@given(
    way=st.sampled_from([Collective.ALL_REDUCE, Collective.ALL_GATHER, Collective.ALL_TO_ALL]),
    per_node=st.sampled_from([1, 2, 4, 8]),
    seen=st.sampled_from([2, 4]),
    rate=st.floats(0.3, 1.5),
    log_nbytes=st.floats(20.0, 33.0),
)
def test_a_measured_group_never_makes_more_nodes_faster(
    way: Collective, per_node: int, seen: int, rate: float, log_nbytes: float
) -> None:
    prior = network_prior("NVIDIA H100 80GB HBM3")
    assert prior.links is not None
    group = _group(way, seen * per_node, seen)
    times = TunedTime(group=group, links=prior.links)(NBYTES) / rate
    model = fit_transfers({group: _samples(times)}, prior)
    nbytes = np.array([2.0**log_nbytes])
    before, after = (
        model.estimate(_group(way, nodes * per_node, nodes), nbytes).log_time[0]
        for nodes in (2 * seen, 4 * seen)
    )
    assert before <= after + 1e-9

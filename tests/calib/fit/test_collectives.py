"""Planted latency and bandwidth come back, and carry over to groups that were not measured."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.fit.estimates import Source
from forerun.calib.network._topology import CONGESTION_LOG, Topology
from forerun.calib.network.collective_times import CollectiveModel, fit_transfers
from forerun.calib.network.curves import Samples
from forerun.calib.network.groups import Group, bus_factor, num_nodes, ring_steps
from forerun.calib.network.nccl_tuner import Architecture, LinkClass, Wire
from forerun.calib.network.systems import NetworkPrior, network_prior
from forerun.calib.records.cluster import Origin
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole

LINK = NetworkPrior(step_s=30e-6, bus_bytes_per_s=2e9)
SIZES = [1 << k for k in range(12, 27, 2)]


def _call(
    nbytes: int,
    *,
    collective: Collective = Collective.ALL_REDUCE,
    role: GroupRole = GroupRole.TP,
    num_ranks: int = 2,
) -> CollectiveCall:
    return CollectiveCall(collective=collective, role=role, num_ranks=num_ranks, nbytes=nbytes)


def _true_s(call: CollectiveCall) -> float:
    passed = bus_factor(call.collective, call.num_ranks) * call.nbytes
    steps = ring_steps(call.collective, call.num_ranks)
    return steps * LINK.step_s + passed / LINK.bus_bytes_per_s


@pytest.fixture
def fit(make_table, planted):
    def run(calls, *, noise: float = 0.05, seed: int = 0, **kwargs) -> Calibration:
        rng = np.random.default_rng(seed)
        times = {call: _true_s(call) * float(np.exp(noise * rng.normal())) for call in calls}
        return calibrate(make_table(planted(256), times, **kwargs), device="cpu")

    return run


def test_planted_constants_come_back(fit) -> None:
    calibration = fit([_call(n, num_ranks=4) for n in SIZES])
    (row,) = calibration.summary()["collectives"]
    assert row["alpha_s"] == pytest.approx(6 * LINK.step_s, rel=0.1)
    assert row["bytes_per_s"] == pytest.approx(LINK.bus_bytes_per_s / 1.5, rel=0.1)
    assert row["left_out_error_frac"] < 0.1


def test_one_wild_sample_does_not_pull_the_fit(fit, make_table, planted) -> None:
    times = {_call(n): _true_s(_call(n)) for n in SIZES}
    times[_call(SIZES[3])] *= 8
    calibration = calibrate(make_table(planted(256), times), device="cpu")
    (row,) = calibration.summary()["collectives"]
    assert row["alpha_s"] == pytest.approx(2 * LINK.step_s, rel=0.15)
    assert row["bytes_per_s"] == pytest.approx(LINK.bus_bytes_per_s, rel=0.15)


@pytest.mark.parametrize(
    "call",
    [
        _call(1 << 21, num_ranks=8),
        _call(1 << 21, collective=Collective.ALL_GATHER, num_ranks=4),
        _call(1 << 21, collective=Collective.REDUCE_SCATTER, role=GroupRole.DP),
        _call(1 << 21, collective=Collective.SEND, role=GroupRole.PP),
        _call(1 << 12, collective=Collective.BROADCAST, num_ranks=4),
    ],
)
def test_unsampled_groups_follow_from_the_ring(fit, call: CollectiveCall) -> None:
    result = fit([_call(n) for n in SIZES]).collectives([call])
    assert result.time_s[0] == pytest.approx(_true_s(call), rel=0.15)
    assert result.sources == (Source.EXTRAPOLATED,)


def test_sizes_between_are_fitted_and_beyond_extrapolated(fit) -> None:
    calibration = fit([_call(n) for n in SIZES])
    calls = [_call(SIZES[2]), _call(3 << 20), _call(1 << 28), _call(1 << 34)]
    result = calibration.collectives(calls)
    assert result.sources == (
        Source.MEASURED,
        Source.FITTED,
        Source.EXTRAPOLATED,
        Source.EXTRAPOLATED,
    )
    assert result.time_s == pytest.approx([_true_s(c) for c in calls], rel=0.2)
    assert np.all(np.diff(result.sigma_log) > 0)


def test_one_size_alone_carries_its_neighbours(fit) -> None:
    """Every alpha-beta law through one point lies between all latency and all bandwidth."""
    known_s = _true_s(_call(1 << 20))
    result = fit([_call(1 << 20)], noise=0.0).collectives([_call(1 << 19), _call(1 << 22)])
    assert known_s / 2 <= result.time_s[0] <= known_s
    assert known_s <= result.time_s[1] <= known_s * 4


def test_a_receive_is_the_other_end_of_a_send(fit) -> None:
    calibration = fit([_call(1 << 20, collective=Collective.SEND, role=GroupRole.PP)])
    calls = [
        _call(1 << 20, collective=kind, role=GroupRole.PP, num_ranks=n)
        for kind in (Collective.SEND, Collective.RECV)
        for n in (2, 4)
    ]
    result = calibration.collectives(calls)
    assert set(result.sources) == {Source.MEASURED}
    assert len(set(result.time_s.tolist())) == 1


def test_nothing_sampled_is_a_wide_prior_and_one_rank_costs_nothing(fit) -> None:
    result = fit([]).collectives([_call(1 << 20), _call(1 << 20, num_ranks=1)])
    assert result.sources[0] is Source.PRIOR
    assert result.sigma_log[0] >= 0.5
    assert result.time_s[0] > 0
    assert (result.time_s[1], result.sigma_log[1]) == (0.0, 0.0)


def test_a_bound_is_never_taken_for_a_measurement(fit) -> None:
    result = fit([_call(1 << 20)], is_bound=True).collectives([_call(1 << 20)])
    assert result.sources != (Source.MEASURED,)
    assert result.sigma_log[0] > 0.05


def test_transfers_never_get_faster_with_size(fit) -> None:
    calibration = fit([_call(n) for n in SIZES], noise=0.02)
    times = calibration.collectives([_call(1 << k) for k in range(8, 32)]).time_s
    assert np.all(np.diff(times) >= -1e-2 * times[:-1])


# On GPUs: measured curves are interpolated, carried to other groups, and priced by NCCL's model.

A100 = network_prior("NVIDIA A100-SXM4-80GB")
POWERS = 2.0 ** np.arange(10, 31)


def _group(collective: Collective, num_ranks: int, nodes: int = 1) -> Group:
    return Group(collective=collective, num_ranks=num_ranks, num_nodes=nodes)


def _samples(nbytes: np.ndarray, time_s: np.ndarray) -> Samples:
    return Samples(nbytes=nbytes, time_s=time_s, weight=np.ones(len(nbytes)))


def _one(group: Group, time_s: np.ndarray) -> CollectiveModel:
    return fit_transfers({group: _samples(POWERS, time_s)}, A100)


def _ring_s(group: Group, nbytes: np.ndarray, *, hop_s: float, bus: float) -> np.ndarray:
    """A launch, then steps that each take a hop and the bytes of a chunk."""
    passes = 2 if group.collective is Collective.ALL_REDUCE else 1
    steps = passes * (group.num_ranks - 1)
    return A100.base_s + steps * (hop_s + nbytes / group.num_ranks / bus)


def test_a_curve_keeps_a_bend_that_no_law_has() -> None:
    group = _group(Collective.ALL_REDUCE, 8)
    bent = (2e-5 + POWERS / 1e11) * np.where(POWERS > 2**20, 1.0, 1.6)
    between = np.sqrt(POWERS[1:] * POWERS[:-1])
    between = between[np.abs(np.log2(between / 2**20)) > 1]
    transfers = _one(group, bent).estimate(group, between)
    true = (2e-5 + between / 1e11) * np.where(between > 2**20, 1.0, 1.6)
    assert np.exp(transfers.log_time) == pytest.approx(true, rel=0.06)


def test_repeats_are_joined_by_their_median() -> None:
    group = _group(Collective.ALL_GATHER, 8)
    true = 2e-5 + POWERS / 1e11
    repeats = np.concatenate([0.99 * true, true, 9.0 * true])
    model = fit_transfers({group: _samples(np.tile(POWERS, 3), repeats)}, A100)
    transfers = model.estimate(group, POWERS)
    assert np.exp(transfers.log_time) == pytest.approx(true, rel=1e-3)
    assert np.exp(transfers.log_time + transfers.half_width_log).min() > 0


def test_scattered_neighbours_are_smoothed() -> None:
    group = _group(Collective.ALL_GATHER, 4)
    rng = np.random.default_rng(0)
    nbytes = np.linspace(2**28, 2**31, 800)
    true = nbytes / 2e11
    slowed = np.where(rng.random(800) < 0.2, 3.0, 1.0) * np.exp(0.01 * rng.normal(size=800))
    model = fit_transfers({group: _samples(nbytes, true * slowed)}, A100)
    transfers = model.estimate(group, nbytes)
    assert np.median(np.abs(np.exp(transfers.log_time) / true - 1)) < 0.01
    assert np.mean(np.abs(np.exp(transfers.log_time) / true - 1)) < 0.05


def test_the_same_rows_in_another_order_give_the_same_model() -> None:
    group = _group(Collective.REDUCE_SCATTER, 4)
    rng = np.random.default_rng(1)
    times = (2e-5 + POWERS / 1e11) * np.exp(0.1 * rng.normal(size=len(POWERS)))
    order = rng.permutation(len(POWERS))
    shuffled = fit_transfers({group: _samples(POWERS[order], times[order])}, A100)
    payloads = np.geomspace(8, 2**33, 50)
    for name in ("log_time", "half_width_log"):
        first, second = (
            getattr(model.estimate(group, payloads), name)
            for model in (_one(group, times), shuffled)
        )
        assert first == pytest.approx(second, rel=1e-12)


def test_small_payloads_alone_are_continued_by_the_price_of_large_ones() -> None:
    """Up to 64 KiB a transfer is latency; NCCL's figures then say what the bytes cost."""
    group = _group(Collective.ALL_REDUCE, 8)
    true = 2e-5 + 1.75 * POWERS / 230e9
    few = POWERS <= 2**16
    model = fit_transfers({group: _samples(POWERS[few], true[few])}, A100)
    transfers = model.estimate(group, POWERS[-4:])
    assert np.exp(transfers.log_time) == pytest.approx(true[-4:], rel=0.3)
    assert np.all(transfers.half_width_log > 0.3)


@pytest.mark.parametrize(
    ("seen", "wanted"),
    [
        (_group(Collective.ALL_GATHER, 8, 2), _group(Collective.ALL_GATHER, 32, 8)),
        (_group(Collective.ALL_GATHER, 8, 2), _group(Collective.REDUCE_SCATTER, 64, 16)),
    ],
)
def test_a_planted_ring_is_carried_exactly(seen: Group, wanted: Group) -> None:
    model = _one(seen, _ring_s(seen, POWERS, hop_s=3e-6, bus=2e10))
    payloads = POWERS[6:-6]
    values = np.exp(model.estimate(wanted, payloads).log_time)
    assert values == pytest.approx(_ring_s(wanted, payloads, hop_s=3e-6, bus=2e10), rel=0.02)


@pytest.mark.parametrize("seen", [2, 4])
@pytest.mark.parametrize("way", [Collective.ALL_GATHER, Collective.ALL_REDUCE])
def test_ranks_of_a_node_differ_by_their_steps_and_bytes(seen: int, way: Collective) -> None:
    """Hops of 1 us and links of 230 GB/s; a change of protocol at 1 MiB costs all the same 9 us."""
    jump_s = np.where(POWERS > 2**20, 9e-6, 0.0)

    def planted_s(num_ranks: int) -> np.ndarray:
        group = _group(way, num_ranks)
        local_s = 0.4 * POWERS / num_ranks / 230e9
        return _ring_s(group, POWERS, hop_s=1e-6, bus=230e9) + local_s + jump_s

    values = np.exp(
        _one(_group(way, seen), planted_s(seen)).estimate(_group(way, 8), POWERS).log_time
    )
    assert values == pytest.approx(planted_s(8), rel=0.06)


@pytest.mark.parametrize(("num_cards", "per_node"), [(8, 4), (8, 2), (1, 4)])
def test_rings_share_the_cards_in_use(num_cards: int, per_node: int) -> None:
    """Measured with one rank a node, and with eight; asked for a number between them."""
    links = LinkClass(
        wire=Wire.NVLINK,
        generation=Architecture.AMPERE,
        num_channels=24,
        node_bytes_per_s=230e9,
        network_bytes_per_s=22e9,
        topology=Topology(num_cards=num_cards, origins={"num_cards": Origin.STATED}),
    )
    prior = replace(A100, links=links)
    large = POWERS[-6:] * 64
    known, result = {}, {}
    for num_local in (1, per_node):
        group = _group(Collective.ALL_GATHER, 4 * num_local, 4)
        bus = 20e9 * links.topology.cards_in_use(num_local)
        known[num_local] = group, _ring_s(group, large, hop_s=3e-6, bus=bus)
    model = fit_transfers({known[1][0]: _samples(large, known[1][1])}, prior)
    result = np.exp(model.estimate(known[per_node][0], large).log_time)
    assert result == pytest.approx(known[per_node][1], rel=0.06)
    assert model.fitted_prior.links is not None
    assert model.fitted_prior.links.topology.origin("num_cards") is Origin.STATED


def test_another_ring_stands_in_before_an_all_to_all() -> None:
    """An all-reduce takes twice what a gather on equal links does, an all-to-all tells nothing."""
    reduce, swap = (_group(c, 32, 4) for c in (Collective.ALL_REDUCE, Collective.ALL_TO_ALL))
    gather = _group(Collective.ALL_GATHER, 16, 2)
    times = {reduce: 1e-4 + 2 * POWERS / 40e9, swap: 1e-3 + POWERS / 1e9}
    both = fit_transfers({g: _samples(POWERS, t) for g, t in times.items()}, A100)
    alone = fit_transfers({swap: _samples(POWERS, times[swap])}, A100)
    ring = both.estimate(gather, POWERS[-3:])
    assert np.exp(ring.log_time) == pytest.approx(POWERS[-3:] / 40e9, rel=0.15)
    last = alone.estimate(gather, POWERS[-3:])
    assert np.all(last.half_width_log > 2 * ring.half_width_log)


def test_trees_grow_with_the_logarithm_of_the_nodes() -> None:
    """Hops of 5.8 us: 22 us on two nodes of four, 45.2 us on eight."""
    seen, wanted = _group(Collective.ALL_REDUCE, 8, 2), _group(Collective.ALL_REDUCE, 32, 8)
    model = _one(seen, 22e-6 + 1.75 * POWERS / 36e9)
    small, large = np.exp(model.estimate(wanted, np.array([1024.0, 2.0**30])).log_time)
    assert small == pytest.approx(45.2e-6, rel=0.1)
    assert large == pytest.approx(2 * 31 / 32 * 2**30 / 36e9, rel=0.03)


def test_peers_of_an_all_to_all_wait_for_their_turn() -> None:
    """One post of 5 us a far peer on top of a launch and a hop; 4 far peers become 28, and where
    bytes count the middle of the network is more crowded."""
    seen, wanted = _group(Collective.ALL_TO_ALL, 8, 2), _group(Collective.ALL_TO_ALL, 32, 8)
    model = _one(seen, 22.4e-6 + 4 * (5e-6 + POWERS / 8 / 20e9))
    payloads = POWERS[4:-4]
    values = np.exp(model.estimate(wanted, payloads).log_time)
    free_s = 22.4e-6 + 28 * (5e-6 + payloads / 32 / 20e9)
    assert values[:4] == pytest.approx(free_s[:4], rel=0.03)
    assert np.all((values > 0.97 * free_s) & (values < np.exp(2 * CONGESTION_LOG) * 1.01 * free_s))


def test_links_inside_a_node_say_nothing_of_the_network() -> None:
    model = _one(_group(Collective.ALL_REDUCE, 8), 2e-5 + POWERS / 1e11)
    transfers = model.estimate(_group(Collective.ALL_REDUCE, 32, 4), POWERS)
    assert np.all(np.isinf(transfers.octaves))
    assert np.all(transfers.half_width_log >= 1.0)


def test_before_any_sample_nccl_is_asked() -> None:
    transfers = fit_transfers({}, A100).estimate(
        _group(Collective.ALL_REDUCE, 8), np.array([2.0**30])
    )
    assert np.all(np.isinf(transfers.octaves))
    assert np.exp(transfers.log_time[0]) == pytest.approx(1.75 * 2**30 / 230e9, rel=0.02)


def test_intervals_cover_planted_noise_and_widen_with_distance() -> None:
    group = _group(Collective.ALL_REDUCE, 8)
    rng = np.random.default_rng(3)
    nbytes = np.geomspace(2**12, 2**30, 300)
    true = 2e-5 + nbytes / 1e11
    known = rng.random(300) < 0.5
    noisy = true * np.exp(0.08 * rng.normal(size=300))
    model = fit_transfers({group: _samples(nbytes[known], noisy[known])}, A100)
    transfers = model.estimate(group, nbytes[~known])
    inside = np.abs(transfers.log_time - np.log(noisy[~known])) <= transfers.half_width_log
    assert 0.82 <= inside.mean() <= 0.98
    far = model.estimate(group, 2.0 ** np.arange(30, 36)).half_width_log
    assert np.all(np.diff(far) > 0)
    other = model.estimate(_group(Collective.ALL_REDUCE, 4), nbytes[~known])
    assert np.median(other.half_width_log) > np.median(transfers.half_width_log)


def test_nodes_follow_from_the_span_where_a_node_is_known() -> None:
    assert [num_nodes(span, 4) for span in (1, 4, 5, 13)] == [1, 1, 2, 4]
    assert num_nodes(64, None) == 1

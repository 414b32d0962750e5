"""Planted latency and bandwidth come back, and carry over to groups that were not measured."""

from __future__ import annotations

import numpy as np
import pytest

from forerun.calib.fit.calibration import Calibration, calibrate
from forerun.calib.fit.collectives import Link
from forerun.calib.fit.estimates import Source
from forerun.calib.workload.collectives import Collective, CollectiveCall, GroupRole

LINK = Link(step_s=30e-6, bus_bytes_per_s=2e9)
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
    return LINK.time_s(call.collective, call.num_ranks, call.nbytes)


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
    found = fit([_call(n) for n in SIZES]).collectives([call])
    assert found.time_s[0] == pytest.approx(_true_s(call), rel=0.15)
    assert found.sources == (Source.EXTRAPOLATED,)


def test_sizes_between_are_fitted_and_beyond_extrapolated(fit) -> None:
    calibration = fit([_call(n) for n in SIZES])
    calls = [_call(SIZES[2]), _call(3 << 20), _call(1 << 28), _call(1 << 34)]
    found = calibration.collectives(calls)
    assert found.sources == (
        Source.MEASURED,
        Source.FITTED,
        Source.EXTRAPOLATED,
        Source.EXTRAPOLATED,
    )
    assert found.time_s == pytest.approx([_true_s(c) for c in calls], rel=0.2)
    assert np.all(np.diff(found.sigma_log) > 0)


def test_one_size_alone_carries_its_neighbours(fit) -> None:
    """Every alpha-beta law through one point lies between all latency and all bandwidth."""
    known_s = _true_s(_call(1 << 20))
    found = fit([_call(1 << 20)], noise=0.0).collectives([_call(1 << 19), _call(1 << 22)])
    assert known_s / 2 <= found.time_s[0] <= known_s
    assert known_s <= found.time_s[1] <= known_s * 4


def test_a_receive_is_the_other_end_of_a_send(fit) -> None:
    calibration = fit([_call(1 << 20, collective=Collective.SEND, role=GroupRole.PP)])
    calls = [
        _call(1 << 20, collective=kind, role=GroupRole.PP, num_ranks=n)
        for kind in (Collective.SEND, Collective.RECV)
        for n in (2, 4)
    ]
    found = calibration.collectives(calls)
    assert set(found.sources) == {Source.MEASURED}
    assert len(set(found.time_s.tolist())) == 1


def test_nothing_sampled_is_a_wide_prior_and_one_rank_costs_nothing(fit) -> None:
    found = fit([]).collectives([_call(1 << 20), _call(1 << 20, num_ranks=1)])
    assert found.sources[0] is Source.PRIOR
    assert found.sigma_log[0] >= 0.5
    assert found.time_s[0] > 0
    assert (found.time_s[1], found.sigma_log[1]) == (0.0, 0.0)


def test_a_bound_is_never_taken_for_a_measurement(fit) -> None:
    found = fit([_call(1 << 20)], is_bound=True).collectives([_call(1 << 20)])
    assert found.sources != (Source.MEASURED,)
    assert found.sigma_log[0] > 0.05


def test_transfers_never_get_faster_with_size(fit) -> None:
    calibration = fit([_call(n) for n in SIZES], noise=0.02)
    times = calibration.collectives([_call(1 << k) for k in range(8, 32)]).time_s
    assert np.all(np.diff(times) >= -1e-2 * times[:-1])

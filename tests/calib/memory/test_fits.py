"""Probability that a layout fits, and the verdict on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from forerun.calib.memory.peak import MemoryEstimate, Verdict, fit_probability, memory, verdict
from forerun.calib.workload.config import RunConfig

Layout = Callable[..., RunConfig]


def test_verdicts_follow_the_probability_of_fitting(layout: Layout) -> None:
    estimate = memory(layout())
    total = estimate.total_nbytes
    assert verdict(estimate, None) is Verdict.UNKNOWN
    for share, expected, calibrated in (
        (0.80, Verdict.FITS, Verdict.FITS),
        (0.92, Verdict.TIGHT, Verdict.FITS),
        (1.0, Verdict.DOES_NOT_FIT, Verdict.DOES_NOT_FIT),
    ):
        capacity = round(total / share)
        assert verdict(estimate, capacity) is expected
        assert verdict(estimate, capacity, is_calibrated=True) is calibrated
    grown = replace(estimate, offset_nbytes=total)
    assert verdict(grown, round(1.5 * total)) is Verdict.DOES_NOT_FIT


def test_shares_that_never_ran_out_are_all_but_certain(layout: Layout) -> None:
    """None of 454 runs below 0.80 (Fujii et al., 2411.06465): at 95 % at most 0.7 % do."""
    for device in ("cpu", "H100"):
        estimate = memory(layout(dp=2, device=device))
        # Communicators are nothing beside a model of a usual size.
        large = replace(estimate, weights_nbytes=50 * 2**30)
        value = fit_probability(large, round(large.total_nbytes / 0.80))
        assert value > 1 - 3 / 454


@given(share=st.floats(0.3, 1.5), more=st.floats(0, 0.5))
def test_more_room_never_makes_it_less_likely(share: float, more: float) -> None:
    estimate = MemoryEstimate(
        stage=0,
        weights_nbytes=10**10,
        grads_nbytes=0,
        optimizer_nbytes=0,
        activations_nbytes=10**10,
        logits_nbytes=0,
        overhead_nbytes=10**9,
    )
    capacity = round(estimate.total_nbytes / share)
    least, most = (fit_probability(estimate, round(capacity * by)) for by in (1, 1 + more))
    assert 0 <= least <= most <= 1
